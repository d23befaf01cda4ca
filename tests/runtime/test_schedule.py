import pytest

from farl.core.types import PolicyStamp
from farl.errors import ConfigError
from farl.forecast import aim_of
from farl.runtime.config import AsyncConfig, OptimizerConfig, RolloutConfig
from farl.runtime.schedule import Dispatch, horizon_of, sampling_seed, split_batch


@pytest.mark.parametrize(
    ("lag", "updates", "aim", "horizons"),
    [
        (0, 1, "middle", [0, 0, 0, 0]),  # synchronous: exact weights, always
        (1, 1, "middle", [0, 1, 1, 1]),  # one-step-off
        (4, 1, "first", [0, 1, 2, 3, 4, 4]),  # the first batches all start from version 0
        (0, 4, "last", [0, 0]),  # synchronous with minibatches
        (2, 2, "first", [0, 2, 2]),
        (2, 2, "last", [1, 3, 3]),
        (3, 3, "middle", [1, 4, 4]),
        (8, 4, "middle", [1.5, 5.5, 9.5, 9.5]),
        (2, 2, "window", [{0: 1, 1: 1}, {2: 1, 3: 1}, {2: 1, 3: 1}]),
    ],
)
def test_horizon_counts_updates_from_dispatch_to_the_aimed_point(lag, updates, aim, horizons):
    pipeline = AsyncConfig(lag=lag, updates_per_batch=updates, aim=aim)
    assert [horizon_of(pipeline, n) for n in range(len(horizons))] == horizons
    assert max(aim_of(h).reach for h in horizons) <= pipeline.max_horizon


def test_every_group_is_dispatched_once_whatever_the_split():
    for size in (1, 2, 3, 7, None):
        rollout = RolloutConfig(prompts_per_batch=7, groups_per_request=size)
        parts = split_batch(
            batch=3, first_dispatch_id=10, rollout=rollout, num_workers=2, seed=5, publication=3,
            stamp=PolicyStamp(base_version=2, target_version=3),
        )  # fmt: skip
        assert [g for p in parts for g in p.group_ids] == list(range(21, 28))
        assert [s for p in parts for s in p.seeds] == [sampling_seed(5, g) for g in range(21, 28)]
        assert [p.dispatch_id for p in parts] == list(range(10, 10 + len(parts)))


def test_seeds_differ_between_groups_and_runs_and_are_stable():
    seeds = {sampling_seed(seed, group) for seed in range(4) for group in range(64)}
    assert len(seeds) == 256
    assert sampling_seed(0, 0) == 50518248330846151  # golden: resumed runs of other builds depend on it


def test_dispatch_survives_json():
    stamp = PolicyStamp(base_version=2, target_version=4, rule="copy", coefficients=(0.1, -1 / 3))
    dispatch = Dispatch(dispatch_id=1, batch=2, group_ids=(4, 5), seeds=(7, 8), publication=2, stamp=stamp)
    assert Dispatch.from_json(dispatch.to_json()) == dispatch


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AsyncConfig(lag=-1), r"pipeline.lag=-1: must be 0 or more; 0 trains only on fresh"),
        (
            lambda: AsyncConfig(lag=3, updates_per_batch=2),
            "pipeline.lag=3: must be a multiple of updates_per_batch=2",
        ),
        (lambda: AsyncConfig(launch="ray"), "'inline' or 'local'"),
        (lambda: AsyncConfig(wire_dtype="int8"), "float32, bfloat16, float16"),
        (lambda: RolloutConfig(members=1), "rollout.members=1: must be 2 or more"),
        (lambda: RolloutConfig(temperature=0.0), "rollout.temperature=0.0: must be above 0"),
        (lambda: OptimizerConfig(lr=0.0), "optimizer.lr=0.0: must be above 0"),
        (lambda: OptimizerConfig(decay="step"), "optimizer.decay='step': must be 'none', 'linear' or 'cosine'"),
        (lambda: OptimizerConfig(decay="linear"), "optimizer.decay_updates=0: must be 1 or more; the linear decay"),
    ],
)
def test_settings_that_cannot_work_name_field_value_and_remedy(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_warm_up_is_linear_and_ends():
    config = OptimizerConfig(lr=1.0, warmup_updates=4)
    assert [config.lr_at(v) for v in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decay_follows_the_warm_up_and_stays_at_its_floor():
    linear = OptimizerConfig(lr=1.0, warmup_updates=2, decay="linear", decay_updates=4, min_lr_fraction=0.2)
    assert [linear.lr_at(v) for v in range(8)] == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = OptimizerConfig(lr=2.0, decay="cosine", decay_updates=4, min_lr_fraction=0.0)
    half = 0.5**0.5
    assert [cosine.lr_at(v) for v in range(6)] == pytest.approx([1 + half, 1.0, 1 - half, 0.0, 0.0, 0.0])
