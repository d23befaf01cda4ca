"""Composition: from a config to the parts of a run. The only place where runtime meets engines and tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from farl.config import TrainConfig, to_json
from farl.core.protocols import Transport
from farl.engines.transformers_engine import CausalPolicy, make_sampler
from farl.engines.transformers_models import LoadedModel, load_model, save_model
from farl.runtime.launch_inline import InlinePool
from farl.runtime.launch_local import LocalPool
from farl.runtime.loop import Parts
from farl.runtime.pool import RolloutPool
from farl.runtime.records import Listener
from farl.runtime.rollout import RolloutTools
from farl.tasks import make_task
from farl.tasks.addition import warm_start_examples
from farl.wire import InProcessTransport, SharedMemoryTransport, layout_of
from farl.wire.layout import spec_of


def load(config: TrainConfig) -> LoadedModel:
    """The model of a run, made first where it has to be made."""
    return load_model(config.model, warm_start_examples=warm_start_examples)


def build_tools(config: TrainConfig) -> RolloutTools:
    """Loads a sampler of its own, the tokenizer and the task; what a rollout worker needs."""
    model = load(config)
    return RolloutTools(
        sampler=make_sampler(model.module, model.tokenizer, model.max_positions),
        tokenizer=model.tokenizer,
        task=make_task(config.task, model.tokenizer, system=config.model.system),
        config=config.rollout,
    )


def build_parts(
    config: TrainConfig, folder: Path, listeners: Sequence[Listener]
) -> tuple[Parts, Callable[[Path], None]]:
    """Loads the learner and starts the workers.

    Returns:
        The parts, and a function that writes the learner's exact weights as a model folder.
    """
    model = load(config)
    task = make_task(config.task, model.tokenizer, system=config.model.system)
    layout = layout_of(spec_of(model.module), dtype=config.pipeline.wire_dtype)
    transport: Transport
    pool: RolloutPool
    if config.pipeline.launch == "inline":
        transport = InProcessTransport(layout)
        pool = InlinePool(build_tools(config), transport)
    else:
        wire_folder = config.pipeline.wire_folder
        transport = SharedMemoryTransport(layout, folder=Path(wire_folder) if wire_folder else None)
        pool = LocalPool([sys.executable, "-m", "farl.worker"], to_json(config), config.pipeline, folder / "workers")
    parts = Parts(
        policy=CausalPolicy(model.module),
        tokenizer=model.tokenizer,
        pad_id=model.tokenizer.pad_id,
        task=task,
        eval_sampler=make_sampler(model.module, model.tokenizer, model.max_positions),
        pool=pool,
        transport=transport,
        listeners=listeners,
        folder=folder,
    )
    return parts, lambda path: save_model(model, path)
