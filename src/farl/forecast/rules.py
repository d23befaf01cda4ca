"""Every forecast rule: a function from inner products to coefficients.

A rule sees a `View`: the Gram band as it was at a version, the aim, the settings and what is known of the optimizer. It
returns coefficients over the newest displacements, or None while it cannot say anything. Choosing among rules online is
`auto`; adding one is a function here and a row in `FORECASTERS`. `moments` alone is no such function: it runs the
optimizer's own recursion ahead (`farl.forecast.moments`) and needs no history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from farl.forecast.aim import Aim, aim_of
from farl.forecast.config import Consistency, ForecastConfig
from farl.forecast.gram import GramBand
from farl.forecast.least_squares import consistency_system, minimum_norm, normal_equations, solve

Coefficients = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class View:
    """What a rule may look at.

    Attributes:
        gram: inner products of displacements at unit learning rate; rows newer than `version` are not read.
        version: t.
        aim: where the forecast aims.
        config: the settings.
        momentum: beta1 of Adam or SGD; None if the optimizer is not understood.
        num_steps: optimizer steps made at `version`.
    """

    gram: GramBand
    version: int
    aim: Aim
    config: ForecastConfig
    momentum: float | None = None
    num_steps: int = 0

    def num_known(self, limit: int) -> int:
        """How many displacements up to `version` a rule may use, at most `limit`."""
        return max(min(limit, self.version - self.gram.oldest + 1), 0)


RuleFunction = Callable[[View], Coefficients | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        name: the name in configs.
        summary: what it computes and when to use it, for `farl list rules`.
        coefficients: the rule; None for `auto`, which chooses, and `moments`, which has no coefficients.
    """

    name: str
    summary: str
    coefficients: RuleFunction | None


def _stale(view: View) -> Coefficients | None:
    return ()


def _copy(view: View) -> Coefficients | None:
    return (float(view.aim.horizon),) if view.num_known(1) else None


def _half(view: View) -> Coefficients | None:
    return (view.aim.horizon / 2,) if view.num_known(1) else None


def _mean(view: View) -> Coefficients | None:
    lags = view.num_known(view.config.lags)
    return (view.aim.horizon / lags,) * lags if lags else None


def _polynomial(view: View) -> Coefficients | None:
    lags = view.num_known(view.config.lags)
    if not lags:
        return None
    return tuple(minimum_norm(lags, min(view.config.order, lags), view.aim).tolist())


def momentum_factor(beta: float, num_steps: int, shares: tuple[float, ...]) -> float:
    """What Adam adds of the last displacement if the coming gradients are zero and its second moment stands.

        sum_i w_i beta^i (1 - beta^s) / (1 - beta^(s+i))

    Args:
        beta: decay of the first moment.
        num_steps: s, steps made; the bias correction makes the first steps count less.
        shares: w of the aim.
    """
    return sum(
        w * beta**i * (1 - beta**num_steps) / (1 - beta ** (num_steps + i)) for i, w in enumerate(shares, start=1)
    )


def _momentum(view: View) -> Coefficients | None:
    if not view.num_known(1):
        return None
    if view.momentum is None:
        return _half(view)
    return (momentum_factor(view.momentum, max(view.num_steps, 1), view.aim.shares),)


def _least_squares(consistency: Consistency | None) -> RuleFunction:
    def coefficients(view: View) -> Coefficients | None:
        config = view.config
        lags = view.num_known(config.lags)
        if not lags:
            return None
        mode = consistency or config.consistency
        order = min(config.order, lags)
        normal_KK, cross_K, _ = _normal(view, lags)
        fitted_K = solve(
            normal_KK,
            cross_K,
            pull_K=minimum_norm(lags, order, view.aim) if mode != "off" else torch.zeros(lags, dtype=torch.float64),
            ridge=config.ridge,
            constraints=consistency_system(lags, order, view.aim) if mode == "hard" else None,
        )
        return tuple(fitted_K.tolist())

    return coefficients


def _least_squares_prior(view: View) -> Coefficients | None:
    """The fit pulled to what is assumed until it has seen enough: momentum, for longer horizons its own one-step fit.

    One-step targets are known h - 1 updates earlier and do not overlap, so running the one-step fit ahead is the better
    forecast while targets are few.
    """
    config = view.config
    lags = view.num_known(config.lags)
    if view.aim.shares == (1.0,):
        pull = _momentum(view)
    else:
        one_step = _least_squares_prior(replace(view, aim=aim_of(1)))
        pull = None if one_step is None else iterate(one_step, view.aim.shares)
    if pull is None:
        return None
    normal_KK, cross_K, count = _normal(view, lags)
    pull_K = torch.zeros(lags, dtype=torch.float64)
    pull_K[: len(pull)] = torch.tensor(pull, dtype=torch.float64)
    ridge = config.ridge + config.cold_updates * view.aim.reach / max(count, 1e-9) ** 2
    return tuple(solve(normal_KK, cross_K, pull_K=pull_K, ridge=ridge).tolist())


def iterate(one_step: Coefficients, shares: tuple[float, ...]) -> Coefficients:
    """Coefficients of the coming updates' sum, each forecast in turn by a one-step rule from those before it.

        D^[t+i] = sum_k a_k D^[t+i-k],   D^[j] = D[j] for j <= t;   returns those of sum_i w_i D^[t+i]

    Args:
        one_step: a, newest displacement first.
        shares: w of the aim.
    """
    lags = len(one_step)
    recent = [[float(i == k) for i in range(lags)] for k in range(lags)]
    total = [0.0] * lags
    for share in shares:
        ahead = [sum(a * row[i] for a, row in zip(one_step, recent, strict=True)) for i in range(lags)]
        total = [x + share * y for x, y in zip(total, ahead, strict=True)]
        recent = [ahead, *recent[:-1]]
    return tuple(total)


def _normal(view: View, lags: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    return normal_equations(
        view.gram,
        version=view.version,
        shares=view.aim.shares,
        lags=lags,
        forgetting=view.config.forgetting,
        window=view.config.window,
    )


FORECASTERS: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(name="stale", summary="no forecast: the weights of dispatch time", coefficients=_stale),
        Rule(
            name="copy",
            summary="the last displacement, h times: order 1 with one lag; strong where drift is, too long a step "
            "where updates are noisy",
            coefficients=_copy,
        ),
        Rule(name="half", summary="half of copy, for noisy updates and large steps", coefficients=_half),
        Rule(
            name="mean",
            summary="uniform over K lags (order 1); poor under momentum, its lags are too old",
            coefficients=_mean,
        ),
        Rule(
            name="polynomial",
            summary="minimum-norm coefficients of order p over K lags: exact on polynomial drift of degree below p",
            coefficients=_polynomial,
        ),
        Rule(
            name="momentum",
            summary="the last displacement times what momentum alone keeps of it; damped while Adam's moments fill",
            coefficients=_momentum,
        ),
        Rule(
            name="moments",
            summary="runs Adam, AdamW or SGD itself h steps ahead with an assumed gradient; no history memory, closed "
            "form for any h",
            coefficients=None,
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
            name="least_squares_prior",
            summary="the same fit without consistency, pulled to the momentum rule until it has seen enough",
            coefficients=_least_squares_prior,
        ),
        Rule(
            name="auto",
            summary="the best-scoring rule of a bank, damped and held by policy-space evidence: never worse than stale "
            "over a run",
            coefficients=None,
        ),
    )
}
