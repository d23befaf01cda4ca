"""The two passes over the weights as C loops, for weights on a CPU; compiled once on the machine that runs them.

torch's kernels make several passes in cache for each of ours and reach about half the speed of memory (`make bench`
prints both); `passes.c` makes one. It is compiled at first use by the C compiler found on the machine, kept under
`~/.cache/farl`, and called with the interpreter lock released, by as many threads as torch has. `passes` decides who
works.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from farl.forecast.history import BLOCK, Ring
from farl.forecast.moments import Moments, mean_gradient_factor

log = logging.getLogger("farl.forecast")

_SOURCE = Path(__file__).with_name("passes.c")
_FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-std=c99",
    "-shared",
    "-fPIC",
)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_COMPILE_TIMEOUT_S = 60
_SMALLEST_PART = 1 << 17
"""Entries below which a thread of its own costs more than it saves."""


class _Optimizer(ctypes.Structure):
    """`Optimizer` of the C source."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("decoupled", ctypes.c_int),
        ("nesterov", ctypes.c_int),
        ("beta1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("weight_decay", ctypes.c_float),
        ("undampened", ctypes.c_float),
    )

    @classmethod
    def of(cls, moments: Moments) -> _Optimizer:
        return cls(
            ("adam", "sgd").index(moments.kind),
            moments.decoupled,
            moments.nesterov,
            moments.beta1,
            moments.beta2,
            moments.eps,
            moments.weight_decay,
            1 - moments.dampening,
        )


class _Update(ctypes.Structure):
    """`Update` of the C source."""

    _fields_ = (
        ("share", ctypes.c_float),
        ("lr", ctypes.c_float),
        ("scaled_lr", ctypes.c_float),
        ("inverse_correction", ctypes.c_float),
    )

    @classmethod
    def of(cls, moments: Moments, step: int, lr: float, share: float = 1.0) -> _Update:
        if moments.kind == "sgd":
            return cls(share, lr, lr, 1.0)
        return cls(share, lr, lr / (1 - moments.beta1**step), 1 / (1 - moments.beta2**step))


