"""Two-digit addition for the tiny model, at fixed width: `07+34=` -> `041`. A tenth of all pairs is held out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

from farl.core.types import Problem
from farl.errors import ConfigError
from farl.tasks.config import TaskConfig
from farl.tasks.prompts import Prompts

_LIMIT = 100
_HELD_OUT_OF = 10


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair belongs to the held-out tenth; a fixed property of the pair."""
    return hashlib.blake2b(f"{a}+{b}".encode(), digest_size=2).digest()[0] % _HELD_OUT_OF == 0


def _question(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def _answer(a: int, b: int) -> str:
    return f"{a + b:03d}"


def _pairs(seed: str, *, held_out: bool) -> Iterator[tuple[int, int]]:
    numbers = random.Random(seed)
    while True:
        a, b = numbers.randrange(_LIMIT), numbers.randrange(_LIMIT)
        if is_held_out(a, b) == held_out:
            yield a, b


def warm_start_examples(noise: float, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Endless question and answer pairs, none of them held out; a share `noise` has one digit drawn anew."""
    numbers = random.Random(f"warm start noise {seed}")
    for a, b in _pairs(f"warm start {seed}", held_out=False):
        answer = _answer(a, b)
        if numbers.random() < noise:
            i = numbers.randrange(len(answer))
            answer = answer[:i] + str(numbers.randrange(10)) + answer[i + 1 :]
        yield _question(a, b), answer


class AdditionTask:
    """Sums of two numbers below 100, for the tiny digit model; reward 1 for the exact sum.

    The option `partial_credit = true` rewards the share of right digits instead.
    """

    def __init__(self, config: TaskConfig, prompts: Prompts) -> None:
        options = dict(config.options)
        self._partial = bool(options.pop("partial_credit", False))
        if options:
            raise ConfigError(f"task.options={options}: addition knows partial_credit only")
        self._seed = config.seed
        self._prompts = prompts
        held_out = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT) if is_held_out(a, b)]
        if config.num_eval > len(held_out):
            raise ConfigError(f"task.num_eval={config.num_eval}: at most {len(held_out)} additions are held out")
        chosen = random.Random(f"addition eval {config.seed}").sample(held_out, config.num_eval)
        self._eval = [self._problem(a, b) for a, b in chosen]

    def _problem(self, a: int, b: int) -> Problem:
        question = _question(a, b)
        return Problem(
            key=question, prompt_ids=self._prompts.encode(question), entry={"answer": _answer(a, b)}, text=question
        )

    def train_problem(self, index: int) -> Problem:
        """A pair that is not held out."""
        return self._problem(*next(_pairs(f"addition {self._seed} {index}", held_out=False)))

    def eval_problems(self) -> Sequence[Problem]:
        """Held-out pairs."""
        return self._eval

    def score(self, problem: Problem, completion: str) -> float:
        """1 for the sum and nothing else, or the share of right digits."""
        answer, given = str(problem.entry["answer"]), completion.strip()
        if self._partial and len(given) == len(answer):
            return sum(a == b for a, b in zip(given, answer, strict=True)) / len(answer)
        return float(given == answer)
