"""The forecaster's state: what a forecast depends on, how it starts, and what is noted in it.

Taking in an update is `observe`, planning over a state `planning`, streaming weights from it `stream`. The state owns a
ring of displacements for each tracked leaf and, unless they are read off the optimizer, an fp32 copy of the last
weights. `observe` reuses those buffers: the state passed in is consumed, as a donated argument is in JAX, and using it
again raises. K lags, C = K + h - 1 displacements held, N entries of a leaf, S sampled entries, R = K + h held for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from farl.errors import ConfigError, StateError, unknown_name
from farl.forecast.auto import Memo
from farl.forecast.config import ForecastConfig
from farl.forecast.gate import PolicyEvidence
from farl.forecast.gram import GramBand
from farl.forecast.groups import group_of
from farl.forecast.history import Ring
from farl.forecast.moments import Moments, run_ahead
from farl.forecast.plan import ForecastPlan
from farl.forecast.rules import FORECASTERS
from farl.forecast.sample import Reduce, Sample, choose_sample

EUCLIDEAN = "euclidean"
"""Key of the Gram band in which realised errors are measured; those that fits read are keyed by group."""


def unsharded(tensor: Tensor) -> Tensor:
    """`Reduce` of weights that one process holds whole."""
    return tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ForecastState:
    """Everything a forecast depends on.

    Attributes:
        config: the settings.
        version: t, the learner version last observed.
        first: version the history begins at: displacement `first + 1` is the oldest that was ever held.
        previous: fp32 `theta[t]` of each tracked leaf, flat [N]; empty where displacements come from the optimizer.
        rings: displacements of each tracked leaf; `D[j]` is in row `j % C`.
        sizes: entries of each tracked leaf, in the order in which leaves are streamed.
        groups: group of leaves that each leaf shares its coefficients with.
        sample: entries on which inner products are formed.
        sample_previous_S: their `theta[t]`.
        sample_rows_RS: their displacements; `D[j]` is in row `j % R`.
        curvature_S: their second moment of the gradient; None while unknown.
        grams: inner products of displacements: `EUCLIDEAN`, and one for each group in the metric of the fits.
        lrs: learning rate of recent updates, by the version they made.
        momentum: beta1 of the optimizer; None if unknown.
        num_steps: steps the optimizer had made at version t.
        tells_displacement: whether the optimizer's state tells the last step of every leaf.
        pending: forecasts shipped whose target has not come yet.
        promised: what the rule `moments` would have moved the sampled entries by undamped, by base version and horizon.
        incumbents: rule shipped last, by horizon (for hysteresis); "stale" where it was held.
        realised: discounted squared error and squared displacement of what was shipped, by horizon.
        would_be: the same for what was planned undamped, shipped or held.
        evidence: policy-space evidence, by horizon.
        num_nonfinite: updates whose displacement was not finite; each cleared the history.
        memo: cache of coefficients; derived, never saved.
        lease: version at which the buffers are valid, shared by all states over them.
    """

    config: ForecastConfig
    version: int
    first: int
    previous: Mapping[str, Tensor]
    rings: Mapping[str, Ring]
    sizes: Mapping[str, int]
    groups: Mapping[str, str]
    sample: Sample
    sample_previous_S: Tensor
    sample_rows_RS: Tensor
    curvature_S: Tensor | None = None
    grams: Mapping[str, GramBand] = field(default_factory=dict)
    lrs: Mapping[int, float] = field(default_factory=dict)
    momentum: float | None = None
    num_steps: int = 0
    tells_displacement: bool = False
    pending: tuple[ForecastPlan, ...] = ()
    promised: Mapping[tuple[int, float], Tensor] = field(default_factory=dict)
    incumbents: Mapping[float, str] = field(default_factory=dict)
    realised: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    would_be: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    evidence: Mapping[float, PolicyEvidence] = field(default_factory=dict)
    num_nonfinite: int = 0
    memo: Memo = field(default_factory=Memo, repr=False)
    lease: list[int] = field(default_factory=lambda: [0], repr=False)

    @property
    def gram(self) -> GramBand:
        """Euclidean inner products over all leaves, scaled from the sample."""
        return self.grams[EUCLIDEAN]

    def unit_gram(self, group: str) -> GramBand:
        """Inner products of a group's displacements, each divided by its learning rate."""
        scaled = self.memo.unit_grams.get(group)
        if scaled is None or scaled.newest != self.version:
            scaled = self.grams[group].scaled(lambda v: 1 / self.lrs[v] if self.lrs.get(v, 0.0) > 0 else 0.0)
            self.memo.unit_grams[group] = scaled
        return scaled

    @property
    def num_held(self) -> int:
        """Displacement tensors held."""
        capacity = next(iter(self.rings.values())).capacity
        return min(self.version - self.first, capacity)

    @property
    def num_rewindable(self) -> int:
        """Updates that `rewind` can go back; the rule `moments` reads the last one off the optimizer, if that tells."""
        if self.config.rule == "moments":
            return min(self.version - self.first, 1) if self.tells_displacement else 0
        return self.num_held

    def require_current(self) -> None:
        """Raises `StateError` if `observe` has consumed this state."""
        if self.lease[0] != self.version:
            raise StateError(
                f"version={self.version}: this state was consumed by observe(), its buffers now hold version "
                f"{self.lease[0]}; use the state that observe() returned"
            )


