"""How much of stale's KL the forecast leaves, in the settings FARL holds itself to, and its worst single run.

    python benchmarks/targets.py tiny --seeds 5
    python benchmarks/targets.py smollm2 --seeds 3

Every run is the product's own loop with rule auto and the default probe. KL with the forecast over KL of stale weights
on the same tokens, each summed over the updates of a run; mean and spread over seeds, and the worst run.
Runs that are in the record already are not made again; --again makes them all.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import QUIET, RESULTS, spread

from farl.config import TrainConfig, apply_overrides, load_recipe
from farl.train import resume, start

DECAY = ("--optimizer.decay", "cosine", "--optimizer.decay-updates", "160", "--optimizer.min-lr-fraction", "0.02")


@dataclass(frozen=True)
class Setting:
    """One row: overrides of the recipe, the updates it is judged on and the figure asked for.

    Attributes:
        name: as the table shows it.
        overrides: of the recipe.
        target: largest mean ratio; None where only never-worse is asked.
        stop_at: update after which the run is stopped and resumed; 0 never.
        lag: updates between dispatch and consumption.
    """

    name: str
    overrides: tuple[str, ...]
    target: float | None = None
    stop_at: int = 0
    lag: int = 1


def tiny(name: str, lr: str, lag: int, *more: str, target: float | None = None, stop_at: int = 0) -> Setting:
    return Setting(name, ("--optimizer.lr", lr, "--pipeline.lag", str(lag), *more), target, stop_at, lag)


def smollm2(lag: int, target: float, *more: str, note: str = "") -> Setting:
    overrides = (
        "--rollout.prompts-per-batch", "4", "--rollout.max-new-tokens", "12", "--pipeline.lag", str(lag),
        "--forecast.lags", "2", "--record.checkpoint-every-batches", "0",
    )  # fmt: skip
    return Setting(f"h = {lag}{note}", (*overrides, *more), target, lag=lag)


SETTINGS = {
    "tiny": (
        tiny("lr 3e-5, h = 1", "3e-5", 1, target=0.25),
        tiny("lr 3e-4, h = 1", "3e-4", 1, target=0.6),
        tiny("lr 3e-5, h = 4", "3e-5", 4, target=0.6),
        tiny("lr 3e-5, h = 1, beta1 = 0", "3e-5", 1, "--optimizer.beta1", "0", target=0.6),
        tiny("lr 3e-5, h = 2", "3e-5", 2),
        tiny("lr 3e-4, h = 4", "3e-4", 4),
        tiny("lr 3e-4, h = 1, beta1 = 0", "3e-4", 1, "--optimizer.beta1", "0"),
        tiny("lr 2e-4, h = 1, warm-up of 40 and cosine decay", "2e-4", 1, "--optimizer.warmup-updates", "40", *DECAY),
        tiny("lr 2e-4, h = 1, stopped and resumed at update 60", "2e-4", 1, stop_at=60),
        tiny("lr 2e-4, h = 1, ppo", "2e-4", 1, "--corrector", "ppo"),
    ),
    "smollm2": (
        smollm2(1, 0.05), smollm2(2, 0.06), smollm2(4, 0.10),
        smollm2(1, 0.05, "--learner.probe-fraction", "1", note=", whole batches probed"),
        smollm2(2, 0.06, "--learner.probe-fraction", "1", note=", whole batches probed"),
        smollm2(4, 0.10, "--learner.probe-fraction", "1", note=", whole batches probed"),
    ),
}  # fmt: skip
RECIPES = {"tiny": ("tiny-addition", 200), "smollm2": ("smollm2-arithmetic", 40)}
EARLY = 12
"""Updates that count as the first of a run of SmolLM2; their target is below."""
EARLY_TARGET = 0.3


def run(config: TrainConfig, folder: Path, stop_at: int) -> None:
    """A run, or one that is stopped on the way and resumed."""
    stop = threading.Event()
    ended = threading.Event()

    def watch() -> None:
        log = folder / "metrics.jsonl"
        while not ended.wait(0.05):
            if log.exists() and log.read_bytes().count(b"\n") >= stop_at:
                stop.set()
                return

    if stop_at:
        threading.Thread(target=watch, daemon=True).start()
    summary = start(config, run_dir=folder, show=False, stop=stop)
    ended.set()
    if stop_at:
        if summary.finished:
            raise RuntimeError(f"the run ended before it was stopped at update {stop_at}")
        resume(folder, show=False)


def measure(recipe: str, setting: Setting, updates: int, seed: int) -> dict:
    """KL with and without the forecast at every lagged update of one run."""
    overrides = [*QUIET, *setting.overrides, "--learner.num-batches", str(updates), "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        begin = time.perf_counter()
        run(apply_overrides(load_recipe(recipe), overrides), folder, setting.stop_at)
        took = time.perf_counter() - begin
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lagged = [
        m
        for m in lines
        if m.get("lag/fresh_versions", 0) > 0 and math.isfinite(m.get("policy/kl_stale_nats", math.nan))
    ]
    return {
        "setting": setting.name,
        "seed": seed,
        "updates": [m["update"] for m in lagged],
        "kl": [m["policy/kl_probe_nats"] for m in lagged],
        "kl_stale": [m["policy/kl_stale_nats"] for m in lagged],
        "held": sum(m["forecast/damping"] == 0 for m in lagged) / len(lagged),
        "seconds": round(took, 1),
    }


def ratio(row: dict, *, first: int = 0, last: float = math.inf) -> float:
    """KL over stale's, each summed over the updates after `first` up to `last`."""
    chosen = [i for i, u in enumerate(row["updates"]) if first < u <= last]
    return sum(row["kl"][i] for i in chosen) / sum(row["kl_stale"][i] for i in chosen)


