"""Composition: from a config to the parts of a run. The only place where runtime meets engines and tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from farl.config import TrainConfig, to_json
from farl.core.protocols import Tokenizer, Transport
from farl.core.types import DTYPES
from farl.engines.models import ModelConfig
from farl.engines.transformers_engine import CausalPolicy, TransformersSampler
from farl.engines.transformers_models import ChatTokenizer, load_model, save_model
from farl.runtime.launch_inline import InlinePool
from farl.runtime.launch_local import LocalPool
from farl.runtime.loop import Parts
from farl.runtime.pool import RolloutPool
from farl.runtime.records import Listener
from farl.runtime.rollout import RolloutTools
from farl.tasks import make_task
from farl.wire import InProcessTransport, SharedMemoryTransport


def build_tools(config: TrainConfig) -> RolloutTools:
    """Loads a sampler of its own, the tokenizer and the task; what a rollout worker needs."""
    module, tokenizer = load(config.model)
    return RolloutTools(
        sampler=TransformersSampler(module, tokenizer),
        tokenizer=tokenizer,
        task=make_task(config.task, tokenizer),
        config=config.rollout,
    )


def build_parts(
    config: TrainConfig, folder: Path, listeners: Sequence[Listener]
) -> tuple[Parts, Callable[[Path], None]]:
    """Loads the learner and starts the workers.

    Returns:
        The parts, and a function that writes the learner's exact weights as a model folder.
    """
    module, tokenizer = load(config.model)
    transport: Transport
    pool: RolloutPool
    if config.pipeline.launch == "inline":
        transport = InProcessTransport(_spec(module), wire_dtype=DTYPES[config.pipeline.wire_dtype])
        pool = InlinePool(build_tools(config), transport)
    else:
        transport = SharedMemoryTransport(_spec(module), wire_dtype=DTYPES[config.pipeline.wire_dtype])
        pool = LocalPool([sys.executable, "-m", "farl.worker"], to_json(config), config.pipeline, folder / "workers")
    parts = Parts(
        policy=CausalPolicy(module),
        tokenizer=tokenizer,
        pad_id=tokenizer.pad_id,
        task=make_task(config.task, tokenizer),
        eval_sampler=TransformersSampler(module, tokenizer),
        pool=pool,
        transport=transport,
        listeners=listeners,
        folder=folder,
    )
    return parts, lambda path: save_model(module, tokenizer, path)


def load(config: ModelConfig) -> tuple[nn.Module, ChatTokenizer]:
    """The model and its tokenizer, from the cache where there is one."""
    return load_model(config)
