"""The records of a forecast: what was planned, and how it came out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from farl.core.types import PolicyStamp


@dataclass(frozen=True, kw_only=True)
class ForecastPlan:
    """A forecast, as coefficients over stored displacements.

        theta^[base+h | base] = theta[base] + sum_k coefficients[k-1] * D[base+1-k]

    Attributes:
        base_version: version the forecast starts from.
        horizon: h >= 0, updates it looks ahead; 0 means exact weights.
        rule: rule the coefficients come from; "stale" when held.
        coefficients: newest displacement first; empty when nothing moves.
        damping: factor already in the coefficients.
        held: why a rule that would have moved the weights was not allowed to; "" otherwise.
        predicted_error: expected `forecast/error_ratio`, from scores of the recent past; None if unknown.
    """

    base_version: int
    horizon: int
    rule: str
    coefficients: tuple[float, ...] = ()
    damping: float = 1.0
    held: str = ""
    predicted_error: float | None = None

    @property
    def target_version(self) -> int:
        """Version the forecast aims at."""
        return self.base_version + self.horizon

    @property
    def moves(self) -> bool:
        """Whether the forecast differs from the weights of `base_version`."""
        return any(c != 0.0 for c in self.coefficients)

    def stamp(self, wire_dtype: str = "float32") -> PolicyStamp:
        """The stamp that trajectories drawn from this forecast carry."""
        return PolicyStamp(
            base_version=self.base_version,
            target_version=self.target_version,
            rule=self.rule,
            coefficients=self.coefficients,
            wire_dtype=wire_dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        return asdict(self) | {"coefficients": list(self.coefficients)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ForecastPlan:
        """Inverse of `to_json`."""
        return cls(**{**data, "coefficients": tuple(data["coefficients"])})


@dataclass(frozen=True, kw_only=True)
class ScoredForecast:
    """A shipped forecast and its realised error, known once its target version exists.

    Attributes:
        plan: the forecast as shipped.
        residual: `||theta[t+h] - theta^||`.
        displacement: `||theta[t+h] - theta[t]||`, the residual of stale weights.
    """

    plan: ForecastPlan
    residual: float
    displacement: float

    @property
    def error_ratio(self) -> float:
        """Prequential error e; below 1 the forecast was nearer than stale. NaN if nothing moved."""
        return self.residual / self.displacement if self.displacement > 0 else math.nan
