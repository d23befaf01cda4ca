"""Correctors that drop tokens or sequences which are too far from the learner."""

from __future__ import annotations

from typing import Literal

from farl.correct import check
from farl.correct.adapt import second_moment
from farl.correct.base import Corrector, Need, SurrogateFunction
from farl.correct.clipping import Anchor, anchored, ppo_clip
from farl.correct.ratio import Level, logp_of, token_ratio
from farl.correct.reduce import Denominator, Reduction
from farl.correct.surrogate import importance, policy_gradient, pulled
from farl.correct.treat import (
    Survivor,
    binary_kl_mask,
    importance_weight,
    sequence_distance_mask,
    total_variation_mask,
)
from farl.correct.weighting import Base, needed, weighted_base


def mis(
    *,
    base: Base = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = "sequence",
    floor: float | None = None,
    cap: float = 3.0,
    survivor: Survivor = "unit",
    inverse: bool = False,
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """Masked importance sampling: units outside [floor, cap] are dropped, the others keep their weight.

    Defaults are TRL's. `level="geometric", survivor="token"` is NeMo-RL's and OpenRLHF's sequence mask;
    `survivor="one"` with `inverse=True` and `denominator="kept"` is verl's rejection sampling, whose bounds are
    those of behaviour / proximal.

    Source: richardli.xyz/rl-collapse; TRL 1.16 grpo_trainer.py; verl 0.9.1 compute_rollout_rejection_mask.
    """
    check.one_of("level", level, ("token", "sequence", "geometric"))
    check.one_of("survivor", survivor, ("unit", "token", "one"))
    check.band(floor, cap)
    surrogate, numerator, need = weighted_base(base, clip_low, clip_high)
    weight = importance_weight(
        numerator,
        logp_of("behaviour"),
        level=level,
        floor=floor,
        cap=cap,
        action="mask",
        survivor=survivor,
        inverse=inverse,
    )
    return Corrector(
        name="mis",
        needs=needed(need),
        surrogate=surrogate,
        treatments=(weight,),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def icepop(
    *,
    base: Base = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    floor: float = 0.5,
    cap: float = 5.0,
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """IcePop: tokens whose weight is outside [floor, cap] are dropped, the others keep it.

    Source: arXiv 2510.18855; verl 0.9.1 RolloutCorrectionConfig.decoupled_token_icepop; slime icepop_function.
    """
    check.band(floor, cap)
    surrogate, numerator, need = weighted_base(base, clip_low, clip_high)
    return Corrector(
        name="icepop",
        needs=needed(need),
        surrogate=surrogate,
        treatments=(
            importance_weight(numerator, logp_of("behaviour"), level="token", floor=floor, cap=cap, action="mask"),
        ),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def glm5(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """GLM-5 double-sided masking: the ratio learner / behaviour as a detached weight, dropped outside the band.

    Two policies only; the band is [1 - clip_low, 1 + clip_high].

    Source: arXiv 2602.15763; SkyRL 0.4.0 policy loss "rollout_is".
    """
    check.offsets(clip_low, clip_high)
    weight = importance_weight(
        logp_of("learner"),
        logp_of("behaviour"),
        level="token",
        floor=1 - clip_low,
        cap=1 + clip_high,
        action="mask",
    )
    return Corrector(
        name="glm5",
        needs=frozenset(),
        surrogate=policy_gradient("score"),
        treatments=(weight,),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def m2po(
    *,
    threshold: float = 0.04,
    statistic: Literal["learner", "proximal"] = "learner",
    clip_low: float | None = None,
    clip_high: float | None = None,
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """M2PO: drops the fewest tokens that bring the batch's mean squared log-ratio under a threshold.

    `statistic` names the policy compared with the behaviour policy; areal uses "proximal". Without clip bounds the
    objective is -A r, as the paper states it. The statistic is the whole batch's, not a micro-batch's.

    Source: arXiv 2510.01161; areal 1.0.4 _apply_m2po_masking.
    """
    check.positive(threshold=threshold)
    check.one_of("statistic", statistic, ("learner", "proximal"))
    behaviour = logp_of("behaviour")
    surrogate: SurrogateFunction = importance(token_ratio(behaviour))
    if clip_low is not None or clip_high is not None:
        surrogate = ppo_clip(
            behaviour,
            clip_low if clip_low is not None else 1.0,
            clip_high if clip_high is not None else float("inf"),
        )
    return Corrector(
        name="m2po",
        needs=needed(Need.PROXIMAL if statistic == "proximal" else None),
        surrogate=surrogate,
        adapt=second_moment(logp_of(statistic), behaviour, threshold),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def dppo(
    *,
    divergence: Literal["tv", "kl"] = "tv",
    gap_low: float | None = None,
    gap_high: float | None = None,
    form: Literal["ratio", "score"] = "ratio",
    ratio_cap: float | None = None,
    kl_penalty: float | None = None,
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """DPPO: drops tokens whose probability, not ratio, has moved too far the way their advantage points.

    Gaps are 0.2 of probability ("tv") or 0.05 nats of binary KL ("kl"). `form="ratio"` is prime-rl's base term, a
    differentiable untruncated ratio plus 1e-3 (log-ratio)^2 on every token; `form="score"` is verl's, the ratio cut
    at 3 as a detached weight.

    Source: arXiv 2602.04879; prime-rl default_loss_fn; verl 0.9.1 compute_policy_loss_dppo_tv, _kl.
    """
    check.one_of("divergence", divergence, ("tv", "kl"))
    check.one_of("form", form, ("ratio", "score"))
    default_gap = 0.2 if divergence == "tv" else 0.05
    low, high = (default_gap if gap is None else gap for gap in (gap_low, gap_high))
    check.positive(gap_low=low, gap_high=high)
    behaviour = logp_of("behaviour")
    mask = total_variation_mask if divergence == "tv" else binary_kl_mask
    treatments = [mask(behaviour, low, high)]
    if form == "ratio":
        check.only("ratio_cap", ratio_cap, "form='score'")
        check.not_negative(kl_penalty=kl_penalty)
        pull = 1e-3 if kl_penalty is None else kl_penalty
        if pull and denominator == "kept":  # dropped tokens have the penalty, so they must count
            check.only("denominator", denominator, "form='score' or kl_penalty=0")
        surrogate = importance(token_ratio(behaviour))
        surrogate = pulled(surrogate, behaviour, pull) if pull else surrogate
    else:
        check.only("kl_penalty", kl_penalty, "form='ratio'")
        cap = 3.0 if ratio_cap is None else ratio_cap
        check.above_one(ratio_cap=cap)
        surrogate = policy_gradient("score")
        treatments.append(importance_weight(logp_of("learner"), behaviour, level="token", cap=cap))
    return Corrector(
        name="dppo",
        needs=frozenset(),
        surrogate=surrogate,
        treatments=tuple(treatments),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )


def opsm(
    *,
    delta: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    denominator: Denominator = "original",
    horizon: int | None = None,
) -> Corrector:
    """Off-policy sequence masking: PPO without the sequences to be discouraged that the learner has already left.

    The distance is to the behaviour policy; `anchor` is PPO's. The paper gives no delta: 0.5 is TRL's example, slime's
    default is 1e-4.

    Source: DeepSeek-V3.2, arXiv 2512.02556 eq. 9; TRL 1.16 get_off_policy_mask; slime compute_opsm_mask.
    """
    check.not_negative(delta=delta)
    policy, needs = anchored(anchor)
    return Corrector(
        name="opsm",
        needs=needs,
        surrogate=ppo_clip(policy, clip_low, clip_high),
        treatments=(sequence_distance_mask(logp_of("behaviour"), delta),),
        reduction=reduction,
        denominator_rule=denominator,
        horizon=horizon,
    )
