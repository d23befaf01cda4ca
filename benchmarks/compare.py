"""Runs one recipe over seeds and settings, and prints the table that README and docs show.

    python benchmarks/compare.py tiny-addition --seeds 5 --vary forecast.rule=stale,auto -- --pipeline.launch inline

Every run's summary goes to `benchmarks/results/<name>.json` with the command that made it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from farl.config import apply_overrides, load_recipe
from farl.train import start

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    ("accuracy_before", "{:.3f}"),
    ("accuracy_after", "{:.3f}"),
    ("reward_last_tenth", "{:.3f}"),
    ("error_ratio", "{:.3f}"),
    ("kl_probe_nats", "{:.2e}"),
    ("kl_stale_nats", "{:.2e}"),
    ("kl_ratio", "{:.3f}"),
    ("ess_probe_fraction", "{:.4f}"),
    ("ess_stale_fraction", "{:.4f}"),
    ("step_ratio", "{:.3f}"),
    ("overlap_fraction", "{:.3f}"),
    ("elapsed_s", "{:.0f}"),
)


def run_once(recipe: str, overrides: list[str], seed: int, folder: Path) -> dict:
    config = apply_overrides(load_recipe(recipe), [*overrides, "--seed", str(seed)])
    summary = start(config, run_dir=folder, show=False).to_json()
    curve = summary["reward_curve"]
    tail = curve[-max(1, len(curve) // 10) :]
    return summary | {"reward_last_tenth": sum(tail) / len(tail), "seed": seed}


def table(rows: list[dict]) -> str:
    labels = list(dict.fromkeys(row["label"] for row in rows))
    lines = ["| setting | seeds | " + " | ".join(name for name, _ in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for label in labels:
        mine = [row for row in rows if row["label"] == label]
        cells = []
        for name, style in COLUMNS:
            values = [row[name] for row in mine if row[name] is not None]
            if not values:
                cells.append("-")
                continue
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{style.format(statistics.mean(values))} ± {style.format(spread)}")
        lines.append(f"| {label} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="after --: settings of all runs",
    )
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1")
    parser.add_argument("--vary", action="append", default=[], help="section.setting=a,b,c; several are crossed")
    parser.add_argument("--name", help="of the record file; the recipe's name by default")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    arguments, overrides = parser.parse_args(given[:split]), given[split + 1 :]
    axes = [(key, values.split(",")) for key, _, values in (item.partition("=") for item in arguments.vary)]
    rows: list[dict] = []
    record = RESULTS / f"{arguments.name or arguments.recipe}.json"
    record.parent.mkdir(exist_ok=True)
    for choice in itertools.product(*(values for _, values in axes)):
        varied = [part for (key, _), value in zip(axes, choice, strict=True) for part in (f"--{key}", value)]
        label = ", ".join(f"{key}={value}" for (key, _), value in zip(axes, choice, strict=True)) or arguments.recipe
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                row = run_once(arguments.recipe, [*overrides, *varied], seed, Path(folder) / "run")
            rows.append({"label": label} | row)
            print(f"{label} seed {seed}: {row['accuracy_before']} -> {row['accuracy_after']}", file=sys.stderr)
            command = "python benchmarks/compare.py " + " ".join(sys.argv[1:])
            record.write_text(json.dumps({"command": command, "runs": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
