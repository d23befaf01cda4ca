"""The sampled entries: exact for small models, right on average for large ones, the same line on every shard."""

import pytest
import torch

from farl.forecast import ForecastConfig, init, observe, plan
from farl.forecast.sample import BLOCK, choose_sample, metric_weight

from .paths import settings


def test_small_models_are_taken_whole():
    leaves = {"a": torch.zeros(500), "b": torch.zeros(7)}
    sample = choose_sample(leaves, max_entries=507, total=507, replicas={})
    assert sample.num_entries == 507
    assert sample.blocks == {"a": None, "b": None}
    assert torch.equal(sample.density_S, torch.ones(507))


def test_a_sample_is_spread_over_every_leaf_without_repeats():
    leaves = {"big": torch.arange(100_000.0), "mid": torch.arange(10_000.0), "tiny": torch.arange(5.0)}
    sample = choose_sample(leaves, max_entries=11_000, total=110_005, replicas={})
    assert sample.num_entries == pytest.approx(11_000, rel=0.02)
    for name, leaf in leaves.items():
        drawn = leaf[sample.part(name)]
        assert torch.equal(sample.gather({name: leaf})[sample.spans[name]], drawn)
        assert len(drawn.unique()) == len(drawn)
        span = sample.spans[name]
        assert float(sample.density_S[span].sum()) == pytest.approx(len(leaf), rel=1e-4)
        if sample.blocks[name] is not None:
            starts = drawn[::BLOCK]
            assert starts.diff().min() >= BLOCK, "blocks do not overlap"
            assert starts.max() > 0.9 * len(leaf)
    again = choose_sample(leaves, max_entries=11_000, total=110_005, replicas={})
    assert torch.equal(sample.blocks["big"], again.blocks["big"]), "a function of names and sizes"


def test_inner_products_from_a_sample_are_right_to_a_percent():
    torch.manual_seed(0)
    size, steps = 400_000, 12
    scale = torch.rand(size) ** 4  # entries differ much, as those of real models do
    velocity, weights = torch.zeros(size), [torch.zeros(size)]
    for _ in range(steps):
        velocity = 0.8 * velocity + scale * torch.randn(size)
        weights.append(weights[-1] + velocity)
    plans = {}
    for entries in (size, 40_000):
        config = settings(rule="least_squares_off", sample_entries=entries)
        state = init([("w", weights[0])], config)
        for point in weights[1:]:
            state, seen = observe(state, [("w", point)])
        plans[entries] = plan(state, 1).coefficients
        assert seen.displacement == pytest.approx(float((weights[-1] - weights[-2]).norm()), rel=1e-4), "exact"
        own = state.gram.inner(steps, steps)
        assert own == pytest.approx(float((weights[-1] - weights[-2]).square().sum()), rel=0.03)
    assert plans[40_000] == pytest.approx(plans[size], abs=0.03)


@pytest.mark.parametrize("fraction", [0.03, 0.5, 1.0])
def test_sharp_entries_are_those_of_largest_curvature(fraction):
    curvature = torch.rand(50_000, generator=torch.Generator().manual_seed(1)) ** 8 * 1e-9
    weight = metric_weight("sharp", curvature, torch.ones(50_000), sharp_fraction=fraction, reduce=lambda x: x)
    chosen = weight > 0
    assert chosen.float().mean() >= fraction
    if fraction < 1:
        assert curvature[chosen].min() >= curvature[~chosen].max()
        a_bin_higher = curvature > curvature[chosen].min() * (1 + 1 / 16)
        assert a_bin_higher.float().mean() < fraction, "the line is as high as the histogram's bins allow"


def test_shards_draw_the_line_at_the_same_curvature():
    curvature = torch.rand(50_000) ** 4
    whole = metric_weight("sharp", curvature, torch.ones(50_000), sharp_fraction=0.1, reduce=lambda x: x)
    counts = []

    def collect(histogram):
        counts.append(histogram)
        return histogram

    parts = (slice(0, 30_000), slice(30_000, 50_000))
    for part in parts:
        metric_weight("sharp", curvature[part], torch.ones(len(curvature[part])), sharp_fraction=0.1, reduce=collect)
    total = sum(counts)
    for part in parts:
        shard = metric_weight(
            "sharp", curvature[part], torch.ones(len(curvature[part])), sharp_fraction=0.1, reduce=lambda _: total
        )
        assert torch.equal(shard, whole[part])


def test_metrics_without_curvature_are_euclidean_and_adam_is_the_curvature():
    density, curvature = torch.full((4,), 2.0), torch.tensor([1.0, 0.0, 3.0, 5.0])
    for metric in ("adam", "sharp", "euclidean"):
        assert torch.equal(metric_weight(metric, None, density, sharp_fraction=0.1, reduce=lambda x: x), density)
    adam = metric_weight("adam", curvature, density, sharp_fraction=0.1, reduce=lambda x: x)
    assert torch.equal(adam, 2 * curvature)


def test_a_model_of_few_entries_is_not_fitted_on_a_handful_of_them():
    curvature = torch.rand(3000)
    weight = metric_weight("sharp", curvature, torch.ones(3000), sharp_fraction=0.03, reduce=lambda x: x)
    assert int((weight > 0).sum()) >= 1024
    broken = metric_weight("sharp", torch.full((9,), torch.nan), torch.ones(9), sharp_fraction=0.03, reduce=lambda x: x)
    assert torch.equal(broken, torch.ones(9))


def test_coefficients_follow_the_metric():
    """Half of the entries keep going, half turn round; whichever the curvature points at decides."""
    torch.manual_seed(0)
    size = 4000
    sign = torch.where(torch.arange(size) < size // 2, 1.0, -1.0)
    from farl.forecast import Moments

    def coefficient(sharp_half, metric):
        second = torch.where((sign > 0) == (sharp_half == "steady"), 1.0, 1e-6)
        state = init(
            [("w", torch.zeros(size))],
            ForecastConfig(rule="least_squares_off", lags=1, metric=metric, sharp_fraction=0.4, ridge=0.0),
        )
        point, move = torch.zeros(size), torch.randn(size)
        for _ in range(10):
            point, move = point + move, sign * move
            moments = {"w": Moments(kind="adam", first_N=move, second_N=second, step=1, lr=1.0)}
            state, _ = observe(state, [("w", point)], moments=moments)
        return plan(state, 1).coefficients[0]

    for metric in ("adam", "sharp"):
        assert coefficient("steady", metric) == pytest.approx(1.0, abs=1e-3)
        assert coefficient("turning", metric) == pytest.approx(-1.0, abs=1e-3)
    assert abs(coefficient("steady", "euclidean")) < 0.1