def can_read(tensor: Tensor | None) -> bool:
    """Whether the loops can work on a tensor: float32 or bfloat16, contiguous, on a CPU; or none at all."""
    if tensor is None:
        return True
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.is_contiguous()


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None, with the reason logged once, where there is no compiler or it fails."""
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        log.info("no C compiler found: the passes over the weights take torch's kernels, about half as fast")
        return None
    try:
        loaded = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.info("%s could not compile %s, torch's kernels do instead: %s", compiler, _SOURCE.name, detail)
        return None
    pointer, kind, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.farl_absorb.argtypes = [pointer, kind, pointer, pointer, pointer, kind, size]
    loaded.farl_absorb.restype = ctypes.c_double
    loaded.farl_tell.argtypes = [*(pointer, kind) * 3, pointer, pointer, pointer, pointer, kind, size]
    loaded.farl_tell.restype = ctypes.c_double
    single = ctypes.c_float
    loaded.farl_run_ahead.argtypes = [*(pointer, kind) * 4, pointer, pointer, kind, single, single, size]
    loaded.farl_run_ahead.restype = None
    loaded.farl_combine.argtypes = [pointer, kind, pointer, kind, pointer, pointer, pointer, kind, kind, size]
    loaded.farl_combine.restype = None
    return loaded


def _loops() -> ctypes.CDLL:
    """The loops, where `passes` has made sure of them."""
    loops = library()
    assert loops is not None
    return loops


def _build(compiler: str) -> Path:
    """The shared library, from the cache if this source was compiled for this processor before."""
    key = hashlib.sha256("\n".join((_SOURCE.read_text(), compiler, *_FLAGS, _processor())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "farl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="farl-"))
    built = folder / f"passes-{key}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / built.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            fresh.replace(built)  # at once, whoever else is compiling
    return built


def _processor() -> str:
    """What `-march=native` depends on; home folders are shared between unlike machines."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    return f"{platform.machine()} {features}"


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="farl-passes")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _in_parts(size: int, work: Callable[[slice], float | None]) -> float:
    """Does the work on all entries of a leaf, a part on each of torch's threads; adds up what it returned."""
    threads = min(torch.get_num_threads(), -(-size // _SMALLEST_PART))
    if threads <= 1:
        return work(slice(0, size)) or 0.0
    return sum(x or 0.0 for x in _pool(torch.get_num_threads()).map(work, _parts(size, threads)))


def _parts(size: int, count: int) -> Iterator[slice]:
    """At most so many parts of a leaf, of whole blocks but for the last."""
    step = -(-size // (count * BLOCK)) * BLOCK
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _read(tensor: Tensor | None, start: int = 0) -> tuple[int | None, int]:
    """Address of a tensor from an entry on, and its kind, as the loops take them."""
    if tensor is None:
        return None, 0
    return tensor.data_ptr() + start * tensor.element_size(), _KINDS[tensor.dtype]


def _row(ring: Ring, slot: int, start: int = 0) -> tuple[int, int | None, int]:
    """Address of a row from an entry on, of its scales, and its kind."""
    values_N = ring.values_CN[slot]
    scales = None
    if ring.scales_CB is not None:
        scales = ring.scales_CB[slot].data_ptr() + start // BLOCK * ring.scales_CB.element_size()
    return values_N.data_ptr() + start * values_N.element_size(), scales, _KINDS[values_N.dtype]


def absorb(ring: Ring, slot: int, leaf_N: Tensor, last_N: Tensor) -> float:
    """`passes.absorb` over a whole leaf."""
    loop = _loops().farl_absorb

    def work(part: slice) -> float:
        first = part.start
        squared: float = loop(
            *_read(leaf_N, first), _read(last_N, first)[0], *_row(ring, slot, first), part.stop - first
        )
        return squared

    return _in_parts(len(leaf_N), work)


def tell(ring: Ring, slot: int, leaf_N: Tensor, moments: Moments) -> float:
    """`passes.tell` over a whole leaf."""
    loop = _loops().farl_tell
    optimizer, update = _Optimizer.of(moments), _Update.of(moments, moments.step, moments.lr)

    def work(part: slice) -> float:
        first = part.start
        squared: float = loop(
            *_read(leaf_N, first),
            *_read(moments.first_N, first),
            *_read(moments.second_N, first),
            ctypes.addressof(optimizer),
            ctypes.addressof(update),
            *_row(ring, slot, first),
            part.stop - first,
        )
        return squared

    return _in_parts(len(leaf_N), work)


def run_ahead(
    moments: Moments,
    base_N: Tensor,
    out_N: Tensor,
    *,
    shares: Sequence[float],
    assumed: float,
    lrs: Sequence[float],
    damping: float,
) -> None:
    """`passes.run_ahead` over a whole leaf."""
    loop = _loops().farl_run_ahead
    optimizer = _Optimizer.of(moments)
    updates = [_Update.of(moments, moments.step + i, lrs[i - 1], share) for i, share in enumerate(shares, start=1)]
    table = (_Update * len(updates))(*updates)
    drift = assumed * mean_gradient_factor(moments)

    def work(part: slice) -> None:
        first = part.start
        loop(
            *_read(out_N, first),
            *_read(base_N, first),
            *_read(moments.first_N, first),
            *_read(moments.second_N, first),
            ctypes.addressof(optimizer),
            ctypes.addressof(table),
            len(updates),
            drift,
            damping,
            part.stop - first,
        )

    _in_parts(len(out_N), work)


def combine(ring: Ring, base_N: Tensor, out_N: Tensor, terms: Sequence[tuple[int, float]]) -> None:
    """`passes.combine` over a whole leaf."""
    loop = _loops().farl_combine
    factors = (ctypes.c_float * len(terms))(*(factor for _, factor in terms))

    def work(part: slice) -> None:
        first = part.start
        rows = [_row(ring, slot, first) for slot, _ in terms]
        loop(
            *_read(out_N, first),
            *_read(base_N, first),
            (ctypes.c_void_p * len(rows))(*(values for values, _, _ in rows)),
            (ctypes.c_void_p * len(rows))(*(scales for _, scales, _ in rows)),
            factors,
            len(rows),
            _KINDS[ring.values_CN.dtype],
            part.stop - first,
        )

    _in_parts(len(out_N), work)
