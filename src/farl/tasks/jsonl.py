"""Problems from a JSONL file, split into training and held-out ones, scored by comparison or by math-verify."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farl.core.types import Problem
from farl.errors import ConfigError, TaskError
from farl.tasks.config import TaskConfig
from farl.tasks.prompts import Prompts

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class JsonlTask:
    """Question and answer pairs from a JSONL file; the last shuffled lines are held out."""

    def __init__(self, config: TaskConfig, prompts: Prompts) -> None:
        self._prompts = prompts
        self._score = _SCORERS[config.scorer]
        rows = _read(config)
        unique = list({q: (q, a) for q, a in rows}.values())
        if len(unique) <= config.num_eval:
            raise ConfigError(
                f"task.num_eval={config.num_eval}: {config.path} holds {len(unique)} different questions; some must "
                "be left to train on"
            )
        random.Random(f"jsonl {config.seed}").shuffle(unique)
        self._train, held_out = unique[: -config.num_eval], unique[-config.num_eval :]
        self._eval = [self._problem(q, a) for q, a in held_out]
        self._seed = config.seed

    def _problem(self, question: str, answer: str) -> Problem:
        return Problem(key=question, prompt_ids=self._prompts.encode(question), entry={"answer": answer}, text=question)

    def train_problem(self, index: int) -> Problem:
        """All training lines in a new order in each epoch."""
        epoch, position = divmod(index, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"jsonl {self._seed} epoch {epoch}").shuffle(order)
        return self._problem(*self._train[order[position]])

    def eval_problems(self) -> Sequence[Problem]:
        """The held-out lines."""
        return self._eval

    def score(self, problem: Problem, completion: str) -> float:
        """1 if the scorer accepts the completion."""
        return float(self._score(problem.entry["answer"], completion))


def _read(config: TaskConfig) -> list[tuple[str, str]]:
    path = Path(config.path).expanduser()
    if not config.path or not path.is_file():
        raise TaskError(f"task.path={config.path!r}: no such file; give a JSONL file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row: Mapping[str, Any] = json.loads(line)
            rows.append((str(row[config.question_field]), str(row[config.answer_field])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TaskError(
                f"{path}:{number}: not an object with {config.question_field!r} and {config.answer_field!r}: {error}"
            ) from error
    return rows


def _exact(answer: str, completion: str) -> bool:
    return completion.strip() == answer.strip()


def _number(answer: str, completion: str) -> bool:
    found = [_NUMBER.findall(text) for text in (answer, completion)]
    if not all(found):
        return False
    gold, guess = (float(numbers[-1].replace(",", "")) for numbers in found)
    return gold == guess


def _math(answer: str, completion: str) -> bool:
    from farl.tasks.math import equivalent

    return equivalent(answer, completion)


_SCORERS: Mapping[str, Callable[[str, str], bool]] = {"exact": _exact, "number": _number, "math": _math}
