"""Counts the steps of optimizers between two calls of `observe`, and keeps the learning rates they were made at.

Read at the step itself: a scheduler that steps before `observe` would change them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from farl.errors import StateError

Rates = Sequence[Sequence[float]]
"""Learning rates of one update, by optimizer and parameter group."""


class StepCounter:
    """Hooks on the optimizers, gone with the counter.

    Attributes:
        rates: learning rates of the last steps; those set now before the first.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.rates = [_rates(optimizer) for optimizer in optimizers]
        self._counts = [0] * len(optimizers)
        self._is_under_way = [False] * len(optimizers)
        own = weakref.ref(self)
        for i, optimizer in enumerate(optimizers):
            begun = optimizer.register_step_pre_hook(_hook(own, StepCounter.begin, i))
            made = optimizer.register_step_post_hook(_hook(own, StepCounter.note, i))
            weakref.finalize(self, begun.remove)
            weakref.finalize(self, made.remove)

    @property
    def any(self) -> bool:
        """Whether an optimizer has stepped."""
        return any(self._counts)

    def begin(self, i: int, optimizer: torch.optim.Optimizer) -> None:
        """Notes that optimizer i begins a step."""
        self._is_under_way[i] = True

    def note(self, i: int, optimizer: torch.optim.Optimizer) -> None:
        """Notes a step of optimizer i, once where the step of a subclass calls that of its base."""
        if not self._is_under_way[i]:
            return
        self._is_under_way[i] = False
        found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler for optimizers that skip by themselves
        if found_inf is None or float(found_inf) == 0:
            self._counts[i] += 1
            self.rates[i] = _rates(optimizer)

    def require_one(self, *, allow_skip: bool) -> None:
        """Raises `StateError` unless every optimizer has stepped once, or not at all where that is allowed."""
        if any(count > 1 or (count == 0 and not allow_skip) for count in self._counts):
            made = " and ".join(str(count) for count in self._counts)
            raise StateError(
                f"observe(): the optimizer made {made} steps since the last call, exactly 1 is needed; "
                "call observe() after every step, with allow_skip=True where a step may be skipped; after "
                "replacing the optimizer make a new Forecaster"
            )

    def clear(self) -> None:
        """Begins counting anew."""
        self._counts = [0] * len(self._counts)


def _rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def _hook(
    counter: weakref.ref[StepCounter], then: Callable[[StepCounter, int, torch.optim.Optimizer], None], i: int
) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = counter()
        if own is not None:
            then(own, i, optimizer)

    return hook
