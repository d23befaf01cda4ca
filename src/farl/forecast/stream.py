"""Weights out of a state, leaf by leaf: forecasts, past weights, and the forecast that a hold kept back.

One pass: read `theta` and the displacements with a coefficient, write the result; summed in fp32, cast last. No
temporary is larger than a chunk. N entries of a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farl.errors import StateError
from farl.forecast.history import pieces
from farl.forecast.moments import Moments, last_displacement
from farl.forecast.passes import combine, run_ahead
from farl.forecast.plan import ForecastPlan
from farl.forecast.state import ForecastState, own_lrs

Leaves = Mapping[str, Tensor]


@torch.no_grad()
def stream(
    state: ForecastState,
    forecast: ForecastPlan,
    leaves: Iterable[tuple[str, Tensor]] = (),
    *,
    moments: Mapping[str, Moments] | None = None,
    dtype: torch.dtype | None = None,
    into: Leaves | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the forecast weights leaf by leaf, summed in fp32 and cast last.

    Reads `theta[t]` and the displacements with a coefficient, writes the result: `(2 + K) N` words. The rule `moments`
    reads the weights and both moments instead.

    Args:
        state: at the plan's base version.
        forecast: a plan made at that version.
        leaves: the weights at that version; needed where the state keeps no copy (`source="optimizer"`, `moments`).
        moments: optimizer state at that version, for the rule `moments`.
        dtype: of the leaves yielded; None keeps fp32.
        into: flat tensors [N] to write leaves to, by name, each of whatever dtype; others get a new one of `dtype`.

    Yields:
        Name and flat tensor of each tracked leaf, in the order of `init`.

    Raises:
        StateError: if the state was consumed, the plan belongs to another version, leaves are needed and not given, or
            a tensor to write to has another shape or device.
    """
    state.require_current()
    if forecast.base_version != state.version:
        raise StateError(
            f"base_version={forecast.base_version}: the state is at version {state.version}; make a new plan"
        )
    bases = _bases(state, leaves)
    outputs = _Outputs(dtype or torch.float32, into or {})
    if forecast.coming_lrs:
        yield from _run_ahead(state, forecast, bases, moments or {}, outputs)
        return
    newest = state.version
    rows = {
        group: [(newest - k, a) for k, a in enumerate(coefficients)] for group, coefficients in forecast.terms.items()
    }
    yield from _combine(state, bases, rows, outputs)


@torch.no_grad()
def rewind(
    state: ForecastState,
    num_updates: int,
    leaves: Iterable[tuple[str, Tensor]] = (),
    *,
    moments: Mapping[str, Moments] | None = None,
    then: ForecastPlan | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Rebuilds the weights of `num_updates` updates ago from the displacements held, for the stale probe.

        theta[t-n] = theta[t] - sum_{i<n} D[t-i]

    Args:
        state: the state.
        num_updates: n.
        leaves: the weights at the state's version; needed where it keeps no copy.
        moments: optimizer state, from which the rule `moments` reads the one displacement it can go back.
        then: a plan held at that version: adds its shadow, the forecast that was not sent, as far as the displacements
            it is made of are still held.
        dtype: of the leaves yielded; None keeps fp32.

    Raises:
        StateError: if the state was consumed or fewer displacements are held.
    """
    state.require_current()
    if not 0 <= num_updates <= state.num_rewindable:
        raise StateError(
            f"num_updates={num_updates}: {state.num_rewindable} displacements are held; raise max_horizon or lags, "
            "or take a rule with history"
        )
    outputs = _Outputs(dtype or torch.float32, {})
    if state.config.rule == "moments":
        yield from _undo(state, num_updates, _bases(state, leaves), moments or {}, outputs)
        return
    back = [(state.version - i, -1.0) for i in range(num_updates)]
    base, oldest = state.version - num_updates, state.version - state.num_held + 1
    shadow = then.shadow if then is not None else {}
    rows = {
        group: back + [(base - k, a) for k, a in enumerate(shadow.get(group, ())) if base - k >= oldest]
        for group in state.groups.values()
    }
    yield from _combine(state, _bases(state, leaves), rows, outputs)


@dataclass(frozen=True)
class _Outputs:
    """Where leaves are written: the tensors given, else new ones."""

    dtype: torch.dtype
    given: Leaves

    def of(self, name: str, base_N: Tensor) -> Tensor:
        given_N = self.given.get(name)
        if given_N is None:
            return torch.empty_like(base_N, dtype=self.dtype)
        if given_N.shape != base_N.shape or given_N.device != base_N.device:
            raise StateError(
                f"into[{name!r}]: {tuple(given_N.shape)} on {given_N.device}, the leaf is {tuple(base_N.shape)} on "
                f"{base_N.device}; give a tensor like the leaf"
            )
        return given_N


def _bases(state: ForecastState, leaves: Iterable[tuple[str, Tensor]]) -> Leaves:
    """The fp32 weights to start from: the state's own copy, or the leaves given."""
    if state.previous:
        return state.previous
    given = {name: leaf.detach().reshape(-1) for name, leaf in leaves}
    missing = state.sizes.keys() - given.keys()
    if missing:
        raise StateError(
            f"leaves: {sorted(missing)[0]!r} is needed, since this state keeps no copy of the weights; pass the leaves"
        )
    return given


def _combine(
    state: ForecastState, bases: Leaves, rows: Mapping[str, Sequence[tuple[int, float]]], outputs: _Outputs
) -> Iterator[tuple[str, Tensor]]:
    """`base + sum_i factor_i D[version_i]` of each leaf, rows by group."""
    for name in state.sizes:
        state.require_current()  # an iterator left standing over an observe() would mix versions
        ring, base_N = state.rings[name], bases[name]
        wanted = rows.get(state.groups[name], ())
        out_N = outputs.of(name, base_N)
        combine(ring, base_N, out_N, [(v % ring.capacity, a) for v, a in wanted if a != 0.0], state.config.kernels)
        yield name, out_N


def _undo(
    state: ForecastState, num_updates: int, bases: Leaves, moments: Mapping[str, Moments], outputs: _Outputs
) -> Iterator[tuple[str, Tensor]]:
    """The weights before the last step, or as they are for 0 updates."""
    for name in state.sizes:
        base_N = bases[name]
        out_N = outputs.of(name, base_N)
        for part in pieces(base_N):
            here_n = base_N[part].float()
            known = num_updates and name in moments
            out_N[part] = here_n - last_displacement(moments[name], here_n, part) if known else here_n
        yield name, out_N


def _run_ahead(
    state: ForecastState, forecast: ForecastPlan, bases: Leaves, moments: Mapping[str, Moments], outputs: _Outputs
) -> Iterator[tuple[str, Tensor]]:
    """The weights after the coming updates by the optimizer's own recursion, damped; without state as they are."""
    for name in state.sizes:
        base_N = bases[name]
        out_N = outputs.of(name, base_N)
        if name in moments:
            run_ahead(
                moments[name],
                base_N,
                out_N,
                shares=forecast.shares,
                assumed=state.config.assumed_gradient,
                lrs=own_lrs(state, forecast, moments[name]),
                damping=forecast.damping,
                kernels=state.config.kernels,
            )
        else:
            out_N.copy_(base_N)
        yield name, out_N
