"""Every corrector on `tiny-addition` at lag 1, with stale and with forecast policies, one seed: no crash, no NaN.

    python benchmarks/every_corrector.py            # the whole recipe, two runs at a time; about an hour on two cores
    python benchmarks/every_corrector.py --batches 100 --only ppo m2po --out /tmp/short.json

One seed and one learning rate: figures that show that each runs and roughly what it does, not a comparison of methods
(that is the lab's). Results go to benchmarks/results/every_corrector.json, one row a run, as each ends, with the commit
that it ran at; rows of other correctors that are there from runs with the same settings stay.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from farl.correct import CORRECTORS

RESULTS = Path(__file__).parent / "results" / "every_corrector.json"
SETTINGS = ["--pipeline.launch", "inline", "--pipeline.lag", "1", "--record.no-tensorboard", "--record.no-save-model"]


def commit() -> str:
    """The last commit that changed the source."""
    command = ["git", "log", "-1", "--format=%h", "--", "src"]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.strip()


def run(name: str, rule: str, batches: int, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "run"
        command = [
            sys.executable, "-m", "farl", "train", "tiny-addition", "--corrector", name, "--forecast.rule", rule,
            "--learner.num-batches", str(batches), "--record.eval-every-batches", "0", "--seed", str(seed),
            "--run-dir", str(target), *SETTINGS,
        ]  # fmt: skip
        process = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        row = {"corrector": name, "rule": rule, "commit": commit(), "status": process.returncode}
        if process.returncode:
            return row | {"error": process.stderr[-2000:]}
        updates = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((target / "summary.json").read_text())

    tenth = max(1, len(updates) // 10)

    def mean(key):
        values = [u[key] for u in updates[len(updates) // 3 :] if key in u]
        return sum(values) / len(values) if values else None

    return row | {
        "num_updates": len(updates),
        "num_skipped": updates[-1]["optim/num_skipped"],
        "all_finite": all(math.isfinite(v) for u in updates for v in u.values() if isinstance(v, float)),
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "reward_last_tenth": sum(u["reward/mean"] for u in updates[-tenth:]) / tenth,
        "kl_nats": mean("policy/kl_nats"),
        "clip_fraction": mean("correct/clip_fraction"),
        "mask_fraction": mean("correct/mask_fraction"),
        "weight_mean": mean("correct/weight_mean"),
        "replay_groups": mean("replay/num_groups"),
        "lr_mean": mean("optim/lr"),
        "train_s": mean("time/train_s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(CORRECTORS))
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    settings = {"batches": arguments.batches, "seed": arguments.seed, "lag": 1}
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": [], **settings}
    if not settings.items() <= earlier.items():
        parser.error(f"{arguments.out} is a record of other settings; name another file with --out")
    kept = [row for row in earlier["rows"] if row["corrector"] not in arguments.only]
    lock = threading.Lock()
    rows = []

    def work(job):
        row = run(*job, arguments.batches, arguments.seed)
        with lock:
            rows.append(row)
            ordered = sorted(kept + rows, key=lambda r: (list(CORRECTORS).index(r["corrector"]), r["rule"]))
            arguments.out.write_text(json.dumps({**settings, "rows": ordered}, indent=1) + "\n")
        print(row["corrector"], row["rule"], row["status"], row.get("accuracy_after"), flush=True)

    jobs = [(name, rule) for name in arguments.only for rule in ("stale", "auto")]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        list(pool.map(work, jobs))
    bad = [r for r in rows if r["status"] or not r.get("all_finite") or r.get("num_skipped")]
    print(f"{len(rows)} runs, {len(bad)} bad: {[(r['corrector'], r['rule']) for r in bad]}")


if __name__ == "__main__":
    main()
