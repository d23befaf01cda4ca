"""The forecaster as pure functions of an explicit state: init, observe, plan, record, stream, rewind.

The state owns an fp32 copy of the learner's last weights and a ring of displacements for each tracked
leaf. `observe` reuses those buffers: the state passed in is consumed, as a donated argument is in JAX, and
using it again raises. K lags, C = K + h - 1 displacements held, N entries of a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from farl.core.types import DTYPES
from farl.errors import ConfigError, ShapeError, StateError, unknown_name
from farl.forecast.auto import Memo, choose, rule_coefficients
from farl.forecast.config import ForecastConfig
from farl.forecast.gate import PolicyEvidence
from farl.forecast.gram import GramBand
from farl.forecast.plan import ForecastPlan, ScoredForecast
from farl.forecast.rules import FORECASTERS

CHUNK = 1 << 16
"""Entries worked on at once: weights, previous weights and C displacements of a chunk stay in L2."""
_WARM_TARGETS = 3
"""Scored targets after which `auto` stops damping where no probe ever reports."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ForecastState:
    """Everything a forecast depends on.

    Attributes:
        config: the settings.
        version: t, the learner version last observed.
        previous: fp32 `theta[t]` of each tracked leaf, flat [N].
        history: displacements of each tracked leaf, [C, N], in ring order.
        slots: ring rows in use, newest displacement first.
        gram: inner products of displacements.
        pending: forecasts shipped whose target has not come yet.
        incumbents: rule shipped last, by horizon (for hysteresis).
        evidence: policy-space evidence.
        num_nonfinite: updates whose displacement was not finite; each cleared the history.
        memo: cache of coefficients; derived, never saved.
        lease: version at which the buffers are valid, shared by all states over them.
    """

    config: ForecastConfig
    version: int
    previous: Mapping[str, Tensor]
    history: Mapping[str, Tensor]
    slots: tuple[int, ...] = ()
    gram: GramBand = field(default_factory=GramBand)
    pending: tuple[ForecastPlan, ...] = ()
    incumbents: Mapping[int, str] = field(default_factory=dict)
    evidence: PolicyEvidence = field(default_factory=PolicyEvidence)
    num_nonfinite: int = 0
    memo: Memo = field(default_factory=Memo, repr=False)
    lease: list[int] = field(default_factory=lambda: [0], repr=False)

    def require_current(self) -> None:
        """Raises `StateError` if `observe` has consumed this state."""
        if self.lease[0] != self.version:
            raise StateError(
                f"version={self.version}: this state was consumed by observe(), its buffers now hold version "
                f"{self.lease[0]}; use the state that observe() returned"
            )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one call of `observe` learnt.

    Attributes:
        version: the version observed.
        displacement: `||D[t]||`.
        finite: False when the displacement held a NaN or infinity and the history was cleared.
        scored: forecasts whose target was this version.
    """

    version: int
    displacement: float
    finite: bool
    scored: tuple[ScoredForecast, ...]


def init(leaves: Iterable[tuple[str, Tensor]], config: ForecastConfig, *, version: int = 0) -> ForecastState:
    """Starts a state at the learner's present weights.

    Args:
        leaves: named trained weights, any float dtype (fp32 masters; see trap 1 of the method).
        config: the settings; `bank` and `rule` are looked up here.
        version: learner version of these weights.

    Raises:
        ConfigError: for an unknown rule, a leaf that is not floating point, or no leaf at all.
    """
    for name in (config.rule, *config.bank):
        if name not in FORECASTERS:
            raise unknown_name("rule", name, FORECASTERS)
    if "auto" in config.bank:
        raise ConfigError("bank: auto cannot choose itself; name fixed rules, for example ('copy',)")
    previous: dict[str, Tensor] = {}
    history: dict[str, Tensor] = {}
    for name, leaf in leaves:
        if not leaf.is_floating_point():
            raise ConfigError(f"leaf {name!r} has dtype {leaf.dtype}: only floating-point weights can be forecast")
        flat_N = leaf.detach().reshape(-1)
        previous[name] = flat_N.to(torch.float32, copy=True)
        history[name] = torch.zeros(
            config.capacity, flat_N.numel(), dtype=DTYPES[config.history_dtype], device=leaf.device
        )
    if not previous:
        raise ConfigError("leaves: no trained weight to forecast; pass the parameters that the optimizer updates")
    evidence = PolicyEvidence(prior_factor=config.cold_damping)
    gram = GramBand(newest=version)
    return ForecastState(
        config=config,
        version=version,
        previous=previous,
        history=history,
        gram=gram,
        evidence=evidence,
        lease=[version],
    )


@torch.no_grad()
def observe(
    state: ForecastState, leaves: Iterable[tuple[str, Tensor]], *, version: int | None = None
) -> tuple[ForecastState, Observation]:
    """Takes in the weights after one more update; one pass over weights, previous weights and history.

    Reads `theta[t]`, `theta[t-1]` and C displacements, writes `theta[t]` and one displacement: about
    `(C + 4) N` words of memory traffic.

    Args:
        state: at version t - 1; consumed.
        leaves: the tracked leaves, by the names and shapes of `init`, in any order.
        version: t, to be checked; None takes the next.

    Returns:
        The state at version t, and what was learnt. A displacement that is not finite clears the history,
        so that the following plans hold.

    Raises:
        StateError: if the state was consumed before or the version is not the next.
        ShapeError: if leaves are missing, unknown, repeated or of another size.
    """
    state.require_current()
    if version is not None and version != state.version + 1:
        raise StateError(
            f"version={version}: observe() needs every version in order, the next is {state.version + 1}; "
            "after a gap start again with init()"
        )
    named = _match(state, leaves)
    config, capacity = state.config, state.config.capacity
    slot = state.slots[-1] if len(state.slots) == capacity else len(state.slots)
    products = torch.zeros(capacity + 1, dtype=torch.float64)
    for name, leaf in named.items():
        products += _absorb(leaf, state.previous[name], state.history[name], slot)
    row = [float(products[-1]), *(float(products[s]) for s in state.slots)]
    now = state.version + 1
    state.lease[0] = now
    if not all(math.isfinite(x) for x in row):
        return _forget(state, now), Observation(version=now, displacement=math.nan, finite=False, scored=())
    gram = state.gram.push(row, max_rows=2 * config.window + capacity + config.max_horizon)
    due = [p for p in state.pending if p.target_version == now]
    scored = tuple(s for p in due if (s := _score(gram, p)) is not None)
    state.memo.drop_before(now - config.window - config.max_horizon)
    after = replace(
        state,
        version=now,
        slots=(slot, *(s for s in state.slots if s != slot)),
        gram=gram,
        pending=tuple(p for p in state.pending if p.target_version > now),
    )
    return after, Observation(version=now, displacement=math.sqrt(row[0]), finite=True, scored=scored)


def _match(state: ForecastState, leaves: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, leaf in leaves:
        if name not in state.previous:
            raise ShapeError(f"leaf {name!r}: not among the {len(state.previous)} leaves of init(); make a new state")
        if name in named:
            raise ShapeError(f"leaf {name!r}: given twice; tied weights move once, pass them once")
        if leaf.numel() != state.previous[name].numel():
            raise ShapeError(
                f"leaf {name!r}: {leaf.numel()} entries, {state.previous[name].numel()} at init(); make a new state"
            )
        named[name] = leaf.detach().reshape(-1)
    if len(named) != len(state.previous):
        missing = sorted(state.previous.keys() - named.keys())
        raise ShapeError(f"leaves: {len(missing)} missing, first {missing[0]!r}; pass every leaf of init()")
    return named


def _absorb(leaf_N: Tensor, previous_N: Tensor, ring_CN: Tensor, slot: int) -> Tensor:
    """Stores a leaf's displacement in the ring.

    Returns:
        float64 [C + 1]: its inner products with what the ring held before, by slot, then with itself.
    """
    capacity = len(ring_CN)
    total = torch.zeros(capacity + 1, dtype=torch.float64, device=leaf_N.device)
    for start in range(0, leaf_N.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        now = leaf_N[part].float()
        moved = (now - previous_N[part]).to(ring_CN.dtype)
        previous_N[part] = now
        wide = moved.float()
        total[:capacity] += torch.mv(ring_CN[:, part].float(), wide)
        total[capacity] += torch.dot(wide, wide)
        ring_CN[slot, part] = moved
    return total.cpu()


def _forget(state: ForecastState, version: int) -> ForecastState:
    """The state without history, after a displacement that was not finite."""
    for ring_CN in state.history.values():
        ring_CN.zero_()
    return replace(
        state,
        version=version,
        slots=(),
        gram=GramBand(newest=version),
        pending=(),
        memo=Memo(),
        num_nonfinite=state.num_nonfinite + 1,
    )


def _score(gram: GramBand, shipped: ForecastPlan) -> ScoredForecast | None:
    oldest = shipped.base_version + 1 - len(shipped.coefficients)
    if not gram.covers(oldest, shipped.target_version):
        return None
    squared, stale = gram.squared_error(shipped.coefficients, base=shipped.base_version, horizon=shipped.horizon)
    return ScoredForecast(plan=shipped, residual=math.sqrt(squared), displacement=math.sqrt(stale))


def plan(state: ForecastState, horizon: int) -> ForecastPlan:
    """Chooses the coefficients of a forecast `horizon` updates ahead; no tensor is touched.

    Args:
        state: the state.
        horizon: h, from 0 (exact weights) to `max_horizon`.

    Returns:
        The plan; it holds (stale weights, with the reason) while there is nothing to forecast from or while
        the evidence says that forecasts do not pay.

    Raises:
        ConfigError: for a horizon that is negative, not whole or above `max_horizon`.
    """
    config = state.config
    if isinstance(horizon, bool) or not isinstance(horizon, int) or not 0 <= horizon <= config.max_horizon:
        raise ConfigError(
            f"horizon={horizon!r}: must be a whole number of updates from 0 to max_horizon={config.max_horizon}; "
            "raise max_horizon to look further"
        )
    base = state.version
    if horizon == 0:
        return ForecastPlan(base_version=base, horizon=0, rule="stale")
    if config.rule == "auto":
        return _plan_auto(state, horizon)
    chosen = rule_coefficients(config.rule, state.gram, base, horizon, config, state.memo)
    if chosen is None:
        return _hold(base, horizon, "no displacement observed yet")
    return _finish(base, horizon, config.rule, chosen, config.damping)


def _plan_auto(state: ForecastState, horizon: int) -> ForecastPlan:
    config, base, evidence = state.config, state.version, state.evidence
    if base < evidence.held_until:
        return _hold(base, horizon, f"policy-space evidence, until version {evidence.held_until}")
    name, scores = choose(state.gram, base, horizon, config, incumbent=state.incumbents.get(horizon), memo=state.memo)
    chosen = rule_coefficients(name, state.gram, base, horizon, config, state.memo)
    if chosen is None:
        return _hold(base, horizon, "no displacement observed yet")
    if name == "stale":
        return _hold(base, horizon, "no rule of the bank beat stale weights recently")
    score = scores[name]
    expected = None if math.isnan(score.squared_ratio) else math.sqrt(score.squared_ratio)
    unprobed = evidence.num_probes == 0 and evidence.failures == 0
    factor = 1.0 if unprobed and score.num_targets >= _WARM_TARGETS else evidence.factor
    return _finish(base, horizon, name, chosen, factor, expected)


def _hold(base: int, horizon: int, reason: str) -> ForecastPlan:
    return ForecastPlan(base_version=base, horizon=horizon, rule="stale", held=reason, predicted_error=1.0)


def _finish(
    base: int,
    horizon: int,
    rule: str,
    chosen: tuple[float, ...],
    damping: float,
    expected: float | None = None,
) -> ForecastPlan:
    coefficients = tuple(damping * a for a in chosen)
    if not all(math.isfinite(a) for a in coefficients):
        return _hold(base, horizon, f"rule {rule} gave a coefficient that is not finite")
    if not any(coefficients) and rule != "stale":
        return _hold(base, horizon, f"rule {rule} moves nothing yet")
    return ForecastPlan(
        base_version=base,
        horizon=horizon,
        rule=rule,
        coefficients=coefficients,
        damping=damping,
        predicted_error=expected,
    )


def record(state: ForecastState, shipped: ForecastPlan) -> ForecastState:
    """Notes that a plan was really shipped, so that `observe` scores it when its target arrives.

    Raises:
        StateError: if the plan was not made at the state's version.
    """
    if shipped.base_version != state.version:
        raise StateError(
            f"base_version={shipped.base_version}: the state is at version {state.version}; "
            "ship a plan before the next observe()"
        )
    if shipped.horizon == 0:
        return state
    incumbents = dict(state.incumbents)
    if not shipped.held:
        incumbents[shipped.horizon] = shipped.rule
    return replace(state, pending=(*state.pending, shipped), incumbents=incumbents)


@torch.no_grad()
def stream(
    state: ForecastState, forecast: ForecastPlan, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Materialises a forecast leaf by leaf, flat [N]; the sum is formed in fp32 and cast last.

    Reads `theta[t]` and the displacements with a coefficient, writes the result: `(2 + K) N` words.

    Args:
        state: at the plan's base version.
        forecast: a plan made at that version.
        dtype: of the leaves yielded; None keeps fp32.

    Yields:
        Name and new tensor of each tracked leaf, in the order of `init`.

    Raises:
        StateError: if the state was consumed, or the plan belongs to another version.
    """
    state.require_current()
    if forecast.base_version != state.version:
        raise StateError(
            f"base_version={forecast.base_version}: the state is at version {state.version}; make a new plan"
        )
    yield from _combine(state, forecast.coefficients, dtype or torch.float32)


@torch.no_grad()
def rewind(state: ForecastState, num_updates: int, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Rebuilds the weights of `num_updates` updates ago from the displacements held, for the stale probe.

        theta[t-n] = theta[t] - sum_{i<n} D[t-i]

    Raises:
        StateError: if the state was consumed or fewer displacements are held.
    """
    state.require_current()
    if not 0 <= num_updates <= len(state.slots):
        raise StateError(
            f"num_updates={num_updates}: {len(state.slots)} displacements are held; raise max_horizon or lags"
        )
    yield from _combine(state, (-1.0,) * num_updates, dtype or torch.float32)


def _combine(state: ForecastState, coefficients: tuple[float, ...], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    terms = [(state.slots[k], c) for k, c in enumerate(coefficients) if c != 0.0]
    for name, base_N in state.previous.items():
        ring_CN = state.history[name]
        out_N = torch.empty_like(base_N, dtype=dtype)
        for start in range(0, base_N.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            total = base_N[part]
            for i, (slot, c) in enumerate(terms):
                row = ring_CN[slot, part].float()
                total = total.add(row, alpha=c) if i == 0 else total.add_(row, alpha=c)
            out_N[part] = total
        yield name, out_N
