"""Tasks: endless training problems, a fixed held-out set, and a scorer. One row in `TASKS` each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from farl.core.protocols import Task, Tokenizer
from farl.errors import ConfigError, TaskError, unknown_name
from farl.tasks.addition import AdditionTask
from farl.tasks.config import TaskConfig
from farl.tasks.jsonl import JsonlTask
from farl.tasks.prompts import Prompts
from farl.tasks.reasoning_gym import ReasoningGymTask

TASKS: Mapping[str, Callable[[TaskConfig, Prompts], Task]] = {
    "addition": AdditionTask,
    "jsonl": JsonlTask,
    "reasoning_gym": ReasoningGymTask,
}


def make_task(config: TaskConfig, tokenizer: Tokenizer, *, system: str | None = None) -> Task:
    """Builds the task a config names.

    Args:
        config: the settings.
        tokenizer: encodes prompts.
        system: system prompt for the chat form.

    Raises:
        ConfigError: for an unknown name, or a factory that cannot be imported.
        TaskError: if its data cannot be used.
    """
    prompts = Prompts(tokenizer, config.template, system)
    if config.import_from:
        task = _imported(config.import_from)(config, tokenizer)
        if not isinstance(task, Task):
            raise TaskError(
                f"task.import={config.import_from!r}: gave a {type(task).__name__}, which lacks train_problem, "
                "eval_problems or score; see farl.core.protocols.Task"
            )
        return task
    if config.name not in TASKS:
        raise unknown_name("task.name", config.name, TASKS)
    return TASKS[config.name](config, prompts)


def _imported(target: str) -> Callable[[TaskConfig, Tokenizer], object]:
    module_name, _, attribute = target.partition(":")
    try:
        factory: Callable[[TaskConfig, Tokenizer], object] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.import={target!r}: cannot be imported: {error}") from error
    return factory


__all__ = ["TASKS", "TaskConfig", "make_task"]
