"""Every forecast rule: a function from inner products to coefficients.

A rule sees the Gram band as it was at `version`, the horizon and the settings, and returns coefficients
over the newest displacements, or None while it cannot say anything. Choosing among rules online is
`auto`; adding one is a function here and a row in `FORECASTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farl.forecast.config import Consistency, ForecastConfig
from farl.forecast.gram import GramBand
from farl.forecast.least_squares import minimum_norm, normal_equations, solve

Coefficients = tuple[float, ...]
RuleFunction = Callable[[GramBand, int, int, ForecastConfig], Coefficients | None]
"""`(gram, version, horizon, config) -> coefficients`, newest displacement first."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        name: the name in configs.
        summary: one line for `farl list rules`.
        coefficients: the rule; None for `auto`, which chooses among the others.
    """

    name: str
    summary: str
    coefficients: RuleFunction | None


def num_known(gram: GramBand, version: int, limit: int) -> int:
    """How many displacements up to `version` a rule may use, at most `limit`."""
    return max(min(limit, version - gram.oldest + 1), 0)


def _stale(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
    return ()


def _copy(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
    return (float(horizon),) if num_known(gram, version, 1) else None


def _half(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
    return (horizon / 2,) if num_known(gram, version, 1) else None


def _mean(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
    lags = num_known(gram, version, config.lags)
    return (horizon / lags,) * lags if lags else None


def _polynomial(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
    lags = num_known(gram, version, config.lags)
    if not lags:
        return None
    return tuple(minimum_norm(lags, min(config.order, lags), horizon).tolist())


def _least_squares(consistency: Consistency | None) -> RuleFunction:
    def coefficients(gram: GramBand, version: int, horizon: int, config: ForecastConfig) -> Coefficients | None:
        lags = num_known(gram, version, config.lags)
        if not lags:
            return None
        normal_KK, cross_K, _ = normal_equations(
            gram,
            version=version,
            horizon=horizon,
            lags=lags,
            forgetting=config.forgetting,
            window=config.window,
        )
        fitted_K = solve(
            normal_KK,
            cross_K,
            horizon=horizon,
            order=min(config.order, lags),
            consistency=consistency or config.consistency,
            ridge=config.ridge,
        )
        return tuple(fitted_K.tolist())

    return coefficients


FORECASTERS: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(name="stale", summary="no forecast: the weights of dispatch time", coefficients=_stale),
        Rule(name="copy", summary="the last displacement, h times (order 1, one lag)", coefficients=_copy),
        Rule(name="half", summary="half of copy: damped for noisy updates", coefficients=_half),
        Rule(name="mean", summary="uniform over K lags (order 1)", coefficients=_mean),
        Rule(
            name="polynomial",
            summary="minimum-norm coefficients of order p over K lags",
            coefficients=_polynomial,
        ),
        Rule(
            name="least_squares",
            summary="multi-lag fit to the recent past; consistency as configured (hard: the published method)",
            coefficients=_least_squares(None),
        ),
        Rule(
            name="least_squares_soft",
            summary="the same fit, pulled toward a consistent vector",
            coefficients=_least_squares("soft"),
        ),
        Rule(
            name="least_squares_off",
            summary="the same fit without consistency",
            coefficients=_least_squares("off"),
        ),
        Rule(
            name="auto",
            summary="the best-scoring rule of a bank, damped and held by policy-space evidence",
            coefficients=None,
        ),
    )
}
