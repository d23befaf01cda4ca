"""The settings of a forecaster, checked when made.

Which rules exist is the table in `rules`; what a setting does to the coefficients is documented there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from farl.errors import ConfigError
from farl.forecast.history import STORAGE_BYTES
from farl.forecast.passes import Kernels, require_kernels

Consistency = Literal["hard", "soft", "off"]
Metric = Literal["euclidean", "adam", "sharp"]
Grouping = Literal["all", "kind", "layer"]
Source = Literal["weights", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """Settings of a forecaster.

    Attributes:
        rule: a name of `FORECASTERS`.
        lags: K, displacements a rule may combine.
        order: p, order of consistency of `polynomial` and `least_squares`; at most `lags`.
        consistency: of `least_squares`: "hard" solves under the constraints (the published method), "soft"
            pulls toward a consistent vector, "off" pulls toward zero.
        metric: inner product of fits and of the choice between rules: "euclidean", "adam" (weighted by Adam's second
            moment) or "sharp" (the entries of largest second moment alone, where the policy is most sensitive).
        sharp_fraction: share of the entries that "sharp" looks at.
        grouping: one coefficient vector for "all" weights, for each "kind" (embedding, attention, mlp, norm, other),
            or for each "layer".
        ridge: weight of the pull, relative to the mean diagonal of the normal matrix.
        forgetting: lambda in (0, 1], weight of the past per update in fits and scores.
        window: updates a fit looks back on (their scalars; their tensors are dropped after K + h - 1).
        damping: factor in [0, 1] on the coefficients of a rule other than `auto`.
        assumed_gradient: of the rule `moments`: multiple of the first moment taken as the coming gradients; 0 assumes
            none, 1 that the drift goes on.
        max_horizon: largest horizon that will be asked for, in whole updates; sizes the history.
        source: where displacements come from: "weights" keeps an fp32 copy of the last ones (4 bytes a parameter, any
            optimizer), "optimizer" reads them off the state of Adam, AdamW or SGD and keeps no copy.
        history_dtype: how displacements are stored: "float32", "bfloat16" (0.2 % error) or "int8" (block-scaled, 1 %).
        offload: keep the displacements in host memory, pinned where the weights are on a GPU.
        kernels: who passes over the weights: "native" one loop of C for weights on a CPU, compiled at first use by the
            machine's own compiler; "inductor" torch.compile, for GPUs; "torch" torch's kernels; "auto" native where
            it can, else torch.
        sample_entries: entries on which inner products are formed; models up to this size are taken whole.
        bank: rules that `auto` chooses among.
        hysteresis: relative advantage a challenger needs before `auto` changes its rule or opens again.
        cold_updates: weight of what is assumed before anything was measured, in updates.
        min_damping: policy-space factor below which `auto` holds.
        retry_updates: updates `auto` holds before it may open again; doubles on every failure in a row.
    """

    rule: str = "auto"
    lags: int = 4
    order: int = 1
    consistency: Consistency = "hard"
    metric: Metric = "sharp"
    sharp_fraction: float = 0.03
    grouping: Grouping = "all"
    ridge: float = 0.005
    forgetting: float = 0.97
    window: int = 96
    damping: float = 1.0
    assumed_gradient: float = 0.0
    max_horizon: int = 1
    source: Source = "weights"
    history_dtype: str = "bfloat16"
    offload: bool = False
    kernels: Kernels = "auto"
    sample_entries: int = 1 << 17
    bank: tuple[str, ...] = ("least_squares_prior",)
    hysteresis: float = 0.05
    cold_updates: float = 2.0
    min_damping: float = 0.1
    retry_updates: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "bank", tuple(self.bank))
        _require_integers(
            self, ("lags", "order", "max_horizon", "window", "retry_updates", "sample_entries"), minimum=1
        )
        if self.order > self.lags:
            raise ConfigError(
                f"order={self.order}: order p needs at least p lags, but lags={self.lags}; raise lags or lower order"
            )
        _require_between("forgetting", self.forgetting, 0.0, 1.0, open_low=True)
        _require_between("sharp_fraction", self.sharp_fraction, 0.0, 1.0, open_low=True)
        for name in ("damping", "min_damping", "assumed_gradient"):
            _require_between(name, getattr(self, name), 0.0, 1.0)
        for name in ("ridge", "hysteresis", "cold_updates"):
            _require_between(name, getattr(self, name), 0.0, sys.float_info.max)
        for name, kind in (
            ("consistency", Consistency),
            ("metric", Metric),
            ("grouping", Grouping),
            ("source", Source),
            ("history_dtype", Literal["float32", "bfloat16", "int8"]),
            ("kernels", Kernels),
        ):
            _require_one_of(name, getattr(self, name), get_args(kind))
        require_kernels(self.kernels)
        if not self.bank:
            raise ConfigError("bank=(): auto needs at least one rule to choose from, for example ('copy',)")

    @property
    def capacity(self) -> int:
        """Displacement tensors held: K + h - 1, so that every inner product a fit needs can be formed."""
        return self.lags + self.max_horizon - 1

    @property
    def history_bytes_per_parameter(self) -> float:
        """Memory of the history for each trained parameter, the fp32 copy of the last weights included if one is kept.

        Beside it the sample takes about `4 (K + h + 2)` bytes for each of its entries, however large the model.
        """
        if self.rule == "moments":
            return 0.0
        return self.capacity * STORAGE_BYTES[self.history_dtype] + (4.0 if self.source == "weights" else 0.0)


def _require_integers(config: ForecastConfig, names: Sequence[str], *, minimum: int) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name}={value!r}: must be an integer of {minimum} or more")


def _require_between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, int | float) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        limits = f"{low} or more" if high == sys.float_info.max else f"in {bracket}{low}, {high}]"
        raise ConfigError(f"{name}={value!r}: must be {limits}")


def _require_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        known = ", ".join(repr(x) for x in allowed[:-1])
        raise ConfigError(f"{name}={value!r}: must be {known} or {allowed[-1]!r}")
