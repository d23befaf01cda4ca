"""The two passes over the weights as C loops, for weights on a CPU; compiled once on the machine that runs them.

torch's kernels make several passes in cache for each of ours and reach about half the speed of memory (`make bench`
prints both); `passes.c` makes one. It is compiled at first use by the C compiler found on the machine, kept under
`~/.cache/farl`, and called with the interpreter lock released. `passes` decides who works.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from farl.forecast.history import Ring

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


def can_read(tensor: Tensor) -> bool:
    """Whether the loops can work on a flat tensor: float32 or bfloat16, contiguous, on a CPU."""
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
    loaded.farl_combine.argtypes = [pointer, kind, pointer, kind, pointer, pointer, pointer, kind, kind, size]
    loaded.farl_combine.restype = None
    return loaded


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


def absorb(ring: Ring, slot: int, leaf_N: Tensor, last_N: Tensor) -> float:
    """`passes.absorb` over a whole leaf."""
    loops = library()
    assert loops is not None
    squared: float = loops.farl_absorb(
        leaf_N.data_ptr(),
        _KINDS[leaf_N.dtype],
        last_N.data_ptr(),
        ring.values_CN[slot].data_ptr(),
        None if ring.scales_CB is None else ring.scales_CB[slot].data_ptr(),
        _KINDS[ring.values_CN.dtype],
        len(leaf_N),
    )
    return squared


def combine(ring: Ring, base_N: Tensor, out_N: Tensor, terms: Sequence[tuple[int, float]]) -> None:
    """`passes.combine` over a whole leaf."""
    loops = library()
    assert loops is not None
    slots, factors = [slot for slot, _ in terms], [factor for _, factor in terms]
    scales = [None if ring.scales_CB is None else ring.scales_CB[slot].data_ptr() for slot in slots]
    loops.farl_combine(
        out_N.data_ptr(),
        _KINDS[out_N.dtype],
        base_N.data_ptr(),
        _KINDS[base_N.dtype],
        (ctypes.c_void_p * len(slots))(*(ring.values_CN[slot].data_ptr() for slot in slots)),
        (ctypes.c_void_p * len(slots))(*scales),
        (ctypes.c_float * len(slots))(*factors),
        len(slots),
        _KINDS[ring.values_CN.dtype],
        len(out_N),
    )
