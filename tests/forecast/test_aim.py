"""Where a forecast aims: whole, fractional and random horizons, against plain sums."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farl
from farl.errors import ConfigError
from farl.forecast import aim_of
from farl.forecast.aim import horizon_key

from .paths import make_learner
from .test_moments import OPTIMIZERS


@pytest.mark.parametrize(
    ("horizon", "mean", "reach", "shares"),
    [
        (1, 1, 1, (1.0,)),
        (3, 3, 3, (1.0, 1.0, 1.0)),
        (2.25, 2.25, 3, (1.0, 1.0, 0.25)),
        ({1: 1, 3: 1}, 2, 3, (1.0, 0.5, 0.5)),
        ({1: 3, 2: 1}, 1.25, 2, (1.0, 0.25)),
        ({0: 1, 2: 1}, 1, 2, (0.5, 0.5)),
        ({2: 5.0, 7: 0.0}, 2, 2, (1.0, 1.0)),
    ],
)
def test_shares_by_hand(horizon, mean, reach, shares):
    aim = aim_of(horizon)
    assert (aim.horizon, aim.reach) == (mean, reach)
    assert aim.shares == pytest.approx(shares)


@given(counts=st.dictionaries(st.integers(0, 9), st.floats(0.01, 100), min_size=1), q=st.integers(0, 5))
def test_power_sums_of_a_random_lag_are_their_mean(counts, q):
    total = sum(counts.values())
    expected = sum(p / total * sum(i**q for i in range(1, h + 1)) for h, p in counts.items())
    aim = aim_of(counts)
    assert aim.power_sum(q) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert sum(aim.shares) == pytest.approx(aim.horizon)


@pytest.mark.parametrize("horizon", [np.int64(2), np.float32(1.5), Fraction(3, 2), {np.int64(1): np.float64(2.0)}])
def test_numbers_of_any_library_are_horizons(horizon):
    aim = aim_of(horizon)
    assert all(type(h) in (int, float) and type(p) is float for h, p in aim.points)


@pytest.mark.parametrize(
    ("horizon", "message"),
    [
        (-1, "horizon=-1: must be a number of updates, 0 or more"),
        (math.nan, "horizon=nan: must be"),
        (math.inf, "horizon=inf: must be"),
        (True, "horizon=True: must be"),
        ("2", "horizon='2': must be"),
        ({1: -0.5, 2: 1.0}, "the share of 1 is -0.5; shares must be 0 or more"),
        ({1: math.inf}, "the share of 1 is inf"),
        ({1: 0.0}, "no share is above 0"),
        ({}, "no share is above 0"),
    ],
)
def test_horizons_that_cannot_be_are_named_when_the_forecaster_is_made(horizon, message):
    with pytest.raises(ConfigError, match=message):
        aim_of(horizon)
    with pytest.raises(ConfigError, match=message):
        make_learner(OPTIMIZERS["adamw"], horizon=horizon)


def test_a_default_horizon_beyond_max_horizon_is_refused_before_training():
    with pytest.raises(ConfigError, match="horizon=3: must be from 0 to max_horizon=2 updates; raise max_horizon"):
        make_learner(OPTIMIZERS["adamw"], horizon=3, config=farl.ForecastConfig(max_horizon=2))
    _, _, forecaster = make_learner(OPTIMIZERS["adamw"], horizon={1: 1, 4: 1})
    assert forecaster.config.max_horizon == 4, "sized by the horizon where it is not given"
    with pytest.raises(ConfigError, match="horizon=5: must be from 0 to max_horizon=4"):
        forecaster.plan(5)


def test_evidence_is_kept_by_the_nearest_half_update():
    keys = [horizon_key(h) for h in (0.1, 0.5, 0.7, 1, 1.2, 1.3, 2.0, 3.9)]
    assert keys == [0.5, 0.5, 0.5, 1, 1, 1.5, 2, 4]
    assert all(isinstance(k, int) == (k == int(k)) for k in keys)
