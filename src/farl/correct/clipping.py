"""Correctors that bound the step by clipping a differentiable ratio, hard or softly."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from farl.correct import check
from farl.correct.adapt import balanced_clip
from farl.correct.base import Corrector, Need, SurrogateFunction
from farl.correct.ratio import Level, LogpFunction, approximate_proximal, geometric_ratio, logp_of, token_ratio
from farl.correct.reduce import Denominator, Reduction
from farl.correct.surrogate import clipped, flipped, geometric_mean, smooth_gate
from farl.correct.treat import importance_weight

Anchor = Literal["behaviour", "proximal"]
Action = Literal["mask", "clamp"]


def anchored(anchor: Anchor) -> tuple[LogpFunction, frozenset[Need]]:
    """The policy in a ratio's denominator, and what it needs."""
    check.one_of("anchor", anchor, ("behaviour", "proximal"))
    return logp_of(anchor), frozenset({Need.PROXIMAL} if anchor == "proximal" else ())


def ppo_clip(
    anchor: LogpFunction,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> SurrogateFunction:
    """PPO's surrogate from offsets around 1."""
    check.offsets(clip_low, clip_high)
    check.dual(dual_clip)
    check.beyond_clip(ratio_cap, clip_high)
    return clipped(token_ratio(anchor), 1 - clip_low, 1 + clip_high, dual_clip=dual_clip, ratio_cap=ratio_cap)


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """PPO clip of the ratio to the behaviour policy (or to the proximal one).

    `ratio_cap` is TRL's `delta`, which also bounds the unclipped side.

    Source: arXiv 1707.06347 eq. 7; verl 0.9.1 compute_policy_loss_vanilla.
    """
    policy, needs = anchored(anchor)
    return Corrector(
        name="ppo",
        needs=needs,
        surrogate=ppo_clip(policy, clip_low, clip_high, dual_clip, ratio_cap),
        reduction=reduction,
        horizon=horizon,
    )


def dual_clip_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """PPO clip whose loss on tokens to be discouraged is bounded too, at dual_clip |A|; what verl calls vanilla.

    Source: arXiv 1912.09729 eq. 5; verl 0.9.1 compute_policy_loss_vanilla.
    """
    clipping = ppo(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        anchor=anchor,
        reduction=reduction,
        horizon=horizon,
    )
    return replace(clipping, name="dual_clip_ppo")


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """DAPO's clip-higher: PPO clip with a wider upper bound and a token mean.

    Source: arXiv 2503.14476 eq. 8; verl 0.9.1 compute_policy_loss_vanilla.
    """
    clipping = ppo(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        anchor=anchor,
        reduction=reduction,
        horizon=horizon,
    )
    return replace(clipping, name="dapo")


def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    level: Level = "token",
    cap: float = 5.0,
    cap_action: Action = "mask",
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """Decoupled PPO: clip against the proximal policy, weighted by proximal / behaviour with a cap.

    `level="geometric"` is what areal's `level="sequence"` with `metric="ratio"` computes.

    Source: arXiv 2110.00641, 2505.24298; areal 1.0.4 ppo_actor_loss_fn.
    """
    check.one_of("level", level, ("token", "sequence", "geometric"))
    check.one_of("cap_action", cap_action, ("mask", "clamp"))
    check.band(None, cap)
    proximal = logp_of("proximal")
    return Corrector(
        name="decoupled_ppo",
        needs=frozenset({Need.PROXIMAL}),
        surrogate=ppo_clip(proximal, clip_low, clip_high, dual_clip),
        treatments=(importance_weight(proximal, logp_of("behaviour"), level=level, cap=cap, action=cap_action),),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def a3po(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float = 5.0,
    cap_action: Action = "mask",
    lag_zero: Literal["behaviour", "learner"] = "behaviour",
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """Decoupled PPO whose proximal policy is interpolated from the lag, instead of being computed.

    Source: arXiv 2512.06547; areal 1.0.4 compute_prox_logp_approximations ("loglinear").
    """
    check.one_of("lag_zero", lag_zero, ("behaviour", "learner"))
    check.one_of("cap_action", cap_action, ("mask", "clamp"))
    check.band(None, cap)
    proximal = approximate_proximal(lag_zero)
    return Corrector(
        name="a3po",
        needs=frozenset({Need.LAG}),
        surrogate=ppo_clip(proximal, clip_low, clip_high, dual_clip),
        treatments=(importance_weight(proximal, logp_of("behaviour"), level="token", cap=cap, action=cap_action),),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: Literal["token", "direct"] = "token",
    anchor: Anchor = "behaviour",
    reduction: Reduction = "sequence_mean_token_mean",
    horizon: int | None = None,
) -> Corrector:
    """GSPO: PPO clip of the geometric mean ratio of a sequence, so that whole sequences are clipped.

    The default bounds are the paper's and tight: they suit `anchor="proximal"`; widen them for lagged data.

    Source: arXiv 2507.18071 section 5.1; verl 0.9.1 compute_policy_loss_gspo.
    """
    check.offsets(clip_low, clip_high)
    check.one_of("form", form, ("token", "direct"))
    policy, needs = anchored(anchor)
    return Corrector(
        name="gspo",
        needs=needs,
        surrogate=clipped(geometric_ratio(policy, form), 1 - clip_low, 1 + clip_high),
        reduction=reduction,
        horizon=horizon,
    )


def gmpo(
    *,
    log_cap: float = 0.4,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "sequence_mean_token_mean",
    horizon: int | None = None,
) -> Corrector:
    """GMPO: geometric mean of token ratios, each clipped in log space on the side the advantage pushes to.

    Source: arXiv 2507.20673; callsys/GMPO train_zero_math_gmpo.py; verl 0.9.1 compute_policy_loss_geo_mean.
    """
    check.positive(log_cap=log_cap)
    policy, needs = anchored(anchor)
    return Corrector(
        name="gmpo",
        needs=needs,
        surrogate=geometric_mean(policy, log_cap),
        reduction=reduction,
        horizon=horizon,
    )


def sapo(
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "sequence_mean_token_mean",
    horizon: int | None = None,
) -> Corrector:
    """SAPO: a sigmoid gate on the ratio instead of a clip.

    Source: arXiv 2511.20347; verl 0.9.1 compute_policy_loss_sapo.
    """
    check.positive(tau_positive=tau_positive, tau_negative=tau_negative)
    policy, needs = anchored(anchor)
    return Corrector(
        name="sapo",
        needs=needs,
        surrogate=smooth_gate(token_ratio(policy), tau_positive, tau_negative),
        reduction=reduction,
        horizon=horizon,
    )


def aspo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 3.0,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """ASPO: tokens to be reinforced are weighted by the inverse ratio.

    One pair of bounds; the authors' second pair for high-entropy tokens needs entropies and is not here.

    Source: arXiv 2510.06062; wizard-III/Archer2.0 compute_policy_loss_archer.
    """
    check.offsets(clip_low, clip_high)
    check.above_one(weight_cap=weight_cap)
    policy, needs = anchored(anchor)
    return Corrector(
        name="aspo",
        needs=needs,
        surrogate=flipped(token_ratio(policy), clip_low, clip_high, weight_cap),
        reduction=reduction,
        horizon=horizon,
    )


def bapo(
    *,
    target: float = 1.0,
    lower_start: float = 0.6,
    lower_stop: float = 0.8,
    upper_start: float = 1.2,
    upper_stop: float = 2.0,
    bound_step: float = 0.05,
    dual_clip: float | None = 3.0,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """BAPO: PPO clip whose bounds are searched for each batch, until positive tokens weigh enough.

    Bounds are ratios, not offsets; the search sees the whole batch, the authors' each micro-batch.

    Source: arXiv 2510.18927 algorithm 1; WooooDyy/BAPO recipe/bapo/policy_loss.py.
    """
    check.positive(target=target, bound_step=bound_step)
    check.dual(dual_clip)
    check.ordered(0.0, ("lower_start", lower_start), ("lower_stop", lower_stop))
    check.at_most_one(lower_stop=lower_stop)
    check.ordered(1.0, ("upper_start", upper_start), ("upper_stop", upper_stop))
    check.positive(upper_stop=upper_stop)
    policy, needs = anchored(anchor)
    ratio = token_ratio(policy)
    return Corrector(
        name="bapo",
        needs=needs,
        surrogate=clipped(ratio, lower_start, upper_start, dual_clip=dual_clip),
        adapt=balanced_clip(
            ratio,
            target=target,
            lower=(lower_start, lower_stop),
            upper=(upper_start, upper_stop),
            step=bound_step,
            dual_clip=dual_clip,
        ),
        reduction=reduction,
        horizon=horizon,
    )
