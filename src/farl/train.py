"""Starting and resuming a run: folder, parts, loop, summary. What `farl train` calls."""

from __future__ import annotations

import json
import platform
import threading
import time
from pathlib import Path
from typing import Any

import torch

import farl
from farl.build import build_parts
from farl.config import TrainConfig, config_hash, parse_config, to_json
from farl.errors import CheckpointError, ConfigError
from farl.runtime.display import ConsoleListener, print_summary
from farl.runtime.loop import Trainer
from farl.runtime.records import JsonlListener, Listener, TensorBoardListener
from farl.runtime.summary import Summary

CONFIG_FILE = "config.json"


def start(
    config: TrainConfig, *, run_dir: Path | None = None, stop: threading.Event | None = None, show: bool = True
) -> Summary:
    """Trains from the beginning in a new run folder.

    Args:
        config: the checked config.
        run_dir: the folder; None makes `runs/<name>-<time>`.
        stop: set it to stop at the next batch boundary.
        show: whether to show progress and print the summary.

    Raises:
        ConfigError: if the folder already holds a run.
    """
    folder = run_dir or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(f"run-dir={str(folder)!r}: holds a run already; resume it with --resume, or name another")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(to_json(config), indent=1) + "\n")
    (folder / "machine.json").write_text(json.dumps(_machine(), indent=1) + "\n")
    return _run(config, folder, resume_step=None, stop=stop, show=show)


def resume(folder: Path, *, stop: threading.Event | None = None, show: bool = True) -> Summary:
    """Continues a run from its newest good checkpoint, to the same numbers as if it had never stopped.

    Raises:
        ConfigError: if the folder holds no run.
        CheckpointError: if it holds no checkpoint that verifies.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"resume={str(folder)!r}: holds no {CONFIG_FILE}; give the folder of a run")
    config = parse_config(json.loads((folder / CONFIG_FILE).read_text()))
    return _run(config, folder, resume_step=-1, stop=stop, show=show)


def _run(
    config: TrainConfig, folder: Path, *, resume_step: int | None, stop: threading.Event | None, show: bool
) -> Summary:
    torch.set_num_threads(config.pipeline.threads)
    torch.manual_seed(config.seed)
    listeners: list[Listener] = [JsonlListener(folder)]
    if config.record.tensorboard:
        listeners.append(TensorBoardListener(folder))
    if show:
        total = config.learner.num_batches * config.pipeline.updates_per_batch
        listeners.append(ConsoleListener(total, title=f"farl train {config.name}"))
    parts = trainer = None
    try:
        parts, save_final_model = build_parts(config, folder, listeners)
        trainer = Trainer(config, parts, config_hash=config_hash(config), stop=stop)
        if resume_step is not None:
            newest = trainer.store.latest()
            if newest is None:
                raise CheckpointError(f"{folder}: no checkpoint that verifies; start the run again in another folder")
            trainer.restore(newest)
        summary = trainer.run()
        if summary.finished and config.record.save_model:
            save_final_model(folder / "model")
    finally:
        if trainer is not None:
            trainer.close()
        if parts is not None:
            parts.pool.close()
            parts.transport.close()
        for listener in listeners:
            listener.close()
    (folder / "summary.json").write_text(json.dumps(summary.to_json(), indent=1) + "\n")
    if show:
        print_summary(summary, folder=str(folder))
    return summary


def _machine() -> dict[str, Any]:
    return {
        "farl": farl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "processor": platform.processor(),
    }
