import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farl.errors import ConfigError, ShapeError, StateError
from farl.forecast import ForecastPlan, GramBand, history, init, observe, plan, record, rewind, stream
from farl.forecast.plan import ALL
from farl.forecast.state import EUCLIDEAN

from .paths import dense, follow, leaves_of, momentum_path, settings


def test_inner_products_and_residuals_from_scalars_equal_dense_ones():
    path = momentum_path(20).double()
    state, _ = follow(path, settings(lags=4, max_horizon=3))
    moves = path[1:] - path[:-1]
    for i in range(12, 20):
        for j in range(i - 5, i + 1):
            assert state.gram.inner(i + 1, j + 1) == pytest.approx(float(moves[i] @ moves[j]), rel=1e-4, abs=1e-6)
    coefficients = (0.7, -0.2, 0.4)
    squared, stale = state.gram.squared_error(coefficients, base=15, shares=(1.0, 1.0, 1.0))
    forecast = path[15] + sum(a * moves[15 - k] for k, a in enumerate(coefficients, start=1))
    assert squared == pytest.approx(float((path[18] - forecast).square().sum()), rel=1e-4)
    assert stale == pytest.approx(float((path[18] - path[15]).square().sum()), rel=1e-4)


def test_scalars_outlive_their_tensors():
    config = settings(lags=2, window=30)
    state, _ = follow(momentum_path(40), config)
    assert state.num_held == config.capacity == 2
    assert len(state.gram.rows) > 30
    assert all(ring.capacity == 2 for ring in state.rings.values())


@examples(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), horizon=st.integers(1, 4), rule=st.sampled_from(["copy", "least_squares", "auto"]))
def test_every_shipped_forecast_is_scored_by_its_real_residual(seed, horizon, rule):
    path = momentum_path(14, seed=seed)
    config = settings(rule=rule, max_horizon=4)
    state = init(leaves_of(path[0]), config)
    shipped, scored = {}, []
    for t in range(len(path)):
        if t:
            state, seen = observe(state, leaves_of(path[t]))
            scored += seen.scored
        forecast = plan(state, horizon)
        shipped[t] = dense(state, forecast).double()
        state = record(state, forecast)
    assert [s.plan.base_version for s in scored] == list(range(14 - horizon + 1))
    for score in scored:
        base, target = score.plan.base_version, score.plan.target_version
        assert score.residual == pytest.approx(float((path[target] - shipped[base]).norm()), rel=2e-3, abs=1e-4)
        assert score.displacement == pytest.approx(float((path[target] - path[base]).norm()), rel=1e-3, abs=1e-5)
        assert score.error_ratio == pytest.approx(score.residual / score.displacement)


def test_a_score_is_made_before_the_forecast_can_see_its_target():
    path = momentum_path(10)
    _, scored = follow(path, settings(rule="least_squares"), ship_horizon=1)
    for score in scored:
        past, _ = follow(path[: score.plan.base_version + 1], settings(rule="least_squares"))
        assert plan(past, 1).coefficients == pytest.approx(score.plan.coefficients)


def test_streamed_equals_dense_formula_and_is_cast_last():
    path = momentum_path(8)
    state, _ = follow(path, settings(rule="mean", lags=3))
    forecast = plan(state, 1)
    moves = path[1:] - path[:-1]
    expected = path[-1] + sum(a * moves[-k] for k, a in enumerate(forecast.coefficients, start=1))
    assert torch.allclose(dense(state, forecast), expected, atol=1e-6)
    half = torch.cat([leaf for _, leaf in stream(state, forecast, dtype=torch.bfloat16)])
    assert torch.equal(half, dense(state, forecast).bfloat16())


def test_large_leaves_are_worked_on_in_chunks_with_the_same_result(monkeypatch):
    torch.manual_seed(0)
    path = torch.randn(6, 1000).cumsum(0)
    config = settings(rule="least_squares")
    results = []
    for chunk in (1 << 16, 128):
        monkeypatch.setattr(history, "CHUNK", chunk)
        state, _ = follow(path, config)
        results.append((plan(state, 1).coefficients, dense(state, plan(state, 1))))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


