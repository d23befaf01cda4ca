"""What a run leaves behind while it goes: JSONL metrics and completions, TensorBoard events.

Losing a line never ends a run: a disk that is full is reported once and counted.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("farl.records")

Metrics = Mapping[str, float | int | str]


class Listener(Protocol):
    """Whoever shows or stores what happens; every method may be called from the training thread only."""

    def on_update(self, metrics: Metrics) -> None:
        """One learner update."""

    def on_event(self, text: str) -> None:
        """Something a person should see."""

    def on_resume(self, update: int, batch: int) -> None:
        """The run continues after `update` updates and `batch` batches; what lies beyond is made again."""

    def close(self) -> None:
        """The run is over; idempotent."""


class JsonlWriter:
    """Appends one JSON object a line; numbers that are not finite become null.

    Args:
        path: file to append to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_lost = 0
        self._file = path.open("a", buffering=1)

    def drop_from(self, key: str, value: int) -> None:
        """Drops the records whose `key` is at least `value`, and a last line that a crash cut short."""
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record[key] < value:
                kept.append(line + "\n")
        self._file.close()
        self._path.write_text("".join(kept))
        self._file = self._path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record; a full disk is reported once and counted."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self._file.write(json.dumps(clean) + "\n")
        except OSError as error:
            if not self.num_lost:
                log.warning("%s: cannot write (%s); training goes on without these records", self._path, error)
            self.num_lost += 1

    def close(self) -> None:
        """Closes the file; idempotent."""
        try:
            self._file.close()
        except OSError as error:
            log.warning("%s: %s", self._path, error)


class JsonlListener:
    """Writes every update to `metrics.jsonl` of the run folder."""

    def __init__(self, folder: Path) -> None:
        self._writer = JsonlWriter(folder / "metrics.jsonl")

    def on_update(self, metrics: Metrics) -> None:
        """Appends the metrics."""
        self._writer.write(metrics)

    def on_event(self, text: str) -> None:
        """Events go to the log."""
        log.info("%s", text)

    def on_resume(self, update: int, batch: int) -> None:
        """Drops what will be written again."""
        self._writer.drop_from("batch", batch)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class TensorBoardListener:
    """Writes every numeric metric as a scalar; imports tensorboard at the first update."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._purge_step: int | None = None

    def on_update(self, metrics: Metrics) -> None:
        """Adds one point to each curve."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value) and "/" in name:
                self._writer.add_scalar(name, value, int(metrics["update"]))

    def on_event(self, text: str) -> None:
        """Events are not shown in TensorBoard."""

    def on_resume(self, update: int, batch: int) -> None:
        """Tells TensorBoard to hide what will be written again."""
        self._purge_step = update + 1

    def close(self) -> None:
        """Flushes and closes."""
        if self._writer is not None:
            self._writer.close()
