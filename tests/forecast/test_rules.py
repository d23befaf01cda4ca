import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farl.errors import ConfigError
from farl.forecast import FORECASTERS, ForecastConfig, aim_of, init, plan
from farl.forecast.auto import Memo
from farl.forecast.least_squares import minimum_norm
from farl.forecast.rules import momentum_factor

from .paths import dense, follow, leaves_of, momentum_path, polynomial_path, settings, slow_least_squares

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
    "least_squares_prior": {1: None, 2: None},
    "momentum": {1: None, 2: None},
}


def test_the_exactness_table_covers_every_rule():
    assert set(EXACT) == set(FIXED)


@pytest.mark.parametrize("rule", FIXED)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("horizon", [1, 2, 3])
@pytest.mark.parametrize("degree", [0, 1])
def test_exact_on_its_own_model_class_and_not_beyond(rule, order, horizon, degree):
    path = polynomial_path(degree, 12)
    config = settings(rule=rule, lags=3, order=order, max_horizon=3, ridge=0.05)
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
        assert torch.equal(dense(state, plan(state, horizon), leaves_of(torch.arange(9.0))), torch.arange(9.0))
    path = momentum_path(6)
    state, _ = follow(path, config)
    assert not plan(state, 0).moves
    assert torch.equal(dense(state, plan(state, 0), leaves_of(path[-1])), path[-1])


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("lags", [3, 4, 6])
@pytest.mark.parametrize("horizon", [1, 3, 5])
@pytest.mark.parametrize("rule", ["polynomial", "least_squares"])
def test_order_p_is_exact_below_degree_p_for_any_lags_and_horizon(order, lags, horizon, rule):
    for degree in range(order):
        path = polynomial_path(degree, 20)
        state, _ = follow(
            path[: 20 - horizon + 1], settings(rule=rule, lags=lags, order=order, max_horizon=horizon, ridge=0.05)
        )
        error = (dense(state, plan(state, horizon)) - path[20].float()).norm()
        assert error / (path[20] - path[20 - horizon]).norm() < 2e-4


@pytest.mark.parametrize("rule", ["polynomial", "least_squares"])
def test_a_fractional_horizon_is_exact_on_polynomials_continued_between_versions(rule):
    """Constant drift reaches theta + 2.5 D; linear drift the quadratic through the versions, Faulhaber's sums."""
    steady = polynomial_path(0, 12)
    state, _ = follow(steady, settings(rule=rule, lags=3, max_horizon=3))
    between = steady[12] + 2.5 * (steady[12] - steady[11])
    assert torch.allclose(dense(state, plan(state, 2.5)), between.float(), atol=1e-4)
    state, _ = follow(polynomial_path(1, 12), settings(rule="polynomial", lags=3, order=2, max_horizon=3))
    moves = polynomial_path(1, 12).diff(dim=0)
    slope = moves[-1] - moves[-2]
    expected = polynomial_path(1, 12)[-1] + 2.5 * moves[-1] + 2.5 * 3.5 / 2 * slope
    assert torch.allclose(dense(state, plan(state, 2.5)), expected.float(), atol=1e-4)


@pytest.mark.parametrize("rule", ["copy", "half", "mean", "polynomial", "least_squares_off", "least_squares_prior"])
def test_a_random_horizon_gives_the_mean_of_its_forecasts(rule):
    """The fit shares its window, so it is checked where every horizon has the same targets: a path without noise."""
    path = polynomial_path(0, 16)
    state, _ = follow(path, settings(rule=rule, lags=2, max_horizon=3, ridge=0.0, cold_updates=0.0))
    mixed = dense(state, plan(state, {1: 3, 3: 1}))
    parts = 0.75 * dense(state, plan(state, 1)) + 0.25 * dense(state, plan(state, 3))
    assert torch.allclose(mixed, parts, atol=1e-4)


def test_minimum_norm_by_hand():
    for lags, order, horizon, expected in (
        (2, 2, 1, [2, -1]),
        (4, 1, 1, [0.25] * 4),
        (4, 1, 3, [0.75] * 4),
        (3, 2, 1, [4 / 3, 1 / 3, -2 / 3]),
        (2, 2, 2, [5, -3]),  # sum 2, first moment 1 + 2 = -a2
        (2, 2, 1.5, [1.5 + 1.875, -1.875]),
        (2, 2, {1: 1, 2: 1}, [1.5 + 2, -2]),  # the mean of (2, -1) and (5, -3)
    ):
        assert minimum_norm(lags, order, aim_of(horizon)).tolist() == pytest.approx(expected)


