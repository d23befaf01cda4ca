"""The documents say what is there."""

import json
import re
from pathlib import Path

from farl.correct import CORRECTORS

from .runtime.runs import make_config, run

ROOT = Path(__file__).parents[1]


def documented():
    text = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE))


def plain(name):
    return re.sub(r"_lag_\d+$", "_lag_K", name)


def test_every_metric_is_documented_and_every_documented_metric_exists(cache, tmp_path):
    seen = set()
    for i, changes in enumerate((
        {"pipeline.lag": 2, "forecast.rule": "copy"},
        {"pipeline.lag": 4, "pipeline.updates_per_batch": 4, "corrector": {"name": "decoupled_ppo"}},
        {"corrector": "matched_replay"},
    )):  # fmt: skip
        run(make_config(cache, changes), tmp_path / str(i))
        for line in (tmp_path / str(i) / "metrics.jsonl").read_text().splitlines():
            seen |= {plain(k) for k in json.loads(line)}
    missing = seen - documented()
    assert not missing, f"docs/metrics.md lacks {sorted(missing)}"
    by_lag = {"policy/kl_nats_lag_K", "correct/clip_fraction_lag_K"}  # batches of one lag do not split by lag
    assert documented() - seen - by_lag == set()


def test_links_between_documents_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_module_named_in_the_readme_exists():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def test_three_lines_of_the_readme_run(tmp_path):
    text = (ROOT / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "Forecaster" in b)
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sent = []

    def batches():
        for _ in range(4):
            yield torch.randn(3, 4)

    names = {
        "model": model, "optimizer": optimizer, "torch": torch, "batches": batches(),
        "compute_loss": lambda model, batch: model(batch).square().mean(),
        "send": lambda name, w: sent.append((name, w.dtype)),
    }  # fmt: skip
    exec(block, names)
    assert len(sent) == 8
    assert {dtype for _, dtype in sent} == {torch.bfloat16}


def test_the_corrector_of_the_readme_runs_and_the_list_is_whole():
    import torch

    from farl.correct import CORRECTORS
    from farl.testing import example_inputs

    text = (ROOT / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "icepop" in b)
    inputs = example_inputs()
    names = {
        "logp_learner": inputs.logp_learner_BT,
        "logp_behaviour": inputs.logp_behaviour_BT,
        "advantage": inputs.advantage_BT,
        "mask": inputs.mask_BT,
        "logp_proximal": inputs.logp_proximal_BT,
    }
    exec(block, names)
    assert inputs.logp_learner_BT.grad is not None
    assert torch.isfinite(names["loss"])
    listed = text[text.index("`none` `ppo`") : text.index("`farl list correctors` prints needs")]
    assert re.findall(r"`(\w+)`", listed) == list(CORRECTORS)
    assert f"so it ships them: {len(CORRECTORS)}," in text


def test_the_parity_table_is_there_and_within_its_tolerance():
    """The last run of `make parity`: five libraries, every difference at most 1e-6."""
    text = (ROOT / "docs" / "parity.md").read_text()
    rows = re.findall(r"^\| (\w+) [\d.]+ \| .* \| (\d+) \| ([\d.e+-]+) \| ([\d.e+-]+) \|$", text, flags=re.MULTILINE)
    assert {row[0] for row in rows} == {"verl", "areal", "openrlhf", "trl", "skyrl"}
    assert all(int(batches) == 201 and float(v) <= 1e-6 and float(g) <= 1e-6 for _, batches, v, g in rows)
    assert f"on {len(rows)} comparisons of 201 batches each" in (ROOT / "README.md").read_text()


def rows_of(table_after, path):
    """Cells of the first table after a heading."""
    text = (ROOT / path).read_text().split(table_after, 1)[1]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_costs_is_that_of_the_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "correctors.json").read_text())
    columns = ("time_ratio", "time_ratio_with_diagnose", "time_ratio_compiled", "memory_ratio", "memory_ratio_compiled")
    expected = [
        [row["verl"], row["ours"], f"{row['verl_ms']:.1f}", *(f"{row[c]:.2f}" for c in columns)]
        for row in record["rows"]
    ]
    expected.append(["median", "", "", *(f"{record['median'][c]:.2f}" for c in columns)])
    assert rows_of("## What it costs", "docs/correctors.md")[: len(expected)] == expected


def test_the_table_of_every_corrector_is_that_of_the_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "every_corrector.json").read_text())
    pairs = {}
    for row in record["rows"]:
        pairs.setdefault(row["corrector"], {})[row["rule"]] = row
    assert list(pairs) == list(CORRECTORS)
    expected = []
    for name, pair in pairs.items():
        both = (pair["stale"], pair["auto"])
        assert all(r["status"] == 0 and r["all_finite"] and r["num_skipped"] == 0 for r in both), name
        expected.append([
            name,
            *(f"{r['accuracy_after']:.3f}" for r in both),
            *(f"{r['reward_last_tenth']:.3f}" for r in both),
            *(f"{r['kl_nats']:.1e}" for r in both),
            *(f"{r['clip_fraction'] + r['mask_fraction']:.4f}" for r in both),
        ])  # fmt: skip
    assert rows_of("## 2026-12-03 Every corrector", "docs/experiments.md")[: len(expected)] == expected
