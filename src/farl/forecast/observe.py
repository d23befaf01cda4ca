"""Taking in one more update: displacement, inner products and scores, in one pass over the weights.

C displacements held, N entries of a leaf, S sampled entries, R displacements held for them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farl.errors import ShapeError, StateError
from farl.forecast.auto import Memo
from farl.forecast.config import ForecastConfig
from farl.forecast.gram import GramBand
from farl.forecast.moments import Moments
from farl.forecast.passes import absorb, tell
from farl.forecast.plan import ALL, ForecastPlan, ScoredForecast, Terms
from farl.forecast.sample import Reduce, metric_weight, products
from farl.forecast.state import EUCLIDEAN, ForecastState, empty_grams, unsharded

_GRADIENT_DECAY = 0.95
_SETTLED = 1e-9
"""What may be left of Adam's bias before it is not corrected any more."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one call of `observe` learnt.

    Attributes:
        version: the version observed.
        displacement: `||D[t]||`, over all entries; over the sample for the rule `moments`, which reads no others.
        finite: False when the displacement held a NaN or infinity and the history was cleared.
        scored: forecasts whose target was completed by this version.
    """

    version: int
    displacement: float
    finite: bool
    scored: tuple[ScoredForecast, ...]


@torch.no_grad()
def observe(
    state: ForecastState,
    leaves: Iterable[tuple[str, Tensor]],
    *,
    version: int | None = None,
    moments: Mapping[str, Moments] | None = None,
    idle: Container[str] = (),
    gradients: Mapping[str, Tensor] | None = None,
    lr: float = 1.0,
    reduce: Reduce = unsharded,
) -> tuple[ForecastState, Observation]:
    """Takes in the weights after one more update, in one pass over weights and previous weights.

    Reads `theta[t]` and `theta[t-1]`, writes both the copy of `theta[t]` and the displacement: `3 N` words and one
    stored displacement, whatever K is, since inner products come from the sample. With `source="optimizer"` it reads
    the two moments and writes the displacement; the rule `moments` reads the sample alone.

    Args:
        state: at version t - 1; consumed.
        leaves: the tracked leaves, by the names and shapes of `init`, in any order.
        version: t, to be checked; None takes the next.
        moments: optimizer state of the leaves after the step, where it is understood.
        idle: leaves that the optimizer passed over in this update, where displacements are read off its state.
        gradients: of the leaves, to estimate the curvature from; None where the optimizer keeps a second moment.
        lr: learning rate of this update; only ratios between updates matter.
        reduce: adds a float64 tensor over all ranks, the same as at `init`.

    Returns:
        The state at version t, and what was learnt. A displacement that is not finite clears the history,
        so that the following plans hold.

    Raises:
        StateError: if the state was consumed before, the version is not the next, or the optimizer does not tell its
            displacement.
        ShapeError: if leaves are missing, unknown, repeated or of another size.
    """
    state.require_current()
    if version is not None and version != state.version + 1:
        raise StateError(
            f"version={version}: observe() needs every version in order, the next is {state.version + 1}; "
            "after a gap start again with init()"
        )
    named = _match(state, leaves)
    moments = moments or {}
    now = state.version + 1
    _require_source(state, moments)
    energy = _absorb(state, named, {n: m for n, m in moments.items() if n not in idle}, now)
    state.lease[0] = now
    here_S = state.sample.gather(named)
    moved_S = here_S - state.sample_previous_S
    state.sample_previous_S.copy_(here_S)
    state = replace(state, curvature_S=_curvature(state, moments, gradients))
    rows = _gram_rows(state, moved_S, reduce)
    whole = reduce(torch.cat([energy, *rows.values()]))
    known = min(state.version - state.first, len(state.sample_rows_RS))
    state.sample_rows_RS[now % len(state.sample_rows_RS)] = moved_S
    settled = _with_optimizer_facts(state, moments)
    if not bool(torch.isfinite(whole).all()):
        return _forget(settled, now), Observation(version=now, displacement=math.nan, finite=False, scored=())
    displacement = float(whole[0]) if state.config.rule != "moments" else float(whole[len(rows[EUCLIDEAN])])
    grams = _push(state, dict(zip(rows, whole[1:].view(len(rows), -1), strict=True)), known)
    max_rows = _max_rows(state.config)
    after = replace(
        settled,
        version=now,
        grams=grams,
        lrs={v: x for v, x in state.lrs.items() if v > now - max_rows} | {now: lr},
    )
    after.memo.drop_before(now - 2 * state.config.window)
    scored, after = _score_due(after, reduce)
    return after, Observation(version=now, displacement=math.sqrt(displacement), finite=True, scored=scored)


def require_unmoved(state: ForecastState, leaves: Iterable[tuple[str, Tensor]], *, reduce: Reduce = unsharded) -> None:
    """Raises `StateError` if the weights are not those of the state's version, as far as the sample tells."""
    here_S = state.sample.gather(_match(state, leaves))
    moved = torch.tensor([float(not torch.equal(here_S, state.sample_previous_S))], dtype=torch.float64)
    if float(reduce(moved)) > 0:
        raise StateError(
            "observe(): the weights changed, but the optimizer that is followed has not stepped; after replacing the "
            "optimizer, or writing to the weights, make a new Forecaster"
        )


