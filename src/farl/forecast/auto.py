"""Choosing a rule online: every rule of the bank is scored on the realised past, for free.

Scores come from Gram scalars alone: for each recent target the coefficients that a rule would have given
at its base version are worked out again and their residual is read off. So there is no extra state to
save, and any horizon can be scored. What policy-space evidence does to the choice is in `gate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from farl.forecast.aim import Aim
from farl.forecast.gram import GramBand
from farl.forecast.rules import FORECASTERS, Coefficients, View

Key = tuple[str, str, int, Aim]


@dataclass(frozen=True)
class Memo:
    """Results already worked out. A cache: dropping it changes nothing.

    Attributes:
        coefficients: by (group, rule, base version, aim).
        squared_errors: by the same.
        unit_grams: the newest band of each group at unit learning rate.
    """

    coefficients: dict[Key, Coefficients | None] = field(default_factory=dict)
    squared_errors: dict[Key, tuple[float, float]] = field(default_factory=dict)
    unit_grams: dict[str, GramBand] = field(default_factory=dict)

    def drop_before(self, version: int) -> None:
        """Forgets results of base versions before `version`."""
        for table in (self.coefficients, self.squared_errors):
            for key in [k for k in table if k[2] < version]:
                del table[key]


@dataclass(frozen=True, kw_only=True)
class RuleScore:
    """Discounted squared error of a rule over recent targets, as a share of stale's.

    Attributes:
        squared: `sum lambda^age r^2`.
        stale: `sum lambda^age ||T||^2`.
    """

    squared: float
    stale: float

    @property
    def squared_ratio(self) -> float:
        """NaN without targets, or where nothing moved."""
        return self.squared / self.stale if self.stale > 0 else math.nan


def rule_coefficients(name: str, view: View, group: str, memo: Memo) -> Coefficients | None:
    """Coefficients of a rule for one group at the view's version, from the cache if they are there."""
    key = (group, name, view.version, view.aim)
    if key not in memo.coefficients:
        function = FORECASTERS[name].coefficients
        assert function is not None, name
        memo.coefficients[key] = function(view)
    return memo.coefficients[key]


def score_rule(name: str, view: View, group: str, memo: Memo) -> RuleScore:
    """Scores one rule for one group on the targets `version, version - 1, ...` that the band still covers.

    Args:
        name: a rule with coefficients.
        view: at the newest target.
        group: of leaves; the view's band is its own.
        memo: cache of coefficients.

    Returns:
        The score; a rule that had nothing to say counts as stale.
    """
    gram, config, reach = view.gram, view.config, view.aim.reach
    total = total_stale = 0.0
    for target in range(view.version, max(view.version - config.window, 0), -1):
        base = target - reach
        if not gram.covers(max(base + 1 - config.lags, gram.oldest), target) or base < gram.oldest:
            break
        key = (group, name, base, view.aim)
        if key not in memo.squared_errors:
            then = replace(view, version=base, num_steps=view.num_steps - (view.version - base))
            chosen = rule_coefficients(name, then, group, memo) or ()
            memo.squared_errors[key] = gram.squared_error(chosen, base=base, shares=view.aim.shares)
        squared, stale = memo.squared_errors[key]
        weight = config.forgetting ** (view.version - target)
        total += weight * squared
        total_stale += weight * stale
    return RuleScore(squared=total, stale=total_stale)


def choose(
    views: Mapping[str, View], *, bank: tuple[str, ...], incumbent: str | None, memo: Memo
) -> tuple[str, Mapping[str, float]]:
    """The best-scoring rule of the bank and stale; the incumbent stays unless it is clearly beaten.

    Args:
        views: one for each group of leaves, all at the same version; their scores are added.
        bank: rules to choose among.
        incumbent: rule shipped last at this horizon, or None.
        memo: cache of coefficients.

    Returns:
        The name, and the squared errors over stale's. Before any target is known the first rule of the bank is taken.
    """
    known: dict[str, float] = {}
    for name in ("stale", *bank):
        scores = [score_rule(name, view, group, memo) for group, view in views.items()]
        stale = sum(s.stale for s in scores)
        if stale > 0:
            known[name] = sum(s.squared for s in scores) / stale
    if not known:
        return bank[0], known
    hysteresis = next(iter(views.values())).config.hysteresis
    best = min(known, key=lambda name: (known[name], name))
    if incumbent in known and known[best] > known[incumbent] * (1 - hysteresis):
        return incumbent, known
    return best, known
