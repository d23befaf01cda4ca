"""FARL: future-aligned reinforcement learning for asynchronous LLM post-training.

`import farl` needs torch alone. The training command and its engines live behind the extra `train`.
"""

from farl import correct, forecast
from farl.core.types import PolicyStamp
from farl.errors import FarlError
from farl.forecast import ForecastConfig, Forecaster

__all__ = ["FarlError", "ForecastConfig", "Forecaster", "PolicyStamp", "correct", "forecast"]

__version__ = "0.1.0"