def _max_rows(config: ForecastConfig) -> int:
    return 2 * config.window + config.capacity + config.max_horizon


def _match(state: ForecastState, leaves: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, leaf in leaves:
        if name not in state.sizes:
            raise ShapeError(f"leaf {name!r}: not among the {len(state.sizes)} leaves of init(); make a new state")
        if name in named:
            raise ShapeError(f"leaf {name!r}: given twice; tied weights move once, pass them once")
        if leaf.numel() != state.sizes[name]:
            raise ShapeError(f"leaf {name!r}: {leaf.numel()} entries, {state.sizes[name]} at init(); make a new state")
        named[name] = leaf.detach().reshape(-1)
    if len(named) != len(state.sizes):
        missing = sorted(state.sizes.keys() - named.keys())
        raise ShapeError(f"leaves: {len(missing)} missing, first {missing[0]!r}; pass every leaf of init()")
    return named


def _require_source(state: ForecastState, moments: Mapping[str, Moments]) -> None:
    if state.config.source == "weights" or state.config.rule == "moments":
        return
    for name in state.sizes:
        if name in moments and not moments[name].tells_displacement:
            raise StateError(
                f"leaf {name!r}: source='optimizer', and this optimizer's state does not tell its last step; use "
                "source='weights'"
            )


def _absorb(state: ForecastState, named: Mapping[str, Tensor], moments: Mapping[str, Moments], now: int) -> Tensor:
    """Stores the displacement of every leaf; returns `||D||^2` over this rank's share, float64 [1]."""
    if state.config.rule == "moments":
        return torch.zeros(1, dtype=torch.float64)
    energies: list[Tensor | float] = []
    for name, leaf_N in named.items():
        ring = state.rings[name]
        slot = now % ring.capacity
        own: Tensor | float
        if state.previous:
            own = absorb(ring, slot, leaf_N, state.previous[name], state.config.kernels)
        else:
            own = tell(ring, slot, leaf_N, moments.get(name), state.config.kernels)
        energies.append(own * state.sample.share(name))
    total = sum(float(e) for e in energies)  # read at the end: a device may lag behind
    return torch.tensor([total], dtype=torch.float64)


def _curvature(
    state: ForecastState, moments: Mapping[str, Moments], gradients: Mapping[str, Tensor] | None
) -> Tensor | None:
    """Second moment of the gradient on the sample: a running mean of squared gradients, or Adam's own."""
    if gradients is None:
        second = {name: m.second_N.reshape(-1) for name, m in moments.items() if m.second_N is not None}
        if not second:
            return state.curvature_S
        curvature_S = state.sample.gather(second)
        for name in second:
            m = moments[name]
            if m.step and m.beta2**m.step > _SETTLED:
                curvature_S[state.sample.spans[name]] /= 1 - m.beta2**m.step
        return curvature_S
    squared_S = state.sample.gather({n: g.detach().reshape(-1) for n, g in gradients.items()}).square_()
    if state.curvature_S is None:
        return squared_S
    return state.curvature_S.lerp(squared_S, 1 - _GRADIENT_DECAY)


def _gram_rows(state: ForecastState, moved_S: Tensor, reduce: Reduce) -> dict[str, Tensor]:
    """Inner products of the newest displacement with the R rows of the sample and with itself, by Gram band."""
    config, sample = state.config, state.sample
    weight_S = metric_weight(
        config.metric, state.curvature_S, sample.density_S, sharp_fraction=config.sharp_fraction, reduce=reduce
    )
    rows = {EUCLIDEAN: products(state.sample_rows_RS, moved_S, sample.density_S).cpu()}
    if config.grouping == "all":
        return rows | {ALL: products(state.sample_rows_RS, moved_S, weight_S).cpu()}
    for name, group in state.groups.items():
        span = sample.spans[name]
        part = products(state.sample_rows_RS[:, span], moved_S[span], weight_S[span]).cpu()
        rows[group] = rows[group] + part if group in rows else part
    return rows


def _push(state: ForecastState, rows: Mapping[str, Tensor], known: int) -> dict[str, GramBand]:
    """The Gram bands with the new rows; `known` of the sample's rows hold displacements."""
    capacity, now = len(state.sample_rows_RS), state.version + 1
    order = [(now - s) % capacity for s in range(1, min(known, capacity - 1) + 1)]
    return {
        key: state.grams[key].push([float(row[-1]), *(float(row[r]) for r in order)], max_rows=_max_rows(state.config))
        for key, row in rows.items()
    }


def _with_optimizer_facts(state: ForecastState, moments: Mapping[str, Moments]) -> ForecastState:
    """The state with the momentum and the step count that the optimizer tells, counted on where it does not."""
    if not moments:
        return replace(state, num_steps=state.num_steps + 1)
    some = max(moments.values(), key=lambda m: m.step)
    steps = some.step if some.kind == "adam" else state.num_steps + 1
    tells = all(name in moments and moments[name].tells_displacement for name in state.sizes)
    return replace(state, momentum=some.beta1, num_steps=steps, tells_displacement=tells)


def _forget(state: ForecastState, version: int) -> ForecastState:
    """The state without history, after a displacement that was not finite."""
    for ring in state.rings.values():
        ring.zero()
    state.sample_rows_RS.zero_()
    return replace(
        state,
        version=version,
        first=version,
        grams=empty_grams(state.groups, version),
        pending=(),
        promised={},
        curvature_S=None,
        memo=Memo(),
        num_nonfinite=state.num_nonfinite + 1,
    )


def _score_due(state: ForecastState, reduce: Reduce) -> tuple[tuple[ScoredForecast, ...], ForecastState]:
    """Scores the forecasts whose target is complete, on the sample."""
    due = [p for p in state.pending if p.due_version == state.version]
    if not due:
        return (), state
    realised, would_be, scored = dict(state.realised), dict(state.would_be), []
    for plan in due:
        residual, stale, undamped = (float(x) for x in reduce(_residuals(state, plan)))
        if math.isnan(residual):
            continue
        scored.append(ScoredForecast(plan=plan, residual=math.sqrt(residual), displacement=math.sqrt(stale)))
        _discount(realised, plan.key, residual, stale, state.config)
        if undamped >= 0:
            _discount(would_be, plan.key, undamped, stale, state.config)
    gone = {(p.base_version, p.horizon) for p in due}
    return tuple(scored), replace(
        state,
        pending=tuple(p for p in state.pending if p.due_version > state.version),
        promised={k: v for k, v in state.promised.items() if k not in gone},
        realised=realised,
        would_be=would_be,
    )


def _discount(
    table: dict[float, tuple[float, float]], horizon: float, squared: float, stale: float, config: ForecastConfig
) -> None:
    before = table.get(horizon, (0.0, 0.0))
    table[horizon] = (config.forgetting * before[0] + squared, config.forgetting * before[1] + stale)


def _residuals(state: ForecastState, plan: ForecastPlan) -> Tensor:
    """`||T - forecast||^2`, `||T||^2`, and the first again for the undamped forecast, shipped or held; float64 [3].

    Over this rank's sample; NaN where rows are gone, and the last one -1 where nothing was planned.
    """
    longest = max((len(a) for a in (*plan.terms.values(), *plan.shadow.values())), default=0)
    if plan.base_version - longest < max(state.first, state.version - len(state.sample_rows_RS)):
        return torch.full((3,), math.nan, dtype=torch.float64)
    target_S = torch.zeros_like(state.sample_previous_S)
    for i, share in enumerate(plan.shares, start=1):
        target_S.add_(_row(state, plan.base_version + i), alpha=share)
    if plan.coming_lrs:
        undamped_S = state.promised.get((plan.base_version, plan.horizon), torch.zeros_like(target_S))
        sent_S = undamped_S * plan.damping
    else:
        sent_S = _sampled(state, plan.base_version, plan.terms)
        undamped_S = sent_S / plan.damping if plan.moves else _sampled(state, plan.base_version, plan.shadow)
    density_S = state.sample.density_S
    squares = [torch.dot(x_S * density_S, x_S) for x_S in (target_S - sent_S, target_S, target_S - undamped_S)]
    if not (plan.terms or plan.shadow or plan.coming_lrs):
        squares[2] = torch.full_like(squares[2], -1.0)
    return torch.stack(squares).double().cpu()


def _row(state: ForecastState, version: int) -> Tensor:
    return state.sample_rows_RS[version % len(state.sample_rows_RS)]


def _sampled(state: ForecastState, base: int, terms: Terms) -> Tensor:
    """What coefficients over the displacements up to `base` move the sampled entries by, float32 [S]."""
    moved_S = torch.zeros_like(state.sample_previous_S)
    for name, group in state.groups.items():
        span = state.sample.spans[name]
        for k, a in enumerate(terms.get(group, ())):
            moved_S[span].add_(_row(state, base - k)[span], alpha=a)
    return moved_S
