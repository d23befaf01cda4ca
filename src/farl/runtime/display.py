"""What a person sees while a run goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from farl.runtime.records import Metrics
from farl.runtime.summary import Summary

_BARS = "▁▂▃▄▅▆▇█"
_ROWS = 12


def sparkline(values: list[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """One character for each value between `low` and `high`."""
    span = (high - low) or 1.0
    return "".join(_BARS[min(max(round((v - low) / span * 7), 0), 7)] for v in values)


def _number(metrics: Metrics, key: str, style: str) -> str:
    value = metrics.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return format(value, style)


def _columns(metrics: Metrics) -> list[str]:
    rule = str(metrics["forecast/rule"])
    forecast = f"{rule} x{metrics['forecast/damping']:.2f}"
    if metrics["forecast/damping"] == 0:
        forecast = "held" if metrics.get("forecast/horizon_versions") else "exact"
    return [
        str(metrics["update"]),
        _number(metrics, "reward/mean", ".3f"),
        _number(metrics, "lag/mean_versions", ".1f"),
        _number(metrics, "forecast/error_ratio", ".3f"),
        _number(metrics, "policy/kl_probe_nats", ".2e"),
        _number(metrics, "policy/kl_stale_nats", ".2e"),
        _number(metrics, "policy/ess_probe_fraction", ".3f"),
        _number(metrics, "policy/ess_stale_fraction", ".3f"),
        forecast,
        _number(metrics, "time/train_s", ".2f"),
        _number(metrics, "time/wait_s", ".2f"),
    ]


_HEADS = (
    "update", "reward", "lag", "error e", "KL", "KL stale", "ESS", "ESS stale", "forecast", "train s", "wait s",
)  # fmt: skip
_WIDTHS = (6, 6, 5, 7, 8, 8, 6, 9, 24, 7, 6)
_PLAIN_WIDTH = 100
"""Columns of the summary where no terminal tells its width."""


def _padded(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


class ConsoleListener:
    """Shows updates as they come.

    Args:
        num_updates: updates the run will make, for the progress bar.
        console: where to; the default writes to stderr.
        title: shown above the table.
    """

    def __init__(self, num_updates: int, *, console: Console | None = None, title: str = "farl") -> None:
        self._console = console or Console(stderr=True)
        self._num_updates = num_updates
        self._title = title
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._rewards: list[float] = []
        self._events: deque[str] = deque(maxlen=3)
        self._live: Live | None = None
        self._start_s = time.monotonic()
        self._progress = Progress(
            TextColumn("updates"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._bar = self._progress.add_task("updates", total=num_updates)
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._line(_padded(_HEADS))

    def on_update(self, metrics: Metrics) -> None:
        """Adds a row."""
        self._rows.append(_columns(metrics))
        self._rewards.append(float(metrics["reward/mean"]))
        self._progress.update(self._bar, completed=int(metrics["update"]))
        if self._live is None:
            self._line(_padded(self._rows[-1]))
        else:
            self._live.update(self._render())

    def on_event(self, text: str) -> None:
        """Shows a line below the table."""
        self._events.append(text)
        if self._live is None:
            self._line(text)
        else:
            self._live.update(self._render())

    def on_resume(self, update: int, batch: int) -> None:
        """Moves the progress bar to where the run continues."""
        self._progress.update(self._bar, completed=update)
        self.on_event(f"resumed after {update} updates, {batch} batches")

    def close(self) -> None:
        """Leaves the last table on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in _HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        reward = Text(f"reward {sparkline(self._rewards[-60:])}")
        lines: list[Any] = [self._progress, reward, table, *(Text(e, style="dim") for e in self._events)]
        return Group(Panel(Group(*lines), title=self._title, title_align="left"))


def print_summary(summary: Summary, *, folder: str, console: Console | None = None) -> None:
    """Prints the figures a run ends with to stdout."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    table = Table(title=f"farl: {summary.num_updates} updates in {summary.elapsed_s:.0f} s", show_header=False)
    table.add_column()
    table.add_column()
    after = "stopped early" if summary.accuracy_after is None else f"{summary.accuracy_after:.3f}"
    table.add_row("held-out accuracy (exact weights)", f"{summary.accuracy_before:.3f} -> {after}")
    table.add_row("reward by batch", sparkline(list(summary.reward_curve)))
    if summary.reward_curve:
        table.add_row("reward, first and last batch", f"{summary.reward_curve[0]:.3f}, {summary.reward_curve[-1]:.3f}")
    table.add_row("forecast/error_ratio (1 = stale)", _show(summary.error_ratio, ".3f"))
    table.add_row(
        "KL to the learner, with forecast / stale",
        f"{_show(summary.kl_probe_nats, '.2e')} / {_show(summary.kl_stale_nats, '.2e')} nats"
        f"  (ratio {_show(summary.kl_ratio, '.3f')})",
    )
    table.add_row(
        "ESS, with forecast / stale",
        f"{_show(summary.ess_probe_fraction, '.4f')} / {_show(summary.ess_stale_fraction, '.4f')}",
    )
    table.add_row("updates with the forecast held", f"{summary.held_fraction:.0%}")
    table.add_row(
        "time overlapped",
        f"{summary.overlap_fraction:.0%} of the wall; wall / max(train, generate) {summary.step_ratio:.2f}",
    )
    table.add_row("computing: learner, workers", f"{summary.train_s:.0f} s, {summary.generate_s:.0f} s")
    table.add_row("workers restarted, updates skipped", f"{summary.num_restarts}, {summary.num_skipped}")
    table.add_row("run folder", folder)
    console.print(table)


def _show(value: float, style: str) -> str:
    return format(value, style) if math.isfinite(value) else "-"
