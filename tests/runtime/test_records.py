import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from farl.runtime.display import ConsoleListener, print_summary, sparkline
from farl.runtime.records import JsonlWriter
from farl.runtime.summary import summarise
from farl.runtime.timing import OverlapReport

ROW = {
    "update": 3, "batch": 2, "reward/mean": 0.5, "lag/mean_versions": 1.0, "lag/fresh_versions": 1,
    "forecast/error_ratio": 0.4, "policy/kl_probe_nats": 1e-4, "policy/kl_stale_nats": 4e-4,
    "policy/ess_probe_fraction": 0.99, "policy/ess_stale_fraction": 0.9, "forecast/rule": "copy",
    "forecast/damping": 0.5, "time/train_s": 1.0,
}  # fmt: skip


def test_json_lines_have_no_nan_and_a_cut_line_is_dropped_on_resume(tmp_path):
    writer = JsonlWriter(tmp_path / "x.jsonl")
    for batch in range(4):
        writer.write({"batch": batch, "value": math.nan if batch == 1 else 0.5})
    writer.close()
    assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[1]) == {"batch": 1, "value": None}
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('{"batch": 4, "val')
    writer = JsonlWriter(tmp_path / "x.jsonl")
    writer.drop_from("batch", 3)
    writer.write({"batch": 3})
    writer.close()
    assert [json.loads(x)["batch"] for x in (tmp_path / "x.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_full_disk_is_reported_once_and_counted(tmp_path, caplog):
    writer = JsonlWriter(tmp_path / "x.jsonl")
    writer._file.close()
    writer._file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - the writer closes it
    for _ in range(3):
        writer.write({"batch": 0})
    assert writer.num_lost == 3
    assert len([r for r in caplog.records if "training goes on" in r.message]) == 1
    writer.close()


def summary_of(rows):
    return summarise(
        rows, [{"update": 0, "accuracy": 0.25}, {"update": 3, "accuracy": 0.75}],
        OverlapReport(wall_s=10.0, train_s=8.0, generate_s=5.0, both_s=4.0),
        finished=True, num_restarts=1, num_skipped=2, elapsed_s=12.0,
    )  # fmt: skip


def test_summary_by_hand():
    first = {**ROW, "update": 1, "batch": 0, "lag/fresh_versions": 0, "policy/kl_stale_nats": 99.0}
    held = {**ROW, "update": 2, "batch": 1, "forecast/damping": 0.0, "policy/kl_probe_nats": 3e-4, "reward/mean": 0.25}
    held.pop("forecast/error_ratio")
    summary = summary_of([first, held, ROW])
    assert summary.kl_probe_nats == pytest.approx(2e-4), "batches without lag are left out"
    assert summary.kl_ratio == pytest.approx(0.5)
    assert summary.held_fraction == 0.5
    assert summary.error_ratio == 0.4
    assert summary.reward_curve == (0.5, 0.25, 0.5)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    assert (summary.step_ratio, summary.overlap_fraction) == (10 / 8, 0.4)
    assert summary.to_json()["kl_ratio"] == pytest.approx(0.5)


def test_a_run_without_lag_has_no_ratio():
    """Also if replayed groups, which are older, raise the mean lag."""
    data = summary_of([{**ROW, "lag/fresh_versions": 0}]).to_json()
    assert data["kl_ratio"] is None
    assert data["held_fraction"] == 0.0
    json.dumps(data, allow_nan=False)


def test_the_display_shows_both_sides_on_and_off_a_terminal():
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=140, record=True, file=io.StringIO())
        listener = ConsoleListener(10, console=console, title="test")
        listener.on_resume(2, 2)
        listener.on_update(ROW)
        listener.on_event("something happened")
        listener.close()
        listener.close()
        text = console.export_text()
        for part in ("0.500", "1.00e-04", "4.00e-04", "copy x0.50", "something happened"):
            assert part in text


def test_the_summary_is_printed():
    console = Console(width=140, record=True, file=io.StringIO())
    print_summary(summary_of([ROW]), folder="runs/x", console=console)
    text = console.export_text()
    for part in ("0.250 -> 0.750", "1.00e-04 / 4.00e-04 nats  (ratio 0.250)", "1.25", "runs/x", "1, 2"):
        assert part in text


def test_sparkline():
    assert sparkline([0.0, 0.3, 1.0, 2.0, -1.0]) == "▁▃██▁"