def test_the_momentum_factor_by_hand():
    assert momentum_factor(0.9, 1, (1.0,)) == pytest.approx(0.9 * 0.1 / 0.19)
    assert momentum_factor(0.9, 10**6, (1.0, 1.0)) == pytest.approx(0.9 + 0.81)
    assert momentum_factor(0.5, 1, (1.0, 0.5)) == pytest.approx(0.25 / 0.75 + 0.5 * 0.125 / 0.875)
    assert momentum_factor(0.0, 3, (1.0,)) == 0.0


def test_a_rule_pulled_by_momentum_starts_there_and_learns_away_from_it():
    path = momentum_path(60, beta=0.5)
    start, _ = follow(path[:2], settings(rule="least_squares_prior"))
    known = replace(start, momentum=0.9, num_steps=1, memo=Memo())
    assert plan(known, 1).coefficients == pytest.approx((0.9 * 0.1 / 0.19,))
    assert plan(start, 1).coefficients == (0.5,), "half where the optimizer does not tell its momentum"
    late, _ = follow(path, settings(rule="least_squares_prior", lags=1))
    assert plan(late, 1).coefficients[0] == pytest.approx(0.5, abs=0.1)


def test_copy_half_and_mean_by_hand():
    path = torch.tensor([[0.0] * 9, [1.0] * 9, [4.0] * 9])
    for rule, horizon, expected in (("copy", 2, 4 + 2 * 3), ("half", 1, 4 + 1.5), ("mean", 1, 4 + (3 + 1) / 2)):
        state, _ = follow(path, settings(rule=rule, max_horizon=2))
        assert dense(state, plan(state, horizon)).tolist() == pytest.approx([expected] * 9)


@examples(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000), length=st.integers(1, 30), horizon=st.integers(1, 3), lags=st.integers(1, 4),
    order=st.integers(1, 2), consistency=st.sampled_from(["hard", "soft", "off"]), window=st.sampled_from([3, 8, 48]),
)  # fmt: skip
def test_the_fit_equals_its_slow_twin(seed, length, horizon, lags, order, consistency, window):
    order = min(order, lags)
    config = settings(
        ridge=0.05,
        forgetting=0.9,
        rule="least_squares",
        lags=lags,
        order=order,
        consistency=consistency,
        window=window,
        max_horizon=horizon,
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


@examples(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1.0, 100.0]), rule=st.sampled_from(FIXED))
def test_scaling_the_displacements_scales_the_forecast(seed, scale, rule):
    path = momentum_path(14, seed=seed)
    config = settings(rule=rule)
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
        ({"history_dtype": "float16"}, "'float32', 'bfloat16' or 'int8'"),
        ({"metric": "fisher"}, "'euclidean', 'adam' or 'sharp'"),
        ({"grouping": "head"}, "'all', 'kind' or 'layer'"),
        ({"source": "gradient"}, "'weights' or 'optimizer'"),
        ({"sharp_fraction": 0.0}, r"sharp_fraction=0.0: must be in \(0.0, 1.0\]"),
        ({"assumed_gradient": 2}, "assumed_gradient=2: must be in"),
        ({"sample_entries": 0}, "sample_entries=0: must be an integer of 1 or more"),
        ({"bank": ()}, "at least one rule"),
        ({"bank": ("auto",)}, "bank: auto has no coefficients"),
        ({"bank": ("moments",)}, "bank: moments has no coefficients"),
        ({"ridge": math.nan}, "ridge=nan"),
    ],
)
def test_settings_that_cannot_work_say_so(settings, words):
    with pytest.raises(ConfigError, match=words):
        init(leaves_of(torch.zeros(9)), ForecastConfig(**settings))


@pytest.mark.parametrize(
    ("horizon", "words"),
    [
        (-1, "horizon=-1: must be a number of updates, 0 or more"),
        (True, "horizon=True: must be a number"),
        (math.nan, "horizon=nan: must be a number"),
        ("1", "horizon='1': must be a number"),
        (4, "horizon=4: must be from 0 to max_horizon=3 updates"),
        (3.5, "horizon=3.5: must be from 0 to max_horizon=3"),
        ({1: 0.5, 4: 0.5}, "must be from 0 to max_horizon=3"),
        ({1: -1.0}, "the share of 1 is -1.0"),
        ({1: 0.0}, "no share is above 0"),
    ],
)
def test_a_horizon_that_cannot_work_says_so(horizon, words):
    state = init(leaves_of(torch.zeros(9)), ForecastConfig(max_horizon=3))
    with pytest.raises(ConfigError, match=words):
        plan(state, horizon)
