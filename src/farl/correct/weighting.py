"""Correctors that multiply the gradient by a detached, bounded importance weight."""

from __future__ import annotations

from typing import Literal

from farl.correct import check
from farl.correct.adapt import StepScale, normalised_weight, variance_controlled
from farl.correct.base import Corrector, Need, SurrogateFunction
from farl.correct.clipping import Anchor, anchored, ppo_clip
from farl.correct.ratio import LogpFunction, balance_mixture, logp_of
from farl.correct.reduce import Reduction
from farl.correct.surrogate import policy_gradient
from farl.correct.treat import importance_weight, soft_sequence_weight, tapered_weight

Base = Literal["ppo", "policy_gradient"]

_OWN_BASELINE = "its own baseline takes the place of the given advantage"


def weighted_base(base: Base, clip_low: float, clip_high: float) -> tuple[SurrogateFunction, LogpFunction, Need | None]:
    """What a weight multiplies, and the weight's numerator: PPO on the proximal policy, or the plain gradient."""
    check.one_of("base", base, ("ppo", "policy_gradient"))
    if base == "ppo":
        return ppo_clip(logp_of("proximal"), clip_low, clip_high), logp_of("proximal"), Need.PROXIMAL
    return policy_gradient("score"), logp_of("learner"), None


def needed(need: Need | None) -> frozenset[Need]:
    """A set of one need, or of none."""
    return frozenset({need} if need is not None else ())


