"""Real worker processes and real signals: nothing is lost, nothing is trained twice, numbers stay the same."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from farl import build
from farl.errors import FarlError, TaskError, WorkerError
from farl.runtime.evaluate import Evaluation
from farl.runtime.launch_local import LocalPool
from farl.runtime.records import JsonlListener

from .runs import BASE, again, assert_same_trajectory, make_config, metrics, run

pytestmark = pytest.mark.slow

LOCAL = {"pipeline.launch": "local", "learner.num_batches": 10}


@pytest.fixture(scope="module")
def inline(cache, tmp_path_factory):
    """The trajectory that every interrupted run has to reproduce."""
    folder = tmp_path_factory.mktemp("inline") / "run"
    run(make_config(cache, {**LOCAL, "pipeline.launch": "inline"}), folder)
    return folder


@pytest.fixture
def pool(monkeypatch):
    """The pool of the run to come, in a list."""
    made = []

    class Spy(LocalPool):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(build, "LocalPool", Spy)
    return made


def at_updates(monkeypatch, updates, action):
    class Acting(JsonlListener):
        def on_update(self, seen):
            super().on_update(seen)
            if seen["update"] in updates:
                action()

    monkeypatch.setattr("farl.train.JsonlListener", Acting)


def shoot(pool):
    """Kills every worker of the run; returns how many were still there to be killed."""
    landed = 0
    for pid in pool[0].worker_pids:
        with contextlib.suppress(ProcessLookupError):  # dead from the last shot, and not replaced yet
            os.kill(pid, signal.SIGKILL)
            landed += 1
    return landed


def test_processes_and_inline_give_one_trajectory_for_any_number_of_workers(cache, tmp_path, inline):
    for workers in (1, 2):
        summary = run(make_config(cache, {**LOCAL, "pipeline.num_workers": workers}), tmp_path / str(workers))
        assert summary.num_restarts == 0
        assert_same_trajectory(tmp_path / str(workers), inline)
    assert not [p for p in os.listdir("/dev/shm") if p.startswith(f"farl-{os.getpid()}-")]


@pytest.mark.parametrize("corrector", ["matched_replay", "vcpo"])
def test_replay_and_statistics_are_the_same_with_processes(cache, tmp_path, corrector):
    """Served weights are copied out of shared memory before they are released; two policies or more in a batch."""
    changes = {"corrector": corrector, "replay.fraction": 1.0, "rollout.prompts_per_batch": 8, "rollout.members": 8}
    if corrector != "matched_replay":
        del changes["replay.fraction"]
    for launch in ("inline", "local"):
        run(make_config(cache, {**LOCAL, **changes, "pipeline.launch": launch}), tmp_path / launch)
    assert_same_trajectory(tmp_path / "inline", tmp_path / "local")
    if corrector == "matched_replay":
        assert max(m["replay/num_groups"] for m in metrics(tmp_path / "local")) >= 1


def test_killed_workers_are_replaced_and_their_work_is_done_again(cache, tmp_path, inline, pool, monkeypatch):
    landed = []
    at_updates(monkeypatch, {2, 4, 7}, lambda: landed.append(shoot(pool)))
    summary = run(make_config(cache, {**LOCAL, "pipeline.num_workers": 2}), tmp_path / "r")
    assert len(landed) == 3
    assert 3 <= summary.num_restarts <= sum(landed) <= 6
    assert_same_trajectory(tmp_path / "r", inline)


def test_a_hung_worker_is_noticed_within_seconds(cache, tmp_path, inline, pool, monkeypatch):
    stopped = []

    def stop():
        stopped.append(time.monotonic())
        os.kill(pool[0].worker_pids[0], signal.SIGSTOP)

    at_updates(monkeypatch, {3}, stop)
    start = time.monotonic()
    summary = run(make_config(cache, {**LOCAL, "pipeline.heartbeat_timeout_s": 3.0}), tmp_path / "r")
    assert summary.num_restarts >= 1
    assert time.monotonic() - start < 60
    assert_same_trajectory(tmp_path / "r", inline)


def test_workers_that_keep_dying_end_the_run_with_their_last_words(cache, tmp_path, pool, monkeypatch):
    at_updates(monkeypatch, set(range(20)), lambda: shoot(pool))
    config = make_config(cache, {**LOCAL, "pipeline.max_restarts": 1})
    with pytest.raises(WorkerError, match=r"1 restarts were allowed \(pipeline.max_restarts\)"):
        run(config, tmp_path / "r")
    assert list((tmp_path / "r" / "checkpoints").glob("step_*")), "nothing computed is lost"


def test_an_error_of_a_worker_reaches_the_learner_by_its_own_name(cache, tmp_path, monkeypatch):
    none = Evaluation(accuracy=0.0, num_problems=1, num_errors=0)
    monkeypatch.setattr("farl.runtime.loop.evaluate", lambda *_, **__: none)
    config = make_config(cache, {**LOCAL, "task.template": "1" * 130 + "{question}"})
    with pytest.raises(TaskError, match=r"worker 0: prompt of 136 tokens: .* context of 128"):
        run(config, tmp_path / "r")


def test_a_worker_that_cannot_start_says_why(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(build.sys, "executable", "/bin/false")
    with pytest.raises(FarlError, match="exited with status 1"):
        run(make_config(cache, {**LOCAL, "pipeline.max_restarts": 1}), tmp_path / "r")


def toml_of(tree):
    def value(x):
        if isinstance(x, dict):
            return "{" + ", ".join(f"{k} = {value(v)}" for k, v in x.items()) + "}"
        return json.dumps(x)

    flat = [f"{k} = {value(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for section, entries in tree.items():
        if isinstance(entries, dict):
            flat += [f"[{section}]", *(f"{k} = {value(v)}" for k, v in entries.items())]
    return "\n".join(flat) + "\n"


@pytest.fixture
def command(cache, tmp_path):
    """The command line of the same run, as users start it."""
    tree = json.loads(json.dumps(BASE))
    tree["model"]["cache_dir"] = str(cache)
    for key, value in LOCAL.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    (tmp_path / "recipe.toml").write_text(toml_of(tree))
    return [sys.executable, "-m", "farl", "train"], str(tmp_path / "recipe.toml")


def start_command(parts, log):
    with log.open("a") as file:
        return subprocess.Popen(parts, stdout=file, stderr=subprocess.STDOUT)


def wait_for_updates(folder, count, process):
    deadline = time.monotonic() + 120
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, "ended before it could be interrupted"
        time.sleep(0.01)
    raise AssertionError("no progress")


def workers_left(folder):
    """Worker processes whose log is in this run folder."""
    left = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and str(folder) in os.readlink(f"/proc/{entry}/fd/2"):
                left.append(int(entry))
        except OSError:
            continue
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_checkpoint_exit_cleanly_and_resume(command, tmp_path, inline, number):
    program, recipe = command
    folder, log = tmp_path / "r", tmp_path / "log"
    process = start_command([*program, recipe, "--run-dir", str(folder)], log)
    wait_for_updates(folder, 3, process)
    process.send_signal(number)
    assert process.wait(timeout=60) == 0, log.read_text()
    assert "stopping after this batch" in log.read_text()
    assert not workers_left(folder)
    assert (
        subprocess.run([*program, "--resume", str(folder)], timeout=120, check=False, capture_output=True).returncode
        == 0
    )
    assert_same_trajectory(folder, inline)


def test_kill_9_of_the_learner_resumes_from_the_last_checkpoint(command, tmp_path, inline):
    program, recipe = command
    folder, log = tmp_path / "r", tmp_path / "log"
    process = start_command([*program, recipe, "--run-dir", str(folder)], log)
    for count in (2, 5, 8):
        wait_for_updates(folder, count, process)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while workers_left(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not workers_left(folder), "workers end when their learner is gone"
        process = start_command([*program, "--resume", str(folder)], log)
    assert process.wait(timeout=120) == 0, log.read_text()
    assert_same_trajectory(folder, inline)
    assert [m["update"] for m in metrics(folder)] == list(range(1, 11)), "no batch lost, none trained twice"


def test_a_local_run_resumes_inline_and_the_other_way_round(cache, tmp_path, inline, monkeypatch):
    import threading

    stop = threading.Event()
    at_updates(monkeypatch, {4}, stop.set)
    folder = tmp_path / "r"
    assert not run(make_config(cache, LOCAL), folder, stop=stop).finished
    tree = json.loads((folder / "config.json").read_text())
    tree["pipeline"]["launch"] = "inline"
    (folder / "config.json").write_text(json.dumps(tree))
    assert again(folder).finished
    assert_same_trajectory(folder, inline)
