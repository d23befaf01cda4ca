"""Every corrector of the catalogue in the loop: stale and forecast policies, lag 0, 1 and 4."""

import math

import pytest

from farl.correct import CORRECTORS
from farl.errors import ConfigError

from .runs import make_config, metrics, run


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("rule", ["stale", "least_squares"])
@pytest.mark.parametrize("name", CORRECTORS)
def test_every_corrector_trains(cache, tmp_path, name, rule, lag):
    changes = {"pipeline.lag": lag, "forecast.rule": rule, "learner.num_batches": 3 + lag, "record.save_model": False}
    config = make_config(
        cache, {**changes, "corrector": name, "record.checkpoint_every_batches": 0, "task.num_eval": 2}
    )
    summary = run(config, tmp_path / "r")
    lines = metrics(tmp_path / "r")
    assert summary.finished
    assert len(lines) == 3 + lag
    assert lines[-1]["optim/num_skipped"] == 0
    for line in lines:
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))
        assert "loss/value" in line
        assert "optim/grad_norm" in line
    assert any(line["optim/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "dapo", "cispo", "gmpo", "m2po", "dro", "vespo"])
def test_proximal_anchors_under_several_updates_and_micro_batches(cache, tmp_path, name):
    """The split of a minibatch into micro-batches changes nothing, anchors at the start of the batch included."""
    anchored = {} if name in ("tis", "mis", "icepop", "m2po") else {"anchor": "proximal"}
    changes = {
        "corrector": {"name": name, **anchored}, "pipeline.updates_per_batch": 2, "pipeline.lag": 2,
        "learner.num_batches": 3, "record.save_model": False, "task.num_eval": 2,
    }  # fmt: skip
    runs = []
    for micro in (None, 1):
        run(make_config(cache, changes | ({"learner.micro_groups": micro} if micro else {})), tmp_path / str(micro))
        runs.append(metrics(tmp_path / str(micro)))
    assert len(runs[0]) == 6
    for a, b in zip(*runs, strict=True):
        assert a["loss/value"] == pytest.approx(b["loss/value"], rel=1e-3, abs=1e-5)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-3, abs=1e-5)
    later = [m for m in runs[0] if m["update"] % 2 == 0]
    assert any(m["policy/kl_nats"] > 0 for m in later)


def test_a_fixed_length_is_that_of_the_rollouts(cache, tmp_path):
    """Not the padded width, with which the step would depend on the longest answer of the batch."""
    changes = {"corrector": {"name": "ppo", "reduction": "sequence_mean_token_sum_norm"}, "learner.num_batches": 2}
    run(make_config(cache, changes), tmp_path / "free")
    changes["corrector"]["horizon"] = 4
    run(make_config(cache, changes), tmp_path / "given")
    assert metrics(tmp_path / "free") == metrics(tmp_path / "given")


def test_a_name_alone_chooses_a_corrector_in_a_recipe_and_on_the_command_line(cache):
    from farl.config import apply_overrides

    config = make_config(cache, {"corrector": "m2po"})
    assert config.corrector.name == "m2po"
    assert apply_overrides(config, ["--corrector", "bapo"]).corrector.name == "bapo"
    changed = apply_overrides(config, ["--corrector=matched_replay"])
    assert changed.num_replay_policies == 4
    assert apply_overrides(changed, ["--corrector.name", "ppo"]).num_replay_policies == 0


def test_a_corrector_of_ones_own_trains_by_its_import_path(cache, tmp_path, monkeypatch):
    (tmp_path / "own_corrector.py").write_text(
        "from dataclasses import replace\n"
        "from farl.correct import Need\n"
        "from farl.correct.catalogue import create\n"
        "def mine(clip):\n"
        "    return replace(create('ppo', clip_low=clip), name='mine')\n"
        "def with_reference():\n"
        "    return replace(create('ppo'), needs=frozenset({Need.REFERENCE}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = {"corrector.import": "own_corrector:mine", "corrector.options": {"clip": 0.1}}
    run(make_config(cache, own | {"learner.num_batches": 2}), tmp_path / "r")
    assert len(metrics(tmp_path / "r")) == 2
    with pytest.raises(ConfigError, match="needs reference log-probs, and the loop keeps no reference policy"):
        make_config(cache, {"corrector.import": "own_corrector:with_reference"})
    with pytest.raises(ConfigError, match="corrector.import='nowhere:f'"):
        make_config(cache, {"corrector.import": "nowhere:f"})