def none(
    *,
    form: Literal["ratio", "score"] = "ratio",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """Plain policy gradient: samples are taken as if the learner had drawn them.

    Source: torchforge simple_grpo_loss ("ratio"); verl 0.9.1 compute_policy_loss_gpg ("score").
    """
    check.one_of("form", form, ("ratio", "score"))
    return Corrector(
        name="none",
        needs=frozenset(),
        surrogate=policy_gradient(form),
        reduction=reduction,
        horizon=horizon,
        reads_behaviour=False,
        exempt=(("lost_log_probs", "never reads a behaviour log-prob, so that none can be lost"),),
    )


def tis(
    *,
    base: Base = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    floor: float | None = None,
    normalise: bool = False,
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """Truncated importance sampling: min(ratio, cap) times PPO on the proximal policy, or times plain gradient.

    `floor` bounds the weight from below too (OpenRLHF's "clip" mode: 0.5 to 5); `normalise` divides by the batch's
    mean weight (verl's `rollout_is_batch_normalize`).

    Source: fengyao.notion.site/off-policy-rl; verl 0.9.1 compute_rollout_correction_weights.
    """
    check.one_of("level", level, ("token", "sequence"))
    check.band(floor, cap)
    surrogate, numerator, need = weighted_base(base, clip_low, clip_high)
    behaviour = logp_of("behaviour")
    weight = importance_weight(numerator, behaviour, level=level, floor=floor, cap=cap)
    return Corrector(
        name="tis",
        needs=needed(need),
        surrogate=surrogate,
        treatments=() if normalise else (weight,),
        adapt=normalised_weight(numerator, behaviour, level=level, floor=floor, cap=cap) if normalise else None,
        reduction=reduction,
        horizon=horizon,
    )


def cispo(
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    bounds: Literal["offset", "absolute"] = "offset",
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """CISPO: the clipped ratio as a detached weight of the score function, so that every token keeps a gradient.

    Bounds are 1 - clip_low and 1 + clip_high (verl, slime, SkyRL, NeMo-RL); with `bounds="absolute"` the ratios
    clip_low and clip_high themselves (TRL, tinker). By default either way ScaleRL's [0, 5].

    Source: arXiv 2506.13585 eq. 4; defaults arXiv 2510.13786; verl 0.9.1 compute_policy_loss_cispo.
    """
    check.one_of("bounds", bounds, ("offset", "absolute"))
    if bounds == "offset":
        low, high = 1.0 if clip_low is None else clip_low, 4.0 if clip_high is None else clip_high
        check.offsets(low, high)
        floor, cap = 1 - low, 1 + high
    else:
        floor, cap = 0.0 if clip_low is None else clip_low, 5.0 if clip_high is None else clip_high
        check.ordered(0.0, ("clip_low", floor))
        check.at_most_one(clip_low=floor)
        check.ordered(1.0, ("clip_high", cap))
    policy, needs = anchored(anchor)
    return Corrector(
        name="cispo",
        needs=needs,
        surrogate=policy_gradient("score"),
        treatments=(importance_weight(logp_of("learner"), policy, level="token", floor=floor or None, cap=cap),),
        reduction=reduction,
        horizon=horizon,
    )


def topr(
    *,
    level: Literal["token", "sequence"] = "sequence",
    split: Literal["reward", "advantage"] = "reward",
    zero_is_positive: bool = False,
    reduction: Reduction = "sequence_mean_token_sum",
    horizon: int | None = None,
) -> Corrector:
    """TOPR: weight 1 for positive examples, the sequence ratio cut to [0, 1] for negative ones.

    A reward of exactly 0 is negative, as in ROLL and as rewards of 0 and 1 want it; `zero_is_positive=True` is the
    paper's reading, for rewards of -1 and 1. ROLL's token ratio is `level="token"`.

    Source: arXiv 2503.14286 eq. 8; ROLL agentic_actor_pg_worker.py _compute_topr_loss.
    """
    check.one_of("level", level, ("token", "sequence"))
    check.one_of("split", split, ("reward", "advantage"))
    return Corrector(
        name="topr",
        needs=needed(Need.REWARD if split == "reward" else None),
        surrogate=policy_gradient("score"),
        treatments=(tapered_weight(logp_of("behaviour"), level=level, split=split, zero_is_positive=zero_is_positive),),
        reduction=reduction,
        horizon=horizon,
    )


def vespo(
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """VESPO: a smooth weight of the sequence ratio X, exp(decay + power log X - decay X), by the sign of A.

    Source: arXiv 2602.10693; FloyedShen/VESPO compute_policy_loss_vespo; TRL 1.16 get_gamma_weights.
    """
    check.positive(
        power_positive=power_positive,
        decay_positive=decay_positive,
        power_negative=power_negative,
        decay_negative=decay_negative,
    )
    policy, needs = anchored(anchor)
    return Corrector(
        name="vespo",
        needs=needs,
        surrogate=policy_gradient("score"),
        treatments=(soft_sequence_weight(policy, (power_positive, decay_positive), (power_negative, decay_negative)),),
        reduction=reduction,
        horizon=horizon,
    )


def vcpo(
    *,
    cap: float = 8.0,
    base_ess_fraction: float = 1.0,
    step_scale: StepScale = "sqrt",
    baseline: Literal["optimal", "given"] = "optimal",
    divide_by_std: bool = False,
    reduction: Reduction = "sequence_mean_token_mean",
    horizon: int | None = None,
) -> Corrector:
    """VCPO: sequence-level truncated weight, step scaled by the effective sample size, minimum-variance baseline.

    `baseline="given"` keeps the advantages as they come and needs no gradient norms, which cost one more backward
    pass. Norms are of the plain log-prob; the authors' code multiplies the truncated weight in as well.

    Source: arXiv 2602.17616; mit-han-lab/vcpo recipe/fully_async_policy/staleness_utils.py.
    """
    check.band(None, cap)
    check.positive(base_ess_fraction=base_ess_fraction)
    if step_scale == "off" and base_ess_fraction != 1.0:
        check.only("base_ess_fraction", base_ess_fraction, "step_scale='sqrt' or 'linear'")
    check.one_of("step_scale", step_scale, ("sqrt", "linear", "off"))
    check.one_of("baseline", baseline, ("optimal", "given"))
    if baseline == "given":
        check.only("divide_by_std", divide_by_std or None, "baseline='optimal'")
    behaviour, optimal = logp_of("behaviour"), baseline == "optimal"
    surrogate = policy_gradient("ratio")
    return Corrector(
        name="vcpo",
        needs=frozenset({Need.REWARD, Need.GROUP, Need.GRADIENT_NORM} if optimal else ()),
        surrogate=surrogate,
        treatments=(importance_weight(logp_of("learner"), behaviour, level="sequence", cap=cap),),
        adapt=variance_controlled(
            surrogate,
            behaviour,
            base_ess_fraction=base_ess_fraction,
            step_scale=step_scale,
            optimal=optimal,
            divide_by_std=divide_by_std,
        ),
        reduction=reduction,
        horizon=horizon,
        exempt=(("on_policy", _OWN_BASELINE), ("weight", _OWN_BASELINE)) if optimal else (),
    )


def matched_replay(
    *,
    heuristic: Literal["balance", "own"] = "balance",
    level: Literal["token", "sequence"] = "token",
    cap: float = 2.0,
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """Multiple importance sampling over the behaviour policies of a batch drawn from a replay buffer.

    "balance" weights by learner / mixture of all policies in the batch, "own" by learner / the policy that drew the
    sequence; both cut at `cap`. Chosen samples and the mixture come from the replay buffer (`[replay]`).

    Source: Veach and Guibas, SIGGRAPH 1995 (balance heuristic); Elvira et al., arXiv 1511.03095; cap as in TIS.
    """
    check.one_of("heuristic", heuristic, ("balance", "own"))
    check.one_of("level", level, ("token", "sequence"))
    check.band(None, cap)
    balance = heuristic == "balance"
    denominator = balance_mixture(level) if balance else logp_of("behaviour")
    return Corrector(
        name="matched_replay",
        needs=needed(Need.SOURCES if balance else None),
        surrogate=policy_gradient("score"),
        treatments=(importance_weight(logp_of("learner"), denominator, level=level, cap=cap),),
        reduction=reduction,
        horizon=horizon,
    )