def table(rows: list[dict], settings: Sequence[Setting], *, early: bool) -> str:
    """The record as Markdown."""
    head = ["setting", "seeds", "KL of stale, nats", "KL / stale"]
    if early:
        head += [
            f"after update {EARLY}",
            f"first {EARLY} (target {EARLY_TARGET})",
            "of which dispatched after an update",
        ]
    head += ["target", "worst run", "held"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in settings:
        mine = [row for row in rows if row["setting"] == setting.name]
        if not mine:
            continue
        whole = [ratio(row) for row in mine]
        cells = [setting.name, str(len(mine))]
        cells.append(f"{statistics.mean([statistics.mean(row['kl_stale']) for row in mine]):.1e}")
        cells.append(spread(whole))
        if early:
            cells.append(spread([ratio(row, first=EARLY) for row in mine]))
            cells.append(spread([ratio(row, last=EARLY) for row in mine]))
            cells.append(spread([ratio(row, first=setting.lag + 1, last=EARLY) for row in mine]))
        cells.append("-" if setting.target is None else f"{setting.target}")
        cells.append(f"{max(whole):.3f}")
        cells.append(f"{statistics.mean([row['held'] for row in mine]):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, help="seeds 0 .. N-1; 5 for tiny, 3 for smollm2 by default")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--again", action="store_true", help="make runs again that are in the record")
    arguments = parser.parse_args()
    seeds = arguments.seeds or {"tiny": 5, "smollm2": 3}[arguments.model]
    recipe, updates = RECIPES[arguments.model]
    record = RESULTS / f"targets-{arguments.model}.json"
    known = json.loads(record.read_text())["runs"] if record.exists() else []
    settings = [s for s in SETTINGS[arguments.model] if arguments.only in s.name]
    wanted = [(setting, seed) for seed in range(seeds) for setting in settings]
    if arguments.again:
        fresh = {(setting.name, seed) for setting, seed in wanted}
        known = [row for row in known if (row["setting"], row["seed"]) not in fresh]
    for setting, seed in wanted:
        if any(row["setting"] == setting.name and row["seed"] == seed for row in known):
            continue
        row = measure(recipe, setting, updates, seed)
        known.append(row)
        print(f"{setting.name}, seed {seed}: {ratio(row):.3f} in {row['seconds']:.0f} s", flush=True)
        command = f"python benchmarks/targets.py {arguments.model} --seeds {seeds}"
        record.write_text(json.dumps({"command": command, "runs": known}, separators=(",", ":")) + "\n")
    print(table(known, settings, early=arguments.model == "smollm2"))


if __name__ == "__main__":
    main()
