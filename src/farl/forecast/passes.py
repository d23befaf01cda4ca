"""The two passes over the weights, and who makes them: torch's kernels, one loop of C, or torch.compile.

All give the same numbers up to the rounding of a fused multiply-add. torch's kernels work piece by piece, so that what
they pass to each other stays in cache. N entries of a leaf, n of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from farl.errors import ConfigError
from farl.forecast import native
from farl.forecast.history import Ring, pieces
from farl.forecast.moments import Moments, last_displacement
from farl.forecast.moments import run_ahead as run_piece_ahead

Kernels = Literal["auto", "torch", "native", "inductor"]
"""What `ForecastConfig.kernels` may be."""
_RECOMPILE_LIMIT = 64
"""Numbers of rows and dtypes that one process may meet under torch.compile."""


def require_kernels(kernels: Kernels) -> None:
    """Raises `ConfigError` if the C loops were asked for and cannot be made here."""
    if kernels == "native" and native.library() is None:
        raise ConfigError("kernels='native': needs a C compiler (cc, gcc, clang, or $CC); install one or take 'auto'")


def absorb(ring: Ring, slot: int, leaf_N: Tensor, last_N: Tensor, kernels: Kernels) -> Tensor | float:
    """Stores `leaf - last` in a row of the history and `leaf` in `last`; returns the squared norm.

    Reads leaf and last, writes last and the row: 12 bytes an entry and one stored displacement.
    """
    if _is_native(kernels, ring, leaf_N):
        return native.absorb(ring, slot, leaf_N, last_N)
    energy = torch.zeros((), dtype=torch.float64, device=leaf_N.device)
    for part in pieces(leaf_N):
        here_n, last_n = leaf_N[part], last_N[part]
        if _is_inductor(kernels, ring, leaf_N):
            energy += _compiled(_absorb_loop)(here_n, last_n, ring.values_CN[slot, part])
            continue
        here_n = here_n.float()
        moved_n = here_n - last_n
        last_n.copy_(here_n)
        ring.store(slot, part.start, moved_n)
        energy += torch.dot(moved_n, moved_n)
    return energy


def tell(ring: Ring, slot: int, leaf_N: Tensor, moments: Moments | None, kernels: Kernels) -> Tensor | float:
    """Stores the displacement that the optimizer's state tells, none where it has no state; returns its squared norm.

    Reads both moments, and the leaf where weights decay, and writes the row.
    """
    if moments is not None and _is_native(kernels, ring, leaf_N, moments.first_N, moments.second_N):
        return native.tell(ring, slot, leaf_N, moments)
    energy = torch.zeros((), dtype=torch.float64, device=leaf_N.device)
    for part in pieces(leaf_N):
        here_n = leaf_N[part].float()
        moved_n = torch.zeros_like(here_n) if moments is None else last_displacement(moments, here_n, part)
        ring.store(slot, part.start, moved_n)
        energy += torch.dot(moved_n, moved_n)
    return energy


def run_ahead(
    moments: Moments,
    base_N: Tensor,
    out_N: Tensor,
    *,
    shares: Sequence[float],
    assumed: float,
    lrs: Sequence[float],
    damping: float,
    kernels: Kernels,
) -> None:
    """Writes `base + damping * (what the optimizer's recursion adds)` to `out`; see `moments.run_ahead`.

    Reads the base and both moments, writes the result.
    """
    if _can_be_native(kernels, base_N, out_N, moments.first_N, moments.second_N):
        native.run_ahead(moments, base_N, out_N, shares=shares, assumed=assumed, lrs=lrs, damping=damping)
        return
    for part in pieces(base_N):
        here_n = base_N[part].float()
        moved_n = run_piece_ahead(moments, here_n, part, shares=shares, assumed=assumed, lrs=lrs)
        out_N[part] = here_n.add(moved_n, alpha=damping)


def combine(ring: Ring, base_N: Tensor, out_N: Tensor, terms: Sequence[tuple[int, float]], kernels: Kernels) -> None:
    """Writes `base + sum_i factor_i * row_i` to `out`, summed in fp32 and cast last.

    Reads the base and the rows named, writes the result.
    """
    if _is_native(kernels, ring, base_N, out_N):
        native.combine(ring, base_N, out_N, terms)
        return
    is_fused = _is_inductor(kernels, ring, base_N)
    factors = torch.tensor([a for _, a in terms], device=base_N.device) if is_fused else None
    for part in pieces(base_N):
        base_n, out_n = base_N[part], out_N[part]
        if not terms:
            out_n.copy_(base_n)
        elif is_fused:
            _compiled(_combine_loop)(out_n, base_n, [ring.values_CN[slot, part] for slot, _ in terms], factors)
        else:
            total_n = out_n if out_n.dtype == torch.float32 else torch.empty_like(base_n, dtype=torch.float32)
            ring.sum_into(total_n, base_n, part.start, terms)
            if total_n is not out_n:
                out_n.copy_(total_n)


def _is_native(kernels: Kernels, ring: Ring, *tensors: Tensor | None) -> bool:
    return ring.values_CN.device.type == "cpu" and _can_be_native(kernels, *tensors)


def _can_be_native(kernels: Kernels, *tensors: Tensor | None) -> bool:
    wanted = kernels in ("auto", "native") and all(native.can_read(t) for t in tensors)
    return wanted and native.library() is not None


def _is_inductor(kernels: Kernels, ring: Ring, leaf_N: Tensor) -> bool:
    return kernels == "inductor" and ring.is_plain(leaf_N.device)


def _absorb_loop(here_n: Tensor, last_n: Tensor, row_n: Tensor) -> Tensor:
    wide_n = here_n.float()
    moved_n = wide_n - last_n
    last_n.copy_(wide_n)
    row_n.copy_(moved_n)
    return (moved_n * moved_n).sum()


def _combine_loop(out_n: Tensor, base_n: Tensor, rows: Sequence[Tensor], factors: Tensor) -> None:
    total_n = base_n.float()
    for i, row_n in enumerate(rows):
        total_n = total_n + row_n.float() * factors[i]
    out_n.copy_(total_n)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one fused loop for pieces of any size; more kinds of arguments than dynamo allows unasked."""
    fused = torch.compile(function, dynamic=True, fullgraph=True)

    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return fused(*arguments)

    return call
