"""Kills workers and the learner at random moments, resumes, and compares with a run that nobody disturbed.

    python benchmarks/kills.py --worker-kills 10 --learner-kills 5

Prints how many kills there were and how many updates differ in any metric, or in any bit of the final weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

SETTINGS = [
    "--learner.num-batches",
    "60",
    "--rollout.prompts-per-batch",
    "8",
    "--rollout.groups-per-request",
    "4",
    "--pipeline.num-workers",
    "2",
    "--record.checkpoint-every-batches",
    "2",
    "--record.no-tensorboard",
    "--record.eval-every-batches",
    "0",
    "--task.num-eval",
    "20",
    "--pipeline.max-restarts",
    "1000",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "farl", "train", *arguments]


def updates_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def workers_of(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(x) for x in (task / "children").read_text().split()]
    return children


def trajectory(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "worker/"))} for row in rows]


def disturb(folder: Path, log: Path, kills: int, *, learner: bool) -> int:
    made = 0
    first = True
    generator = random.Random(0)
    while True:
        arguments = ["tiny-addition", *SETTINGS, "--run-dir", str(folder)] if first else ["--resume", str(folder)]
        with log.open("a") as file:
            process = subprocess.Popen(command(*arguments), stdout=file, stderr=file)
        first = False
        at = updates_done(folder)
        while process.poll() is None:
            time.sleep(0.05)
            if made < kills and updates_done(folder) > at:
                time.sleep(generator.uniform(0, 1.0))
                if learner:
                    process.kill()
                    process.wait()
                    made += 1
                    break
                victims = workers_of(process.pid)
                if victims and process.poll() is None:
                    os.kill(generator.choice(victims), signal.SIGKILL)
                    made += 1
                at = updates_done(folder)
        else:
            if process.returncode != 0:
                raise SystemExit(log.read_text()[-3000:])
            return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker-kills", type=int, default=10)
    parser.add_argument("--learner-kills", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plain = root / "plain"
        subprocess.run(
            command("tiny-addition", *SETTINGS, "--pipeline.launch", "inline", "--run-dir", str(plain)),
            check=True,
            capture_output=True,
        )
        for kind, kills in (("worker", arguments.worker_kills), ("learner", arguments.learner_kills)):
            folder = root / kind
            made = disturb(folder, root / f"{kind}.log", kills, learner=kind == "learner")
            expected, got = trajectory(plain), trajectory(folder)
            different = sum(a != b for a, b in zip(expected, got, strict=False)) + abs(len(expected) - len(got))
            weights = [load_file(f / "model" / "model.safetensors") for f in (plain, folder)]
            equal = all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
            print(
                f"{kind}: {made} kills, {len(got)} of {len(expected)} updates, {different} different, final weights "
                f"{'equal to the bit' if equal else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
