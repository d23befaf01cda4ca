"""Choosing a rule online: every rule of the bank is scored on the realised past, for free.

Scores come from Gram scalars alone: for each recent target the coefficients that a rule would have given
at its base version are worked out again and their residual is read off. So there is no extra state to
save, and any horizon can be scored. What policy-space evidence does to the choice is in `gate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from farl.forecast.config import ForecastConfig
from farl.forecast.gram import GramBand
from farl.forecast.rules import FORECASTERS, Coefficients

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Memo:
    """Results already worked out, by (rule, base version, horizon). A cache: dropping it changes nothing."""

    coefficients: dict[Key, Coefficients | None] = field(default_factory=dict)
    squared_errors: dict[Key, tuple[float, float]] = field(default_factory=dict)

    def drop_before(self, version: int) -> None:
        """Forgets results of base versions before `version`."""
        for table in (self.coefficients, self.squared_errors):
            for key in [k for k in table if k[1] < version]:
                del table[key]


@dataclass(frozen=True, kw_only=True)
class RuleScore:
    """Discounted squared error of a rule over recent targets, as a share of stale's.

    Attributes:
        squared_ratio: `sum lambda^age r^2 / sum lambda^age ||T||^2`; NaN without targets.
        num_targets: targets it is over.
    """

    squared_ratio: float
    num_targets: int


def rule_coefficients(
    name: str, gram: GramBand, version: int, horizon: int, config: ForecastConfig, memo: Memo
) -> Coefficients | None:
    """Coefficients of a fixed rule at a past or present version, from the cache if they are there."""
    key = (name, version, horizon)
    if key not in memo.coefficients:
        function = FORECASTERS[name].coefficients
        assert function is not None, name
        memo.coefficients[key] = function(gram, version, horizon, config)
    return memo.coefficients[key]


def score_rule(name: str, gram: GramBand, version: int, horizon: int, config: ForecastConfig, memo: Memo) -> RuleScore:
    """Scores one rule on the targets `version, version - 1, ...` that the band still covers.

    Args:
        name: a fixed rule of `FORECASTERS`.
        gram: inner products.
        version: newest target.
        horizon: updates the rule looked ahead.
        config: lags, forgetting and window.
        memo: cache of coefficients.

    Returns:
        The score; a rule that had nothing to say counts as stale.
    """
    total = total_stale = 0.0
    count = 0
    for target in range(version, max(version - config.window, 0), -1):
        base = target - horizon
        if not gram.covers(max(base + 1 - config.lags, gram.oldest), target) or base < gram.oldest:
            break
        key = (name, base, horizon)
        if key not in memo.squared_errors:
            chosen = rule_coefficients(name, gram, base, horizon, config, memo) or ()
            memo.squared_errors[key] = gram.squared_error(chosen, base=base, horizon=horizon)
        squared, stale = memo.squared_errors[key]
        weight = config.forgetting ** (version - target)
        total += weight * squared
        total_stale += weight * stale
        count += 1
    return RuleScore(squared_ratio=total / total_stale if total_stale > 0 else math.nan, num_targets=count)


def choose(
    gram: GramBand,
    version: int,
    horizon: int,
    config: ForecastConfig,
    *,
    incumbent: str | None,
    memo: Memo,
) -> tuple[str, Mapping[str, RuleScore]]:
    """The best-scoring rule of the bank and stale; the incumbent stays unless it is clearly beaten.

    Args:
        gram: inner products.
        version: t.
        horizon: h.
        config: bank, hysteresis and what the rules need.
        incumbent: rule shipped last at this horizon, or None.
        memo: cache of coefficients.

    Returns:
        The name and all scores. Before any target is known the first rule of the bank is taken.
    """
    scores = {name: score_rule(name, gram, version, horizon, config, memo) for name in ("stale", *config.bank)}
    known = {name: s.squared_ratio for name, s in scores.items() if not math.isnan(s.squared_ratio)}
    if not known:
        return config.bank[0], scores
    best = min(known, key=lambda name: (known[name], name))
    if incumbent in known and known[best] > known[incumbent] * (1 - config.hysteresis):
        return incumbent, scores
    return best, scores
