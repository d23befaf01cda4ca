"""The loop in one process: schedule, records, resume, skips. Processes are in `test_processes`."""

import json
import math

import pytest
import torch

from farl import build
from farl.errors import CheckpointError, ConfigError, FarlError, TaskError, WireError
from farl.runtime import loop as loop_module
from farl.tasks.addition import AdditionTask

from .runs import again, assert_same_trajectory, final_weights, make_config, metrics, run, run_until


def test_a_run_is_a_function_of_config_and_seed(cache, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(make_config(cache, {"seed": seed}), tmp_path / name)
    assert_same_trajectory(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")
    assert all(m["forecast/displacement_norm"] > 0 for m in metrics(tmp_path / "a")), "it really learns"


@pytest.mark.parametrize(
    ("lag", "updates", "aim", "lags", "misses"),
    [
        (0, 1, "middle", [0, 0, 0], [0, 0, 0]),
        (1, 1, "middle", [0, 1, 1], [0, 0, 0]),
        (3, 1, "middle", [0, 1, 2, 3, 3], [0, 0, 0, 0, 0]),
        (2, 2, "first", [0, 1, 2, 3, 2, 3], [0, 1, 0, 1, 0, 1]),
        (2, 2, "last", [0, 1, 2, 3, 2, 3], [-1, 0, -1, 0, -1, 0]),
        (0, 2, "middle", [0, 1, 0, 1], [0, 1, 0, 1]),
    ],
)
def test_lag_and_miss_are_measured_at_consumption(cache, tmp_path, lag, updates, aim, lags, misses):
    """Trap 5: the horizon is what the schedule promises, and it is measured for every trajectory."""
    changes = {
        "pipeline.lag": lag, "pipeline.updates_per_batch": updates, "pipeline.aim": aim,
        "learner.num_batches": len(lags) // updates, "corrector": {"name": "decoupled_ppo"},
    }  # fmt: skip
    run(make_config(cache, changes), tmp_path / "r")
    seen = metrics(tmp_path / "r")
    assert [m["lag/mean_versions"] for m in seen] == lags
    assert [m["lag/max_versions"] for m in seen] == lags
    assert [m["miss/mean_versions"] for m in seen] == misses
    assert [m["update"] for m in seen] == list(range(1, len(lags) + 1))
    for m in seen:
        if m["lag/mean_versions"] == 0:
            assert m["policy/kl_nats"] < 1e-9, "exact weights, and the sampler's log-probs are the learner's"


def test_the_first_update_of_a_batch_is_its_own_anchor_and_later_ones_have_moved(cache, tmp_path):
    changes = {
        "pipeline.lag": 4, "pipeline.updates_per_batch": 4, "corrector": {"name": "ppo", "anchor": "proximal"},
        "learner.num_batches": 2, "optimizer.lr": 1e-2,
    }  # fmt: skip
    run(make_config(cache, changes), tmp_path / "r")
    means = [m["correct/weight_mean"] for m in metrics(tmp_path / "r")]
    assert means[0] == pytest.approx(1.0)
    assert means[4] == pytest.approx(1.0)
    assert all(abs(x - 1) > 1e-6 for x in (*means[1:4], *means[5:]))


@pytest.mark.parametrize("stop_after", [1, 3])
@pytest.mark.parametrize("lag", [0, 2])
def test_stopped_and_resumed_equals_never_stopped(cache, tmp_path, stop_after, lag):
    config = make_config(
        cache, {"pipeline.lag": lag, "record.checkpoint_every_batches": 0, "optimizer.warmup_updates": 4}
    )
    whole = run(config, tmp_path / "whole")
    stopped = run_until(config, tmp_path / "parts", stop_after)
    assert not stopped.finished
    assert stopped.accuracy_after is None
    assert stopped.num_updates == stop_after
    resumed = again(tmp_path / "parts")
    assert resumed.finished
    assert (resumed.accuracy_before, resumed.accuracy_after) == (whole.accuracy_before, whole.accuracy_after)
    assert resumed.reward_curve == whole.reward_curve
    assert_same_trajectory(tmp_path / "whole", tmp_path / "parts")


def test_a_run_of_another_config_and_a_folder_without_run_are_refused(cache, tmp_path):
    config = make_config(cache, {"learner.num_batches": 2})
    run(config, tmp_path / "r")
    with pytest.raises(ConfigError, match="holds a run already; resume it with --resume"):
        run(config, tmp_path / "r")
    with pytest.raises(ConfigError, match=r"holds no config.json"):
        again(tmp_path)
    tree = json.loads((tmp_path / "r" / "config.json").read_text())
    tree["optimizer"]["lr"] = 5e-4
    (tmp_path / "r" / "config.json").write_text(json.dumps(tree))
    with pytest.raises(FarlError, match="written with another config"):
        again(tmp_path / "r")
    for path in (tmp_path / "r" / "checkpoints").glob("*/records.json"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint that verifies"):
        again(tmp_path / "r")


def test_saved_and_evaluated_weights_are_exact(cache, tmp_path, monkeypatch):
    """Trap 4."""
    seen = []

    def spy(sampler, *args, **kwargs):
        seen.append(({n: p.detach().clone() for n, p in sampler._module.named_parameters()}, sampler.stamp))
        return real(sampler, *args, **kwargs)

    real = loop_module.evaluate
    monkeypatch.setattr(loop_module, "evaluate", spy)
    run(make_config(cache, {"forecast.rule": "copy", "record.eval_every_batches": 3}), tmp_path / "r")
    assert len(seen) == 3
    last, stamp = seen[-1]
    assert stamp is None, "the evaluation sampler never loads a publication"
    saved = final_weights(tmp_path / "r")
    assert all(torch.equal(saved[n], w) for n, w in last.items())


def test_a_forecast_changes_who_acts_and_stale_is_the_baseline(cache, tmp_path):
    for rule in ("stale", "copy"):
        run(make_config(cache, {"forecast.rule": rule}), tmp_path / rule)
    stale, copy = metrics(tmp_path / "stale"), metrics(tmp_path / "copy")
    assert all(m["forecast/rule"] == "stale" for m in stale)
    assert [m["forecast/rule"] for m in copy][2:] == ["copy"] * 4
    for m in stale[1:-1]:
        assert m["policy/kl_probe_nats"] == m["policy/kl_stale_nats"], "the probe of stale rollouts is themselves"
        assert m["forecast/error_ratio"] == pytest.approx(1.0)
    assert stale[:2] == copy[:2] or stale[0]["reward/mean"] == copy[0]["reward/mean"]
    stamps = [json.loads(line)["stamp"] for line in (tmp_path / "copy" / "samples.jsonl").read_text().splitlines()]
    assert stamps[-1]["rule"] == "copy"
    assert stamps[-1]["target_version"] - stamps[-1]["base_version"] == 1
    assert stamps[-1]["coefficients"] == [1.0]


class Breaking(AdditionTask):
    """Scores as told by the completion number; workers in this process share the counter."""

    mode = "raise"
    calls = 0

    def score(self, problem, completion):
        Breaking.calls += 1
        if Breaking.mode == "raise" and Breaking.calls % 7 == 0:
            raise ValueError("scorer broke")
        if Breaking.mode == "nan" and Breaking.calls % 7 == 0:
            return math.nan
        if Breaking.mode == "all":
            raise ValueError("scorer always breaks")
        if Breaking.mode == "equal":
            return 1.0
        return float(Breaking.calls % 2)


@pytest.fixture
def breaking(monkeypatch):
    from farl import tasks

    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "addition": Breaking})
    Breaking.calls = 0
    return Breaking


@pytest.mark.parametrize("mode", ["raise", "nan"])
def test_rewards_that_fail_are_counted_and_left_out(cache, tmp_path, breaking, mode):
    breaking.mode = mode
    summary = run(make_config(cache, {"learner.num_batches": 2}), tmp_path / "r")
    assert summary.finished
    assert sum(m["reward/num_failed_groups"] for m in metrics(tmp_path / "r")) > 0


def test_equal_rewards_teach_nothing_and_are_counted(cache, tmp_path, breaking):
    breaking.mode = "equal"
    run(make_config(cache, {"learner.num_batches": 3}), tmp_path / "r")
    seen = metrics(tmp_path / "r")
    assert all(m["reward/equal_group_fraction"] == 1.0 for m in seen)
    assert all(m["optim/grad_norm"] == 0.0 for m in seen)


def test_a_scorer_that_always_fails_ends_the_run_and_loses_nothing(cache, tmp_path, breaking):
    breaking.mode = "all"
    with pytest.raises(TaskError, match="failed in every group of 3 batches in a row"):
        run(make_config(cache), tmp_path / "r")
    assert len(metrics(tmp_path / "r")) == 3
    breaking.mode = "mended"
    assert again(tmp_path / "r").finished
    assert [m["update"] for m in metrics(tmp_path / "r")] == list(range(1, 7))


def test_a_prompt_longer_than_the_context_is_named(cache, tmp_path):
    with pytest.raises(TaskError, match="exceeds the model's context of 128"):
        run(make_config(cache, {"task.template": "1" * 130 + "{question}"}), tmp_path / "r")


def test_a_full_disk_at_a_checkpoint_does_not_end_the_run(cache, tmp_path, monkeypatch):
    real, calls = loop_module.CheckpointStore.save, []

    def save(self, step, tensors, records):
        calls.append(step)
        if step in (2, 3):
            raise CheckpointError("No space left on device")
        return real(self, step, tensors, records)

    monkeypatch.setattr(loop_module.CheckpointStore, "save", save)
    summary = run(make_config(cache), tmp_path / "r")
    assert summary.finished
    assert calls == [1, 2, 3, 4, 5, 6]
    assert len(metrics(tmp_path / "r")) == 6


def test_gradients_that_are_not_finite_skip_the_step_and_too_many_end_the_run(cache, tmp_path, monkeypatch):
    config = make_config(cache, {"optimizer.max_skipped": 1})
    real = build.CausalPolicy.logp
    calls = []

    def logp(self, batch, *, temperature):
        value = real(self, batch, temperature=temperature)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) in self.broken:
                return value * math.nan
        return value

    monkeypatch.setattr(build.CausalPolicy, "logp", logp)
    monkeypatch.setattr(build.CausalPolicy, "broken", {3}, raising=False)
    summary = run(config, tmp_path / "one")
    assert summary.num_skipped == 1
    assert [m["update"] for m in metrics(tmp_path / "one")] == [1, 2, 2, 3, 4, 5]
    assert summary.num_updates == 5, "a skipped update makes no version"
    calls.clear()
    monkeypatch.setattr(build.CausalPolicy, "broken", {3, 4})
    with pytest.raises(FarlError, match=r"not finite for 2 updates in a row \(optimizer.max_skipped=1\)"):
        run(config, tmp_path / "two")
    monkeypatch.setattr(build.CausalPolicy, "broken", set())
    assert again(tmp_path / "two").finished
    assert [m["update"] for m in metrics(tmp_path / "two")] == [1, 2, 2, 2, 3, 4]


def test_a_publication_that_fails_leaves_the_last_checkpoint(cache, tmp_path, monkeypatch):
    real = build.InProcessTransport.send

    def send(self, number, stamp, leaves):
        if number == 4:
            raise WireError("no room")
        return real(self, number, stamp, leaves)

    run(make_config(cache), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(build.InProcessTransport, "send", send)
        with pytest.raises(WireError, match="no room"):
            run(make_config(cache), tmp_path / "r")
    assert again(tmp_path / "r").finished
    assert_same_trajectory(tmp_path / "whole", tmp_path / "r")


def test_run_folder_holds_what_a_run_needs(cache, tmp_path):
    summary = run(make_config(cache, {"record.tensorboard": True}), tmp_path / "r")
    names = {p.name for p in (tmp_path / "r").iterdir()}
    assert names >= {"config.json", "machine.json", "metrics.jsonl", "samples.jsonl", "summary.json"}
    assert names >= {"model", "checkpoints", "tensorboard"}
    assert list((tmp_path / "r" / "tensorboard").glob("events*"))
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["num_updates"] == summary.num_updates == 6
    assert 0 <= summary.accuracy_after <= 1
