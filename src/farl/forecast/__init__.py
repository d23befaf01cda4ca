"""Forecasts of the learner's weights: a pure functional core and one small class over it.

`init`, `observe`, `plan`, `record`, `stream` and `rewind` act on an explicit `ForecastState`; `Forecaster`
holds that state for a training loop. A forecast is a few coefficients over recent displacements, so it
works on whole trees, on shards and on streams of leaves alike. Symbols follow the method: `theta[t]` is
the learner at version t, `D[j] = theta[j] - theta[j-1]`, K lags, horizon h, order p.
"""

from farl.forecast.config import ForecastConfig
from farl.forecast.forecaster import Forecaster
from farl.forecast.gate import PolicyEvidence
from farl.forecast.gram import GramBand
from farl.forecast.plan import ForecastPlan, ScoredForecast
from farl.forecast.rules import FORECASTERS
from farl.forecast.state import ForecastState, init, observe, plan, record, rewind, stream

__all__ = [
    "FORECASTERS",
    "ForecastConfig",
    "ForecastPlan",
    "ForecastState",
    "Forecaster",
    "GramBand",
    "PolicyEvidence",
    "ScoredForecast",
    "init",
    "observe",
    "plan",
    "record",
    "rewind",
    "stream",
]
