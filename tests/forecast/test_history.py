"""Storage of displacements: what each dtype costs and loses, and that where they lie does not matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farl.forecast import plan
from farl.forecast.history import BLOCK, STORAGE_BYTES, Ring

from .paths import dense, follow, momentum_path, settings


def stored(moved, dtype, *, offload=False):
    ring = Ring.empty(2, len(moved), dtype=dtype, device=torch.device("cpu"), offload=offload)
    ring.store(1, 0, moved)
    out = torch.empty_like(moved)
    ring.sum_into(out, torch.zeros_like(moved), 0, [(1, 1.0)])
    return out, ring


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.0), ("bfloat16", 0.003), ("int8", 0.011)])
@pytest.mark.parametrize("scale", [1e-7, 1.0])
def test_relative_error_of_a_stored_displacement(dtype, bound, scale):
    """Normal entries: bf16 keeps 8 bits; a block of 128 peaks at about 2.7 sigma, and 1/127 of that is rounded
    evenly."""
    moved = scale * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    out, ring = stored(moved, dtype)
    error = float((out - moved).norm() / moved.norm())
    assert error <= bound
    if dtype != "float32":
        assert error > bound / 3, "and the bound says something"
    per_entry = sum(t[0].numel() * t.element_size() for t in ring.tensors.values()) / len(moved)
    assert per_entry == pytest.approx(STORAGE_BYTES[dtype], rel=0.01)


@examples(max_examples=40, deadline=None)
@given(size=st.integers(1, 700), dtype=st.sampled_from(["float32", "bfloat16", "int8"]), seed=st.integers(0, 99))
def test_pieces_give_what_the_whole_gives(size, dtype, seed):
    moved = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    whole, _ = stored(moved, dtype)
    ring = Ring.empty(3, size, dtype=dtype, device=torch.device("cpu"))
    out, base = torch.empty(size), torch.arange(float(size))
    for start in range(0, size, BLOCK):
        ring.store(2, start, moved[start : start + BLOCK])
    for start in range(0, size, BLOCK):
        part = slice(start, start + BLOCK)
        ring.sum_into(out[part], base[part], start, [(2, 0.5), (2, 0.25)])
    assert torch.allclose(out, base + 0.75 * whole, atol=1e-4)


def test_int8_bounds_every_entry_by_its_block():
    moved = torch.cat([1e-6 * torch.randn(BLOCK), torch.randn(BLOCK), torch.zeros(BLOCK)])
    out, _ = stored(moved, "int8")
    for start in range(0, len(moved), BLOCK):
        part = slice(start, start + BLOCK)
        assert (out[part] - moved[part]).abs().max() <= moved[part].abs().max() / 254 * 1.001


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_offloaded_history_forecasts_the_same(dtype):
    path = momentum_path(12, size=700)
    here, _ = follow(path, settings(history_dtype=dtype))
    there, _ = follow(path, settings(history_dtype=dtype, offload=True))
    assert torch.equal(dense(here, plan(here, 1)), dense(there, plan(there, 1)))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.004), ("int8", 0.015)])
def test_what_storage_adds_to_the_error_of_a_forecast(dtype, bound):
    path = momentum_path(30, size=2000)
    exact, _ = follow(path, settings(lags=2))
    narrow, _ = follow(path, settings(lags=2, history_dtype=dtype))
    assert plan(exact, 1).coefficients == plan(narrow, 1).coefficients, "inner products are of fp32 displacements"
    added = (dense(exact, plan(exact, 1)) - dense(narrow, plan(narrow, 1))).norm()
    assert added < bound * (path[30] - path[29]).norm()