def test_leaf_order_and_splitting_do_not_matter_and_shards_add():
    path = momentum_path(12)
    config = settings(rule="least_squares")
    whole, _ = follow(path, config)
    shuffled = init(leaves_of(path[0]), config)
    shards = [init([("x", path[0, :5])], config), init([("x", path[0, 5:])], config)]
    for point in path[1:]:
        shuffled, _ = observe(shuffled, leaves_of(point)[::-1])
        shards = [observe(s, [("x", part)])[0] for s, part in zip(shards, (point[:5], point[5:]), strict=True)]
    assert plan(shuffled, 1).coefficients == pytest.approx(plan(whole, 1).coefficients)
    added = {}
    for key in (EUCLIDEAN, ALL):
        pairs = zip(*(s.grams[key].rows for s in shards), strict=True)
        rows = tuple(tuple(x + y for x, y in zip(a, b, strict=True)) for a, b in pairs)
        added[key] = GramBand(newest=shards[0].version, rows=rows)
    joined = plan(replace(shards[0], grams=added), 1)
    assert joined.coefficients == pytest.approx(plan(whole, 1).coefficients, rel=1e-4)


def test_rewind_rebuilds_past_weights():
    path = momentum_path(10)
    state, _ = follow(path, settings(lags=4))
    for back in range(5):
        rebuilt = torch.cat([leaf for _, leaf in rewind(state, back)])
        assert torch.allclose(rebuilt, path[10 - back], atol=1e-6)
    with pytest.raises(StateError, match="num_updates=5: 4 displacements are held"):
        list(rewind(state, 5))


def test_displacements_come_from_fp32_even_if_stored_in_bf16():
    """Trap 1: 99 % of an update vanishes in bf16 snapshots; 0.4 % is lost by storing the difference."""
    torch.manual_seed(0)
    start, move = torch.randn(512), 1e-5 * torch.randn(512)
    path = torch.stack([start + j * move for j in range(4)])
    state, _ = follow(path, settings(rule="copy", history_dtype="bfloat16"))
    forecast = dense(state, plan(state, 1))
    target = start + 4 * move
    assert (forecast - target).norm() < 0.02 * move.norm()
    snapshots = path.bfloat16().float()
    naive = path[-1] + (snapshots[-1] - snapshots[-2])
    assert (naive - target).norm() > 0.9 * move.norm()


def test_a_displacement_that_is_not_finite_holds_until_history_is_back():
    path = momentum_path(8)
    state, _ = follow(path, settings(rule="copy"), ship_horizon=1)
    state = record(state, plan(state, 1))
    broken = path[-1].clone()
    broken[3] = math.inf
    state, seen = observe(state, leaves_of(broken))
    assert not seen.finite
    assert seen.scored == ()
    assert state.num_nonfinite == 1
    assert plan(state, 1).held == "no displacement observed yet"
    state, seen = observe(state, leaves_of(path[-1]))
    assert not seen.finite, "the step back from infinity is not finite either"
    state, _ = observe(state, leaves_of(path[-1] + 1))
    assert torch.allclose(dense(state, plan(state, 1)), path[-1] + 2)


def test_versions_out_of_order_and_consumed_states_are_refused():
    path = momentum_path(4)
    config = settings(rule="copy")
    state = init(leaves_of(path[0]), config, version=7)
    after, _ = observe(state, leaves_of(path[1]), version=8)
    for bad in (8, 10):
        with pytest.raises(StateError, match="the next is 9"):
            observe(after, leaves_of(path[2]), version=bad)
    with pytest.raises(StateError, match="consumed by observe"):
        observe(state, leaves_of(path[2]))
    with pytest.raises(StateError, match="consumed by observe"):
        list(stream(state, ForecastPlan(base_version=7, horizon=1, shares=(1.0,), rule="copy")))
    old = plan(after, 1)
    later, _ = observe(after, leaves_of(path[2]))
    with pytest.raises(StateError, match="make a new plan"):
        list(stream(later, old))
    with pytest.raises(StateError, match="ship a plan before"):
        record(later, old)


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ([("a", torch.zeros(4))], "1 missing, first 'b'"),
        ([("a", torch.zeros(4)), ("b", torch.zeros(5)), ("c", torch.zeros(1))], "leaf 'c': not among"),
        ([("a", torch.zeros(4)), ("a", torch.zeros(4))], "leaf 'a': given twice"),
        ([("a", torch.zeros(3)), ("b", torch.zeros(5))], "leaf 'a': 3 entries, 4 at init"),
    ],
)
def test_leaves_that_do_not_fit_are_named(leaves, words):
    state = init(leaves_of(torch.zeros(9)), settings())
    with pytest.raises(ShapeError, match=words):
        observe(state, leaves)
    observe(state, leaves_of(torch.ones(9)))


