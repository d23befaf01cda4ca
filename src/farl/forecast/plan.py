"""The records of a forecast: what was planned, and how it came out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from farl.core.types import PolicyStamp
from farl.forecast.aim import horizon_key

Terms = Mapping[str, tuple[float, ...]]
"""Coefficients by group of leaves, newest displacement first; `ALL` is the only group without grouping."""
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class ForecastPlan:
    """A forecast, as coefficients over stored displacements.

        theta^[base+h | base] = theta[base] + sum_k a[k] * D[base+1-k]

    The rule `moments` has no coefficients: it runs the optimizer ahead, and `damping` scales the result.

    Attributes:
        base_version: version the forecast starts from.
        horizon: h >= 0, updates it looks ahead, the mean where the lag varies; 0 means exact weights.
        shares: w_i, share of each coming update in the target.
        rule: rule the coefficients come from; "stale" when held.
        terms: the coefficients; empty when nothing moves.
        damping: factor already in the coefficients.
        coming_lrs: learning rates of the coming updates, for the rule `moments`.
        held: why a rule that would have moved the weights was not allowed to; "" otherwise.
        shadow: coefficients that a held forecast would have had, undamped, for evidence at no risk.
        predicted_error: expected `forecast/error_ratio`, from scores of the recent past; None if unknown.
        realised_error: discounted error ratio of the forecasts shipped before at this horizon; None if none was scored.
        scores: squared error of each rule of the bank over the recent past, as a share of stale's.
        predicted_kl_ratio: KL expected from the probes, as a share of stale's; None without probes.
    """

    base_version: int
    horizon: float
    shares: tuple[float, ...] = ()
    rule: str
    terms: Terms = field(default_factory=dict)
    damping: float = 1.0
    coming_lrs: tuple[float, ...] = ()
    held: str = ""
    shadow: Terms = field(default_factory=dict)
    predicted_error: float | None = None
    realised_error: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    predicted_kl_ratio: float | None = None

    @property
    def target_version(self) -> float:
        """Version the forecast aims at; between two versions for a fractional horizon."""
        return self.base_version + self.horizon

    @property
    def key(self) -> float:
        """What evidence and scores of this horizon are kept by."""
        return horizon_key(self.horizon)

    @property
    def due_version(self) -> int:
        """Version at which the whole target is known and the forecast is scored."""
        return self.base_version + len(self.shares)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients, those of several groups one after another in the groups' alphabetical order."""
        return tuple(a for _, group in sorted(self.terms.items()) for a in group)

    @property
    def moves(self) -> bool:
        """Whether the forecast differs from the weights of `base_version`."""
        return any(self.coefficients) or (bool(self.coming_lrs) and self.damping > 0)

    def stamp(self, wire_dtype: str = "float32") -> PolicyStamp:
        """The stamp that trajectories drawn from this forecast carry."""
        return PolicyStamp(
            base_version=self.base_version,
            target_version=self.target_version,
            rule=self.rule,
            coefficients=(self.damping,) if self.coming_lrs else self.coefficients,
            wire_dtype=wire_dtype,
        )

    def explain(self) -> str:
        """Everything that led to this plan, in a few lines for people."""
        aim = "exact weights" if self.horizon == 0 else f"{self.horizon:g} updates ahead of version {self.base_version}"
        lines = [f"forecast of version {self.target_version:g}: {aim}"]
        if self.held:
            lines.append(f"held, stale weights are sent: {self.held}")
        elif self.moves:
            lines.append(f"rule {self.rule}, damped to {self.damping:.2f} of itself")
        for group, coefficients in sorted((self.terms or self.shadow).items()):
            name = "coefficients" if group == ALL else f"coefficients of {group}"
            state = "" if self.terms else " (not sent)"
            lines.append(f"{name}{state}, newest displacement first: " + ", ".join(f"{a:+.3f}" for a in coefficients))
        if self.scores:
            ranked = sorted(self.scores.items(), key=lambda item: item[1])
            lines.append("squared error over stale, recent past: " + ", ".join(f"{n} {s:.3f}" for n, s in ranked))
        for name, value in (
            ("expected error ratio", self.predicted_error),
            ("realised error ratio so far at this horizon", self.realised_error),
            ("expected KL over stale", self.predicted_kl_ratio),
        ):
            if value is not None:
                lines.append(f"{name}: {value:.3f}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        lists = {name: {g: list(a) for g, a in getattr(self, name).items()} for name in ("terms", "shadow")}
        return asdict(self) | lists | {"shares": list(self.shares), "coming_lrs": list(self.coming_lrs)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ForecastPlan:
        """Inverse of `to_json`."""
        tuples = {name: {g: tuple(a) for g, a in data[name].items()} for name in ("terms", "shadow")}
        return cls(**{**data, **tuples, "shares": tuple(data["shares"]), "coming_lrs": tuple(data["coming_lrs"])})


@dataclass(frozen=True, kw_only=True)
class ScoredForecast:
    """A shipped forecast and its realised error, known once its target exists.

    Attributes:
        plan: the forecast as shipped.
        residual: `||theta[t+h] - theta^||`, over the sampled entries and scaled to all, before the displacements were
            rounded to their storage.
        displacement: `||theta[t+h] - theta[t]||`, the residual of stale weights.
    """

    plan: ForecastPlan
    residual: float
    displacement: float

    @property
    def error_ratio(self) -> float:
        """Prequential error e; below 1 the forecast was nearer than stale. NaN if nothing moved."""
        return self.residual / self.displacement if self.displacement > 0 else math.nan

    def explain(self) -> str:
        """The plan's own explanation, and how it came out."""
        return f"{self.plan.explain()}\nrealised error ratio of this forecast: {self.error_ratio:.3f}"
