import math
from dataclasses import replace

import pytest
import torch

from farl.core.types import Group, PolicyStamp, Rollout
from farl.errors import ConfigError
from farl.runtime import consume
from farl.runtime.batch import make_batch
from farl.runtime.config import ReplayConfig
from farl.runtime.needs import evaluate_logp
from farl.runtime.replay import Distances, ReplayBuffer, choose, measure

from .runs import again, assert_same_trajectory, make_config, metrics, run, run_until


def group(group_id, *, version=0, logp=(-1.0, -2.0)):
    stamp = PolicyStamp(base_version=version, target_version=version)
    rollouts = tuple(
        Rollout(ids=(1, 2), logp_behaviour=logp, finished=True, reward=r, text="", stamp=stamp) for r in (0.0, 1.0)
    )
    return Group(group_id=group_id, prompt_ids=(3,), rollouts=rollouts)


def test_the_buffer_keeps_sources_apart_and_drops_the_oldest_and_what_taught_nothing():
    buffer = ReplayBuffer(num_sources=2, max_groups=2)
    for source in range(4):
        groups = [group(10 * source + i) for i in range(4)]
        buffer.add(source, groups, [(0.0, 0.0), (1.0, -1.0), (0.5, -0.5), (2.0, -2.0)])
    assert [(s.source, s.group.group_id) for s in buffer.stored] == [(2, 21), (2, 22), (3, 31), (3, 32)]
    assert buffer.stored[0].advantage == (1.0, -1.0)
    other = ReplayBuffer(num_sources=2, max_groups=2)
    other.restore(buffer.to_json())
    assert other.stored == buffer.stored
    off = ReplayBuffer(num_sources=0, max_groups=2)
    off.add(0, [group(1)], [(1.0, -1.0)])
    assert off.stored == ()


def test_distances_by_hand():
    groups = [group(0), group(1, logp=(-1.0, -1.0))]
    batch = make_batch(groups, torch.ones(4), version=1, pad_id=0)
    learner = batch.logp_behaviour_BT + torch.tensor([[0.0, math.log(2)], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    distances = measure(batch, learner, [4, 5])
    assert distances.variance == pytest.approx((0.25, 0.0))
    assert distances.ess_fraction[4] == pytest.approx((1 + 2 + 1 + 1) ** 2 / (4 * (1 + 4 + 1 + 1)))
    assert distances.ess_fraction[5] == pytest.approx(1.0)


def test_nearest_groups_of_usable_sources_are_chosen():
    config = ReplayConfig(policies=4, min_ess_fraction=0.5, max_weight_variance=0.3)
    distances = Distances(variance=(0.2, 0.1, 0.4, 0.0, 0.1), ess_fraction={1: 0.9, 2: 0.4, 3: 0.5})
    sources = [1, 1, 1, 2, 3]
    assert choose(distances, sources, max_groups=9, config=config) == [4, 1, 0], "2 has too little ESS, third too far"
    assert choose(distances, sources, max_groups=1, config=config) == [4], "ties go to the newer source"
    assert choose(distances, sources, max_groups=9, config=replace(config, min_ess_fraction=1.0)) == []


REPLAY = {
    "corrector.name": "matched_replay",
    "replay.fraction": 1.0,
    "rollout.prompts_per_batch": 8,
    "rollout.members": 8,
    "optimizer.lr": 1e-4,
    "learner.num_batches": 7,
}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_replays_old_groups_beside_the_fresh_ones(cache, tmp_path, lag):
    run(make_config(cache, REPLAY | {"pipeline.lag": lag}), tmp_path / "a")
    lines = metrics(tmp_path / "a")
    assert lines[0]["replay/num_groups"] == 0
    assert max(m["replay/num_groups"] for m in lines) >= 1
    assert max(m["replay/num_policies"] for m in lines) >= 2
    assert all(0 < m["replay/ess_fraction_min"] <= 1 for m in lines if "replay/ess_fraction_min" in m)
    assert max(m["lag/max_versions"] for m in lines) > lag, "replayed tokens are older"


def test_far_groups_are_left_out(cache, tmp_path):
    run(make_config(cache, REPLAY | {"replay.max_weight_variance": 1e-12}), tmp_path / "a")
    assert all(m["replay/num_groups"] == 0 for m in metrics(tmp_path / "a"))


def test_replay_goes_with_any_corrector_and_several_updates(cache, tmp_path):
    changes = {
        "corrector.name": "decoupled_ppo",
        "replay.policies": 3,
        "pipeline.updates_per_batch": 2,
        "pipeline.lag": 2,
    }
    run(make_config(cache, REPLAY | changes), tmp_path / "a")
    lines = metrics(tmp_path / "a")
    assert len(lines) == 14
    assert max(m["replay/num_groups"] for m in lines) >= 1


def test_a_resumed_run_replays_as_an_uninterrupted_one(cache, tmp_path):
    config = make_config(cache, REPLAY)
    run(config, tmp_path / "whole")
    run_until(config, tmp_path / "parts", 4)
    again(tmp_path / "parts")
    assert_same_trajectory(tmp_path / "whole", tmp_path / "parts")


def test_a_mixture_of_one_policy_is_refused(cache):
    with pytest.raises(ConfigError, match=r"replay.policies=1: corrector.name='matched_replay' .* needs 2 or more"):
        make_config(cache, {"corrector.name": "matched_replay", "replay.policies": 1})
    with pytest.raises(ConfigError, match="replay.fraction=0.0: must be in"):
        make_config(cache, {"replay.fraction": 0.0})


def test_replay_settings_that_cannot_act_are_refused(cache):
    with pytest.raises(ConfigError, match="corrector='none' does not look at who drew a sample"):
        make_config(cache, {"corrector": "none", "replay.policies": 4})
    with pytest.raises(ConfigError, match="replay.fraction=0.9: nothing is replayed; set replay.policies to 2"):
        make_config(cache, {"corrector": "ppo", "replay.fraction": 0.9})


def test_served_weights_are_kept_for_mixtures_alone_and_are_those_that_drew(cache, tmp_path, monkeypatch):
    assert make_config(cache, {"corrector": "matched_replay"}).keeps_served_weights
    assert not make_config(cache, {"corrector": {"name": "matched_replay", "heuristic": "own"}}).keeps_served_weights
    assert not make_config(cache, {"corrector": "ppo", "replay.policies": 4}).keeps_served_weights
    seen = []
    plain = consume.source_logps

    def checked(policy, batch, source_P, presented, config):
        for p, source in enumerate(source_P):
            part = batch.select_groups(p, p + 1)
            with presented(source):
                seen.append((evaluate_logp(policy, part, config) - part.logp_behaviour_BT)[part.mask_BT].abs().max())
        return plain(policy, batch, source_P, presented, config)

    monkeypatch.setattr(consume, "source_logps", checked)
    run(make_config(cache, REPLAY | {"forecast.rule": "copy"}), tmp_path / "a")
    assert len(seen) > 7 * 8, "fresh and replayed"
    assert max(seen) < 1e-5
