"""The two passes over the weights as single loops, for torch.compile; eager torch takes a few passes in cache.

Suffix n: entries of one piece of a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def absorb(here_n: Tensor, last_n: Tensor, row_n: Tensor) -> Tensor:
    """Stores `here - last` in a row of the history and `here` in `last`; returns the squared norm of the difference."""
    wide_n = here_n.float()
    moved_n = wide_n - last_n
    last_n.copy_(wide_n)
    row_n.copy_(moved_n)
    return (moved_n * moved_n).sum()


def combine(out_n: Tensor, base_n: Tensor, rows: Sequence[Tensor], factors: Tensor) -> None:
    """Writes `base + sum_i factors[i] * rows[i]`, summed in fp32 and cast last."""
    total_n = base_n.float()
    for i, row_n in enumerate(rows):
        total_n = total_n + row_n.float() * factors[i]
    out_n.copy_(total_n)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one fused loop for pieces of any size; compiled once in a process, cached on disk by torch."""
    return torch.compile(function, dynamic=True, fullgraph=True)
