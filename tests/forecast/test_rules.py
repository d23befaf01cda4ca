import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farl.errors import ConfigError
from farl.forecast import FORECASTERS, ForecastConfig, init, plan
from farl.forecast.least_squares import minimum_norm

from .paths import dense, follow, leaves_of, momentum_path, polynomial_path, slow_least_squares

FIXED = sorted(name for name, rule in FORECASTERS.items() if rule.coefficients is not None)
# highest degree of a polynomial displacement sequence on which a rule is exact, given order 1 or 2 (None: never)
EXACT = {
    "stale": {1: None, 2: None},
    "half": {1: None, 2: None},
    "copy": {1: 0, 2: 0},
    "mean": {1: 0, 2: 0},
    "polynomial": {1: 0, 2: 1},
    "least_squares": {1: 0, 2: 1},
    "least_squares_soft": {1: 0, 2: 1},  # data and pull agree there
    "least_squares_off": {1: None, 2: None},
}


def test_the_exactness_table_covers_every_rule():
    assert set(EXACT) == set(FIXED)


@pytest.mark.parametrize("rule", FIXED)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("horizon", [1, 2, 3])
@pytest.mark.parametrize("degree", [0, 1])
def test_exact_on_its_own_model_class_and_not_beyond(rule, order, horizon, degree):
    path = polynomial_path(degree, 12)
    config = ForecastConfig(rule=rule, lags=3, order=order, max_horizon=3)
    state, _ = follow(path[: 12 - horizon + 1], config)
    error = (dense(state, plan(state, horizon)) - path[12].float()).norm() / (path[12] - path[12 - horizon]).norm()
    allowed = EXACT[rule][order]
    if allowed is not None and degree <= allowed:
        assert error < 1e-5
    else:
        assert error > 1e-3


@pytest.mark.parametrize("rule", sorted(FORECASTERS))
def test_nothing_moves_at_horizon_0_or_before_the_first_displacement(rule):
    config = ForecastConfig(rule=rule, max_horizon=2)
    state = init(leaves_of(torch.arange(9.0)), config)
    for horizon in (0, 1, 2):
        assert not plan(state, horizon).moves
        assert torch.equal(dense(state, plan(state, horizon)), torch.arange(9.0))
    state, _ = follow(momentum_path(6), config)
    assert not plan(state, 0).moves
    assert torch.equal(dense(state, plan(state, 0)), momentum_path(6)[-1])


def test_minimum_norm_by_hand():
    assert minimum_norm(2, 2, 1).tolist() == pytest.approx([2, -1])
    assert minimum_norm(4, 1, 1).tolist() == pytest.approx([0.25] * 4)
    assert minimum_norm(4, 1, 3).tolist() == pytest.approx([0.75] * 4)
    assert minimum_norm(3, 2, 1).tolist() == pytest.approx([4 / 3, 1 / 3, -2 / 3])
    assert minimum_norm(2, 2, 2).tolist() == pytest.approx([5, -3])  # sum 2, first moment 1 + 2 = -a2


def test_copy_half_and_mean_by_hand():
    path = torch.tensor([[0.0] * 9, [1.0] * 9, [4.0] * 9])
    for rule, horizon, expected in (("copy", 2, 4 + 2 * 3), ("half", 1, 4 + 1.5), ("mean", 1, 4 + (3 + 1) / 2)):
        state, _ = follow(path, ForecastConfig(rule=rule, max_horizon=2))
        assert dense(state, plan(state, horizon)).tolist() == pytest.approx([expected] * 9)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000), length=st.integers(1, 30), horizon=st.integers(1, 3), lags=st.integers(1, 4),
    order=st.integers(1, 2), consistency=st.sampled_from(["hard", "soft", "off"]), window=st.sampled_from([3, 8, 48]),
)  # fmt: skip
def test_the_fit_equals_its_slow_twin(seed, length, horizon, lags, order, consistency, window):
    order = min(order, lags)
    config = ForecastConfig(
        rule="least_squares", lags=lags, order=order, consistency=consistency, window=window, max_horizon=horizon
    )
    path = momentum_path(length, seed=seed)
    state, _ = follow(path, config)
    fitted = plan(state, horizon).coefficients
    used = min(lags, length)
    expected = slow_least_squares(
        path, horizon=horizon, lags=used, order=min(order, used), forgetting=config.forgetting, window=window,
        ridge=config.ridge, consistency=consistency,
    )  # fmt: skip
    if not fitted:
        assert abs(expected).max() < 1e-6
    else:
        assert fitted == pytest.approx(list(expected), rel=1e-3, abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1.0, 100.0]), rule=st.sampled_from(FIXED))
def test_scaling_the_displacements_scales_the_forecast(seed, scale, rule):
    path = momentum_path(14, seed=seed)
    config = ForecastConfig(rule=rule)
    one, other = follow(path, config)[0], follow(scale * path, config)[0]
    assert plan(other, 1).coefficients == pytest.approx(plan(one, 1).coefficients, rel=1e-3, abs=1e-4)


def test_consistent_coefficients_sum_to_the_horizon():
    for rule in ("copy", "mean", "polynomial", "least_squares"):
        state, _ = follow(momentum_path(20), ForecastConfig(rule=rule, max_horizon=3))
        for horizon in (1, 2, 3):
            assert sum(plan(state, horizon).coefficients) == pytest.approx(horizon, abs=1e-8)


def test_damping_multiplies_the_coefficients_of_a_fixed_rule():
    path = momentum_path(8)
    full, _ = follow(path, ForecastConfig(rule="copy"))
    damped, _ = follow(path, ForecastConfig(rule="copy", damping=0.9))
    assert plan(damped, 1).coefficients == pytest.approx([0.9 * a for a in plan(full, 1).coefficients])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "magic"}, "rule='magic': no such rule; known: auto, copy"),
        ({"rule": "copi"}, "Did you mean 'copy'"),
        ({"lags": 0}, "lags=0: must be an integer of 1 or more"),
        ({"order": 5, "lags": 4}, "order=5: order p needs at least p lags"),
        ({"forgetting": 0.0}, r"forgetting=0.0: must be in \(0.0, 1.0\]"),
        ({"damping": 1.5}, r"damping=1.5: must be in \[0.0, 1.0\]"),
        ({"consistency": "none"}, "'hard', 'soft' or 'off'"),
        ({"history_dtype": "float16"}, "'float32' or 'bfloat16'"),
        ({"bank": ()}, "at least one rule"),
        ({"bank": ("auto",)}, "auto cannot choose itself"),
        ({"ridge": math.nan}, "ridge=nan"),
    ],
)
def test_settings_that_cannot_work_say_so(settings, words):
    with pytest.raises(ConfigError, match=words):
        init(leaves_of(torch.zeros(9)), ForecastConfig(**settings))


@pytest.mark.parametrize("horizon", [-1, 1.5, True, 4])
def test_a_horizon_that_cannot_work_says_so(horizon):
    state = init(leaves_of(torch.zeros(9)), ForecastConfig(max_horizon=3))
    with pytest.raises(ConfigError, match="must be a whole number of updates from 0 to max_horizon=3"):
        plan(state, horizon)
