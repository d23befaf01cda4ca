"""From a state to a plan: unit-rate Gram bands, the rule's coefficients, the gate; no tensor is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from farl.forecast.aim import Aim, Horizon, horizon_key, require_reach
from farl.forecast.auto import choose, rule_coefficients
from farl.forecast.gate import PolicyEvidence, may_send, start_afresh
from farl.forecast.plan import ForecastPlan, Terms
from farl.forecast.rules import View
from farl.forecast.state import EUCLIDEAN, ForecastState


def plan(state: ForecastState, horizon: Horizon, *, coming_lrs: Sequence[float] = ()) -> ForecastPlan:
    """Chooses the coefficients of a forecast; no tensor is touched.

    Args:
        state: the state.
        horizon: h in updates, whole or not, from 0 (exact weights) to `max_horizon`; or `{updates: share}` where the
            lag varies.
        coming_lrs: learning rates of the next updates, where they are known; the last one goes on otherwise.

    Returns:
        The plan; it holds (stale weights, with the reason) while there is nothing to forecast from or while
        the evidence says that forecasts do not pay.

    Raises:
        ConfigError: for a horizon that is negative, not a number or above `max_horizon`.
    """
    config, aim = state.config, require_reach(horizon, state.config.max_horizon)
    if aim.horizon == 0:
        return ForecastPlan(base_version=state.version, horizon=0, rule="stale")
    blank = ForecastPlan(
        base_version=state.version,
        horizon=aim.horizon,
        shares=aim.shares,
        rule=config.rule,
        realised_error=_error_ratio(state.realised, horizon_key(aim.horizon)),
    )
    lrs = _coming(state, aim, coming_lrs)
    if config.rule == "moments":
        return _plan_moments(state, blank, lrs)
    views = _views(state, aim)
    if config.rule == "auto":
        return _plan_auto(state, blank, views, lrs)
    terms = _terms(state, config.rule, views, lrs)
    if terms is None:
        return _hold(blank, "no displacement observed yet")
    return _finish(blank, config.rule, terms, config.damping)


def evidence_of(state: ForecastState, key: float) -> PolicyEvidence:
    """Evidence about a horizon; that of the nearest one where it has none of its own, without its hold."""
    if key in state.evidence:
        return state.evidence[key]
    if not state.evidence:
        return PolicyEvidence()
    nearest = min(state.evidence, key=lambda h: (abs(h - key), h))
    return start_afresh(state.evidence[nearest])


def _plan_auto(
    state: ForecastState, blank: ForecastPlan, views: Mapping[str, View], lrs: Sequence[float]
) -> ForecastPlan:
    config = state.config
    incumbent = state.incumbents.get(blank.key)
    name, scores = choose(views, bank=config.bank, incumbent=incumbent, memo=state.memo)
    blank = replace(blank, scores=scores)
    best = name if name != "stale" else min(config.bank, key=lambda rule: scores[rule])
    terms = _terms(state, best, views, lrs)
    if terms is None:
        return _hold(blank, "no displacement observed yet")
    evidence = evidence_of(state, blank.key)
    blank = replace(
        blank,
        predicted_error=math.sqrt(scores[best]) if best in scores else None,
        predicted_kl_ratio=evidence.predicted_kl_ratio,
    )
    reason = _reason_to_hold(state, blank.key, evidence)
    if not reason and name == "stale" and not (blank.key in state.evidence and evidence.pays):
        reason = "no rule of the bank beat stale weights recently"
    if not reason and not evidence.held and evidence.factor < config.min_damping:
        reason = "policy-space evidence, which leaves nothing of the forecast"
    if reason:
        return replace(_hold(blank, reason), shadow=terms)
    return _finish(blank, best, terms, max(evidence.factor, config.min_damping))


def _reason_to_hold(state: ForecastState, key: float, evidence: PolicyEvidence) -> str:
    """Why forecasts of a horizon are held: the policy says so, or the weights do and the policy does not object."""
    if not may_send(evidence, state.version):
        return f"policy-space evidence, since version {evidence.closed_at}"
    squared, stale = state.would_be.get(key, (0.0, 0.0))
    limit = stale * (1 - state.config.hysteresis if state.incumbents.get(key) == "stale" else 1)
    if squared > limit and not (key in state.evidence and evidence.pays):
        return "its parameter error was above that of stale weights, and no probe shows a lower KL"
    return ""


def _plan_moments(state: ForecastState, blank: ForecastPlan, lrs: Sequence[float]) -> ForecastPlan:
    if state.version == state.first:
        return _hold(blank, "no displacement observed yet")
    evidence = evidence_of(state, blank.key)
    blank = replace(
        blank,
        coming_lrs=tuple(lrs),
        predicted_error=_error_ratio(state.would_be, blank.key),
        predicted_kl_ratio=evidence.predicted_kl_ratio,
    )
    reason = _reason_to_hold(state, blank.key, evidence)
    if reason:
        return _hold(blank, reason)
    # without coefficients there is no shadow to learn from, so a little is sent until the gate has seen enough to close
    return replace(blank, damping=state.config.damping * max(evidence.factor, state.config.min_damping))


def _views(state: ForecastState, aim: Aim) -> dict[str, View]:
    """What rules may look at, by group: displacements at unit learning rate."""
    return {
        group: View(
            gram=state.unit_gram(group),
            version=state.version,
            aim=aim,
            config=state.config,
            momentum=state.momentum,
            num_steps=state.num_steps,
        )
        for group in state.grams
        if group != EUCLIDEAN
    }


def _coming(state: ForecastState, aim: Aim, coming_lrs: Sequence[float]) -> tuple[float, ...]:
    """Learning rates of the next `reach` updates; the last known one is carried on."""
    known = [float(x) for x in coming_lrs][: aim.reach]
    last = known[-1] if known else state.lrs.get(state.version, 1.0)
    return tuple(known + [last] * (aim.reach - len(known)))


def _terms(state: ForecastState, name: str, views: Mapping[str, View], lrs: Sequence[float]) -> Terms | None:
    """Coefficients by group over displacements as they are stored; None while the rule has nothing to say.

    A rule answers at unit learning rate; `a_k` is its answer times the mean coming rate over the rate of `D[t+1-k]`.
    """
    terms: dict[str, tuple[float, ...]] = {}
    for group, view in views.items():
        chosen = rule_coefficients(name, view, group, state.memo)
        if chosen is None:
            return None
        shares = view.aim.shares
        ahead = sum(w * lr for w, lr in zip(shares, lrs, strict=True)) / sum(shares)
        then = [state.lrs.get(state.version - k, 0.0) for k in range(len(chosen))]
        terms[group] = tuple(a * ahead / lr if lr > 0 else 0.0 for a, lr in zip(chosen, then, strict=True))
    return terms


def _error_ratio(discounted: Mapping[float, tuple[float, float]], horizon: float) -> float | None:
    """Error over that of stale weights, from discounted squares; None where nothing was scored."""
    squared, stale = discounted.get(horizon, (0.0, 0.0))
    return math.sqrt(squared / stale) if stale > 0 else None


def _hold(blank: ForecastPlan, reason: str) -> ForecastPlan:
    return replace(blank, rule="stale", held=reason, damping=0.0)


def _finish(blank: ForecastPlan, rule: str, terms: Terms, damping: float) -> ForecastPlan:
    damped = {group: tuple(damping * a for a in coefficients) for group, coefficients in terms.items()}
    numbers = [a for coefficients in damped.values() for a in coefficients]
    if not all(math.isfinite(a) for a in numbers):
        return _hold(blank, f"rule {rule} gave a coefficient that is not finite")
    if not any(numbers) and rule != "stale":
        return _hold(blank, f"rule {rule} moves nothing yet")
    return replace(blank, rule=rule, terms=damped, damping=damping)
