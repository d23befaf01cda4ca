"""Small complete runs: the tiny model with next to no warm start, a few batches."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farl.config import parse_config
from farl.runtime.records import JsonlListener
from farl.train import resume, start

BASE = {
    "name": "test",
    "model": {"source": "tiny-digits", "warm_start_steps": 30, "hidden": 16, "layers": 1, "heads": 2},
    "task": {"name": "addition", "num_eval": 8, "options": {"partial_credit": True}},
    "rollout": {"prompts_per_batch": 4, "members": 4, "max_new_tokens": 4, "groups_per_request": 2},
    "pipeline": {"lag": 1, "launch": "inline"},
    "forecast": {"lags": 3},
    "optimizer": {"lr": 1e-3},
    "learner": {"num_batches": 6, "probe_fraction": 0.5},
    "record": {"tensorboard": False, "checkpoint_every_batches": 1, "keep_checkpoints": 2},
}


def make_config(cache, changes=None):
    tree = json.loads(json.dumps(BASE))
    tree["model"]["cache_dir"] = str(cache)
    for key, value in (changes or {}).items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return parse_config(tree)


def run(config, folder, **options):
    return start(config, run_dir=folder, show=False, **options)


def run_until(config, folder, update):
    """Runs until a number of updates have been recorded, then asks for a stop."""
    stop = threading.Event()

    class Stopper(JsonlListener):
        def on_update(self, seen):
            super().on_update(seen)
            if seen["update"] == update:
                stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farl.train.JsonlListener", Stopper)
        return run(config, folder, stop=stop)


def again(folder, **options):
    return resume(folder, show=False, **options)


def metrics(folder: Path):
    """All updates, without what depends on the clock or on which workers died."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "worker/"))} for m in lines]


def final_weights(folder: Path):
    return load_file(folder / "model" / "model.safetensors")


def assert_same_trajectory(a: Path, b: Path):
    assert metrics(a) == metrics(b)
    one, other = final_weights(a), final_weights(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
