"""The settings of a forecaster, checked when made.

Which rules exist is the table in `rules`; what a setting does to the coefficients is documented there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farl.core.types import DTYPES
from farl.errors import ConfigError

Consistency = Literal["hard", "soft", "off"]


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """Settings of a forecaster.

    Attributes:
        rule: a name of `FORECASTERS`.
        lags: K, displacements a rule may combine.
        order: p, order of consistency of `polynomial` and `least_squares`; at most `lags`.
        consistency: of `least_squares`: "hard" solves under the constraints (the published method), "soft"
            pulls toward a consistent vector, "off" pulls toward zero.
        ridge: weight of that pull, relative to the mean diagonal of the normal matrix.
        forgetting: lambda in (0, 1], weight of the past per update in fits and scores.
        window: updates a fit looks back on (their scalars; their tensors are dropped after K + h - 1).
        damping: factor in [0, 1] on the coefficients of a rule other than `auto`.
        max_horizon: largest horizon that will be asked for; sizes the history.
        history_dtype: dtype displacements are stored in; "bfloat16" halves the memory at 0.4 % error.
        bank: rules that `auto` chooses among.
        hysteresis: relative advantage a challenger needs before `auto` changes its rule.
        cold_damping: factor `auto` uses before any policy-space evidence has come in.
        min_damping: policy-space factor below which `auto` holds.
        retry_updates: updates `auto` holds before it tries again; doubles on every failure in a row.
    """

    rule: str = "auto"
    lags: int = 4
    order: int = 1
    consistency: Consistency = "hard"
    ridge: float = 0.05
    forgetting: float = 0.9
    window: int = 48
    damping: float = 1.0
    max_horizon: int = 1
    history_dtype: str = "float32"
    bank: tuple[str, ...] = ("copy", "least_squares", "least_squares_soft", "least_squares_off")
    hysteresis: float = 0.05
    cold_damping: float = 0.5
    min_damping: float = 0.1
    retry_updates: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "bank", tuple(self.bank))
        _require_integers(self, ("lags", "order", "max_horizon", "window", "retry_updates"), minimum=1)
        if self.order > self.lags:
            raise ConfigError(
                f"order={self.order}: order p needs at least p lags, but lags={self.lags}; raise lags or lower order"
            )
        _require_between("forgetting", self.forgetting, 0.0, 1.0, open_low=True)
        for name in ("damping", "cold_damping", "min_damping"):
            _require_between(name, getattr(self, name), 0.0, 1.0)
        for name in ("ridge", "hysteresis"):
            _require_between(name, getattr(self, name), 0.0, float("inf"))
        if self.consistency not in ("hard", "soft", "off"):
            raise ConfigError(f"consistency={self.consistency!r}: must be 'hard', 'soft' or 'off'")
        if self.history_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"history_dtype={self.history_dtype!r}: must be 'float32' or 'bfloat16'")
        if not self.bank:
            raise ConfigError("bank=(): auto needs at least one rule to choose from, for example ('copy',)")

    @property
    def capacity(self) -> int:
        """Displacement tensors held: K + h - 1, so that every inner product a fit needs can be formed."""
        return self.lags + self.max_horizon - 1

    @property
    def history_bytes_per_parameter(self) -> int:
        """Memory of the history for each trained parameter, the fp32 copy of the last weights included."""
        return self.capacity * DTYPES[self.history_dtype].itemsize + 4


def _require_integers(config: ForecastConfig, names: Sequence[str], *, minimum: int) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name}={value!r}: must be an integer of {minimum} or more")


def _require_between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ConfigError(f"{name}={value!r}: must be in {bracket}{low}, {high}]")
