"""Forecasts of the learner's weights: a pure functional core and one small class over it.

`init`, `observe`, `plan`, `record`, `stream` and `rewind` act on an explicit `ForecastState`; `Forecaster`
holds that state for a training loop. A forecast is a few coefficients over recent displacements, so it
works on whole trees, on shards and on streams of leaves alike. Symbols follow the method: `theta[t]` is
the learner at version t, `D[j] = theta[j] - theta[j-1]`, K lags, horizon h, order p.
"""

from farl.forecast.aim import Aim, Horizon, aim_of
from farl.forecast.config import ForecastConfig
from farl.forecast.forecaster import Forecaster
from farl.forecast.gate import PolicyEvidence
from farl.forecast.gram import GramBand
from farl.forecast.moments import Moments
from farl.forecast.observe import Observation, observe
from farl.forecast.plan import ForecastPlan, ScoredForecast
from farl.forecast.planning import plan
from farl.forecast.rules import FORECASTERS
from farl.forecast.state import ForecastState, init, record
from farl.forecast.stream import rewind, stream

__all__ = [
    "FORECASTERS",
    "Aim",
    "ForecastConfig",
    "ForecastPlan",
    "ForecastState",
    "Forecaster",
    "GramBand",
    "Horizon",
    "Moments",
    "Observation",
    "PolicyEvidence",
    "ScoredForecast",
    "aim_of",
    "init",
    "observe",
    "plan",
    "record",
    "rewind",
    "stream",
]
