"""The two passes: every way of making them against the formula written out, on sizes that hit tails and strips."""

import math
import os
import shutil
import signal
import time
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from farl.errors import ConfigError
from farl.forecast import ForecastConfig, Moments, native
from farl.forecast.history import Ring
from farl.forecast.passes import absorb, combine, run_ahead, tell

SIZES = (1, 31, 128, 129, 2048, 2049, 5000, (1 << 17) + 77)
DTYPES = ("float32", "bfloat16", "int8")
CPU = torch.device("cpu")


def made(size, dtype, *, capacity=3, seed=0):
    """A ring of known rows, a leaf and the weights before it."""
    generator = torch.Generator().manual_seed(seed)
    ring = Ring.empty(capacity, size, dtype=dtype, device=CPU)
    rows = [torch.randn(size, generator=generator) * 10 ** (slot - 3) for slot in range(capacity)]
    for slot, row in enumerate(rows):
        ring.store(slot, 0, row)
    leaf, last = (torch.randn(size, generator=generator) for _ in range(2))
    return ring, leaf, last


def read(ring, slot, size):
    """A stored row, by the definition of its storage."""
    row = ring.values_CN[slot].float()
    return row if ring.scales_CB is None else row * ring.scales_CB[slot].repeat_interleave(128)[:size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("leaf_dtype", [torch.float32, torch.bfloat16])
def test_absorb_stores_the_difference_and_keeps_the_leaf(kernels, size, dtype, leaf_dtype):
    ring, leaf, last = made(size, dtype)
    leaf = leaf.to(leaf_dtype)
    before = {slot: read(ring, slot, size) for slot in (0, 2)}
    moved = leaf.float() - last
    energy = absorb(ring, 1, leaf, last, kernels)
    assert torch.equal(last, leaf.float())
    assert float(energy) == pytest.approx(float(moved.double().square().sum()), rel=1e-5)
    expected = Ring.empty(1, size, dtype=dtype, device=CPU)
    expected.store(0, 0, moved)
    assert torch.equal(read(ring, 1, size), read(expected, 0, size)), "stored to the bit as Ring.store does"
    assert all(torch.equal(read(ring, slot, size), row) for slot, row in before.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(("base_dtype", "out_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_combine_is_the_sum_in_fp32_cast_last(kernels, size, dtype, base_dtype, out_dtype):
    ring, base, _ = made(size, dtype)
    base = base.to(getattr(torch, base_dtype))
    out = torch.full((size,), torch.nan, dtype=getattr(torch, out_dtype))
    combine(ring, base, out, [(2, 1.5), (0, -0.25)], kernels)
    wide = base.double() + 1.5 * read(ring, 2, size).double() - 0.25 * read(ring, 0, size).double()
    tolerance = {"float32": 4e-7, "bfloat16": 2**-8}[out_dtype]
    torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=tolerance)
    combine(ring, base, out, [], kernels)
    assert torch.equal(out, base.to(out.dtype)), "no terms: the weights as they are"


OPTIMIZERS = {
    "adamw": Moments(kind="adam", first_N=None, second_N=None, step=3, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8),
    "adamw, decay": Moments(
        kind="adam", first_N=None, second_N=None, step=40, lr=1e-2, beta1=0.8, beta2=0.99, eps=1e-5, weight_decay=0.1
    ),
    "adam, decay in the gradient": Moments(
        kind="adam", first_N=None, second_N=None, step=7, lr=1e-2, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1,
        decoupled=False,
    ),
    "sgd": Moments(kind="sgd", first_N=None, second_N=None, step=1, lr=1e-2, beta1=0.9, decoupled=False),
    "sgd, dampened": Moments(
        kind="sgd", first_N=None, second_N=None, step=1, lr=1e-2, beta1=0.9, dampening=0.5, decoupled=False
    ),
    "sgd, nesterov and decay": Moments(
        kind="sgd", first_N=None, second_N=None, step=1, lr=1e-2, beta1=0.9, nesterov=True, weight_decay=0.1,
        decoupled=False,
    ),
    "sgd, plain": Moments(kind="sgd", first_N=None, second_N=None, step=1, lr=1e-2, decoupled=False),
}  # fmt: skip


def with_state(name, size, dtype=torch.float32):
    moments = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(size, generator=generator).to(dtype)
    second = torch.rand(size, generator=generator).add(1e-3).to(dtype)
    keeps_first = moments.kind == "adam" or moments.beta1
    return replace(moments, first_N=first if keeps_first else None, second_N=second if moments.kind == "adam" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 129, 5000, (1 << 17) + 77])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if with_state(n, 1).tells_displacement])
def test_the_c_loop_reads_the_last_step_as_the_formula_does(name, size, dtype):
    """`moments.last_displacement` is checked against really running optimizers in test_moments."""
    moments = with_state(name, size, dtype)
    rings = [Ring.empty(1, size, dtype="float32", device=CPU) for _ in range(2)]
    leaf = torch.randn(size).to(dtype)
    energies = [tell(ring, 0, leaf, moments, how) for ring, how in zip(rings, ("native", "torch"), strict=True)]
    torch.testing.assert_close(rings[0].values_CN, rings[1].values_CN, rtol=2e-6, atol=1e-9)
    assert float(energies[0]) == pytest.approx(float(energies[1]), rel=1e-5)