def init(
    leaves: Iterable[tuple[str, Tensor]],
    config: ForecastConfig,
    *,
    version: int = 0,
    replicas: Mapping[str, int] | None = None,
    reduce: Reduce = unsharded,
) -> ForecastState:
    """Starts a state at the learner's present weights.

    Args:
        leaves: named trained weights, or this rank's shards, any float dtype (fp32 masters; trap 1 of the method).
        config: the settings; `bank` and `rule` are looked up here.
        version: learner version of these weights.
        replicas: ranks that hold the same copy of a leaf, where it is not 1; their sums must not count twice.
        reduce: adds a float64 tensor over all ranks.

    Raises:
        ConfigError: for an unknown rule, a leaf that is not floating point, or no leaf at all.
    """
    check_rules(config)
    flat: dict[str, Tensor] = {}
    for name, leaf in leaves:
        if not leaf.is_floating_point():
            raise ConfigError(f"leaf {name!r} has dtype {leaf.dtype}: only floating-point weights can be forecast")
        flat[name] = leaf.detach().reshape(-1)
    if not flat:
        raise ConfigError("leaves: no trained weight to forecast; pass the parameters that the optimizer updates")
    counts = replicas or {}
    total = sum(leaf.numel() / counts.get(name, 1) for name, leaf in flat.items())
    total = float(reduce(torch.tensor([total], dtype=torch.float64)))
    sample = choose_sample(flat, max_entries=config.sample_entries, total=total, replicas=counts)
    needs_history = config.rule != "moments"
    capacity = config.capacity if needs_history else 0
    previous = {}
    if needs_history and config.source == "weights":
        previous = {name: leaf.to(torch.float32, copy=True) for name, leaf in flat.items()}
    groups = {name: group_of(name, config.grouping) for name in flat}
    return ForecastState(
        config=config,
        version=version,
        first=version,
        previous=previous,
        rings={
            name: Ring.empty(
                capacity, leaf.numel(), dtype=config.history_dtype, device=leaf.device, offload=config.offload
            )
            for name, leaf in flat.items()
        },
        sizes={name: leaf.numel() for name, leaf in flat.items()},
        groups=groups,
        sample=sample,
        sample_previous_S=sample.gather(flat),
        sample_rows_RS=torch.zeros(
            config.lags + config.max_horizon, sample.num_entries, device=sample.density_S.device
        ),
        grams=empty_grams(groups, version),
        lease=[version],
    )


def check_rules(config: ForecastConfig) -> None:
    """Raises `ConfigError` for rules that do not exist or cannot be in a bank."""
    for name in (config.rule, *config.bank):
        if name not in FORECASTERS:
            raise unknown_name("rule", name, FORECASTERS)
    for name in config.bank:
        if FORECASTERS[name].coefficients is None:
            raise ConfigError(f"bank: {name} has no coefficients to be scored by; name others, for example ('copy',)")


def empty_grams(groups: Mapping[str, str], version: int) -> dict[str, GramBand]:
    """A Gram band without rows for errors, and one for each group."""
    return {key: GramBand(newest=version) for key in (EUCLIDEAN, *dict.fromkeys(groups.values()))}


def record(
    state: ForecastState,
    shipped: ForecastPlan,
    leaves: Iterable[tuple[str, Tensor]] = (),
    *,
    moments: Mapping[str, Moments] | None = None,
) -> ForecastState:
    """Notes that a plan was really shipped, so that `observe` scores it when its target arrives.

    Args:
        state: at the plan's base version.
        shipped: the plan.
        leaves: the weights, for the rule `moments`, whose forecast is noted on the sample.
        moments: optimizer state, for the same.

    Raises:
        StateError: if the plan was not made at the state's version.
    """
    if shipped.base_version != state.version:
        raise StateError(
            f"base_version={shipped.base_version}: the state is at version {state.version}; "
            "ship a plan before the next observe()"
        )
    if shipped.horizon == 0 or shipped in state.pending:
        return state
    incumbents, promised = dict(state.incumbents), dict(state.promised)
    if not shipped.held or shipped.scores or shipped.predicted_error is not None:
        incumbents[shipped.key] = shipped.rule  # "stale" where it was held for what it would have cost
    if shipped.coming_lrs:
        key = (shipped.base_version, shipped.horizon)
        promised[key] = _run_sample_ahead(state, shipped, dict(leaves), moments or {})
    return replace(state, pending=(*state.pending, shipped), incumbents=incumbents, promised=promised)


def _run_sample_ahead(
    state: ForecastState, shipped: ForecastPlan, leaves: Mapping[str, Tensor], moments: Mapping[str, Moments]
) -> Tensor:
    """What the rule `moments` moves the sampled entries by, undamped, float32 [S]."""
    moved_S = torch.zeros_like(state.sample_previous_S)
    for name, span in state.sample.spans.items():
        if name not in moments or name not in leaves:
            continue
        part = state.sample.part(name)
        moved_S[span] = run_ahead(
            moments[name],
            leaves[name].detach().reshape(-1)[part],
            part,
            shares=shipped.shares,
            assumed=state.config.assumed_gradient,
            lrs=own_lrs(state, shipped, moments[name]),
        ).to(moved_S.device)
    return moved_S


def own_lrs(state: ForecastState, forecast: ForecastPlan, moments: Moments) -> tuple[float, ...]:
    """Coming learning rates of one leaf: its own last one, changing as the common one does."""
    last = state.lrs.get(forecast.base_version, 0.0)
    return tuple(moments.lr * lr / last if last > 0 else lr for lr in forecast.coming_lrs)