def test_leaves_that_cannot_be_forecast_are_refused():
    with pytest.raises(ConfigError, match="only floating-point"):
        init([("ids", torch.zeros(3, dtype=torch.int64))], settings())
    with pytest.raises(ConfigError, match="no trained weight"):
        init([], settings())


def test_no_displacement_at_all_is_harmless():
    path = torch.ones(6, 9)
    for rule in ("copy", "least_squares", "least_squares_off", "auto"):
        state, scored = follow(path, settings(rule=rule), ship_horizon=1)
        assert torch.equal(dense(state, plan(state, 1)), path[0])
        assert all(math.isnan(s.error_ratio) for s in scored)


def test_the_plan_record_survives_json():
    forecast = ForecastPlan(
        base_version=3, horizon=2, shares=(1.0, 1.0), rule="copy", terms={ALL: (0.1, 1 / 3)}, predicted_error=0.4,
        scores={"copy": 0.25}, shadow={"mlp": (1.0,)},
    )  # fmt: skip
    assert ForecastPlan.from_json(forecast.to_json()) == forecast
    stamp = forecast.stamp("bfloat16")
    assert (stamp.base_version, stamp.target_version, stamp.horizon) == (3, 5, 2)
    assert stamp.is_forecast


def test_a_fractional_forecast_is_scored_against_the_point_between_two_versions():
    path = momentum_path(12)
    state, _ = follow(path[:11], settings(rule="copy", max_horizon=2))
    forecast = plan(state, 1.5)
    sent = dense(state, forecast)
    state = record(state, forecast)
    state, first = observe(state, leaves_of(path[11]))
    assert first.scored == ()
    state, second = observe(state, leaves_of(path[12]))
    target = (path[11] + path[12]) / 2
    assert second.scored[0].residual == pytest.approx(float((target - sent).norm()), rel=1e-3)
    assert second.scored[0].displacement == pytest.approx(float((target - path[10]).norm()), rel=1e-3)


def test_known_learning_rates_scale_what_is_forecast():
    """Displacements at unit rate are constant: whatever the rates were and will be, the forecast is exact."""
    drift, rates = torch.randn(9), [0.0, 0.5, 1.0, 2.0, 0.5, 0.25]
    for rule in ("copy", "mean", "polynomial", "least_squares", "least_squares_off"):
        point = torch.zeros(9)
        state = init(leaves_of(point), settings(rule=rule, lags=3, max_horizon=2, ridge=0.0))
        for lr in rates:
            point = point + lr * drift
            state, _ = observe(state, leaves_of(point), lr=lr)
        for coming, ahead in (((4.0, 1.0), 5.0), ((4.0,), 8.0), ((), 0.5)):
            forecast = dense(state, plan(state, 2, coming_lrs=coming))
            assert torch.allclose(forecast, point + ahead * drift, atol=1e-5), (rule, coming)


def test_a_shadow_is_what_a_held_plan_would_have_sent():
    path = momentum_path(12)
    state, _ = follow(path[:11], settings(rule="copy", lags=2, max_horizon=2))
    would_be = dense(state, plan(state, 1))
    held = replace(plan(state, 1), terms={}, shadow=plan(state, 1).terms, held="a test")
    state, _ = observe(state, leaves_of(path[11]))
    stale = torch.cat([leaf for _, leaf in rewind(state, 1)])
    shadow = torch.cat([leaf for _, leaf in rewind(state, 1, then=held)])
    assert torch.allclose(stale, path[10], atol=1e-5)
    assert torch.allclose(shadow, would_be, atol=1e-5)
