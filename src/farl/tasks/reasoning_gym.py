"""Procedural problems of reasoning-gym with their own scorers; the only module that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farl.core.types import Problem
from farl.errors import ConfigError, TaskError
from farl.tasks.config import TaskConfig
from farl.tasks.prompts import Prompts

_TRAIN_SIZE = 1 << 24
_MAX_DRAWS = 200


class ReasoningGymTask:
    """Any dataset of reasoning-gym, scored by its own scorer; held-out questions never occur in training."""

    def __init__(self, config: TaskConfig, prompts: Prompts) -> None:
        import reasoning_gym

        self._prompts = prompts
        try:
            self._train = reasoning_gym.create_dataset(
                config.dataset, size=_TRAIN_SIZE, seed=2 * config.seed, **config.options
            )
            held_out = reasoning_gym.create_dataset(
                config.dataset, size=_MAX_DRAWS * config.num_eval, seed=2 * config.seed + 1, **config.options
            )
        except (ValueError, TypeError, AssertionError, KeyError) as error:
            raise ConfigError(
                f"task.dataset={config.dataset!r} with options {dict(config.options)}: reasoning-gym refuses: {error}"
            ) from error
        found: dict[str, Problem] = {}
        for item in held_out:
            if len(found) == config.num_eval:
                break
            found.setdefault(item["question"], self._problem(item))
        if len(found) < config.num_eval:
            raise ConfigError(
                f"task.num_eval={config.num_eval}: {config.dataset} gave only {len(found)} different questions; lower "
                "it or widen the options"
            )
        self._eval = list(found.values())
        self._held_out = set(found)

    def _problem(self, item: dict[str, Any]) -> Problem:
        question = item["question"]
        return Problem(key=question, prompt_ids=self._prompts.encode(question), entry=item, text=question)

    def train_problem(self, index: int) -> Problem:
        """Item `index` of the training stream, or one further on where that is held out."""
        for draw in range(_MAX_DRAWS):
            item = self._train[(index + draw * (_TRAIN_SIZE // _MAX_DRAWS)) % _TRAIN_SIZE]
            if item["question"] not in self._held_out:
                return self._problem(item)
        raise TaskError("task: nearly every question is held out; lower task.num_eval or widen the options")

    def eval_problems(self) -> Sequence[Problem]:
        """The held-out problems."""
        return self._eval

    def score(self, problem: Problem, completion: str) -> float:
        """The dataset's own score of the stripped completion."""
        return float(self._train.score_answer(answer=completion.strip(), entry=problem.entry))