@pytest.mark.parametrize("assumed", [0.0, 0.7])
@pytest.mark.parametrize("size", [1, 129, 5000, (1 << 17) + 77])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_c_loop_runs_optimizers_ahead_as_the_recursion_does(name, size, assumed):
    moments, base = with_state(name, size), torch.randn(size)
    outs = [torch.full((size,), torch.nan) for _ in range(2)]
    for out, how in zip(outs, ("native", "torch"), strict=True):
        run_ahead(
            moments, base, out, shares=(1.0, 1.0, 0.25), assumed=assumed, lrs=(1e-2, 5e-3, 2e-3), damping=0.8,
            kernels=how,
        )  # fmt: skip
    torch.testing.assert_close(outs[0] - base, outs[1] - base, rtol=1e-5, atol=5e-7)
    assert (float((outs[0] - base).norm()) > 0) == (name != "sgd, plain"), (
        "without momentum nothing is known of the next gradient"
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40))
def test_the_c_loop_rounds_every_float_as_torch_does(values):
    leaf = torch.tensor(values, dtype=torch.float32)
    ring = Ring.empty(1, len(values), dtype="bfloat16", device=CPU)
    native.absorb(ring, 0, leaf, torch.zeros_like(leaf))
    torch.testing.assert_close(ring.values_CN[0], leaf.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1 << 17) + 1, (1 << 18) + 5, 5 * (1 << 17) + 300])
def test_parts_on_several_threads_make_the_whole(three_threads, dtype, size):
    """Against torch's kernels, which do not know of the parts; what threads write is the same to the bit."""
    ring, leaf, last = made(size, dtype)
    other = Ring(values_CN=ring.values_CN.clone(), scales_CB=None if ring.scales_CB is None else ring.scales_CB.clone())
    energies = [absorb(ring, 1, leaf, last.clone(), "native"), absorb(other, 1, leaf, last.clone(), "torch")]
    assert float(energies[0]) == pytest.approx(float(energies[1]), rel=1e-5)
    assert all(torch.equal(ring.tensors[key], other.tensors[key]) for key in ring.tensors)
    outs = [torch.full((size,), torch.nan) for _ in range(3)]
    combine(ring, last, outs[0], [(2, 1.5), (1, -0.25)], "native")
    torch.set_num_threads(1)
    combine(ring, last, outs[1], [(2, 1.5), (1, -0.25)], "native")
    assert torch.equal(outs[0], outs[1])
    torch.set_num_threads(3)
    moments = with_state("adamw", size)
    run_ahead(moments, last, outs[0], shares=(1.0,), assumed=0.5, lrs=(1e-2,), damping=1.0, kernels="native")
    run_ahead(moments, last, outs[2], shares=(1.0,), assumed=0.5, lrs=(1e-2,), damping=1.0, kernels="torch")
    torch.testing.assert_close(outs[0], outs[2], rtol=1e-5, atol=5e-7)
    told = [Ring.empty(1, size, dtype="float32", device=CPU) for _ in range(2)]
    energies = [tell(r, 0, leaf, moments, how) for r, how in zip(told, ("native", "torch"), strict=True)]
    torch.testing.assert_close(told[0].values_CN, told[1].values_CN, rtol=2e-6, atol=1e-9)
    assert float(energies[0]) == pytest.approx(float(energies[1]), rel=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own(three_threads):
    """With its parent's pool it would wait for ever."""
    ring, leaf, last = made(1 << 18, "bfloat16")
    kept = last.clone()  # here: torch's own threads do not survive a fork either
    absorb(ring, 0, leaf, last, "native")
    child = os.fork()
    if child == 0:
        absorb(ring, 0, leaf, kept, "native")
        os._exit(0)
    deadline = time.monotonic() + 20
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child hangs"
    assert status == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_entry_that_is_not_finite_shows_in_the_norm(bad, dtype):
    for kernels in ("torch", "native"):
        ring, leaf, last = made(3000, dtype)
        leaf[2999] = bad
        assert not math.isfinite(absorb(ring, 0, leaf, last, kernels))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch 2.13's own backend
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor backend needs a C++ compiler")
def test_inductor_makes_the_same_passes():
    """More shapes, dtypes and row counts than dynamo's default limit on compilations."""
    for size in (100, 5000, 1 << 16):
        for rows in range(1, 10):
            ring, base, _ = made(size, "bfloat16", capacity=10)
            terms = [(slot, 0.5 - slot) for slot in range(rows)]
            for base_dtype in (torch.float32, torch.bfloat16):
                fused, plain = torch.empty(size), torch.empty(size)
                combine(ring, base.to(base_dtype), fused, terms, "inductor")
                combine(ring, base.to(base_dtype), plain, terms, "torch")
                torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6 * 10**rows)
        ring, leaf, last = made(size, "bfloat16")
        other = Ring(values_CN=ring.values_CN.clone())
        energies = [absorb(ring, 1, leaf, last.clone(), "inductor"), absorb(other, 1, leaf, last.clone(), "torch")]
        assert torch.equal(ring.values_CN, other.values_CN)
        assert float(energies[0]) == pytest.approx(float(energies[1]), rel=1e-5)


def test_without_a_compiler_auto_takes_torch_and_native_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "library", lambda: None)
    ring, leaf, last = made(300, "bfloat16")
    moved = leaf - last
    absorb(ring, 0, leaf, last, "auto")
    assert torch.equal(ring.values_CN[0], moved.bfloat16())
    with pytest.raises(ConfigError, match=r"kernels='native': needs a C compiler"):
        ForecastConfig(kernels="native")


def test_a_compiler_that_fails_is_reported_once_and_replaced(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level("INFO", logger="farl.forecast"):
        assert native.library.__wrapped__() is None
    assert "false could not compile passes.c, torch's kernels do instead" in caplog.text
    assert not list((tmp_path / "farl").iterdir()), "nothing half made is left"


def test_the_library_is_compiled_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library.__wrapped__() is not None
    built = list((tmp_path / "farl").iterdir())
    assert [p.suffix for p in built] == [".so"]
    written = built[0].stat().st_mtime_ns
    assert native.library.__wrapped__() is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "farl").iterdir()] == [written]
