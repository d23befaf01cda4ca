"""Differentiable per-token losses: the part of a corrector that carries the gradient."""

from __future__ import annotations

import torch

from farl.correct.base import LossInputs, Surrogate, SurrogateFunction
from farl.correct.ratio import ratio


def policy_gradient(form: str) -> SurrogateFunction:
    """Plain policy gradient, as if the learner had drawn the tokens.

        "ratio"   L = -exp(lp - sg(lp)) * A         value -A
        "score"   L = -A * lp                       value -A log pi

    Both have gradient `-A grad lp`. Source: torchforge `simple_grpo_loss`; verl 0.9.1 `compute_policy_loss_gpg`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        logp_BT = inputs.logp_learner_BT
        one_BT = torch.exp(logp_BT - logp_BT.detach())
        factor_BT = one_BT if form == "ratio" else logp_BT
        return Surrogate(-inputs.advantage_BT * factor_BT, torch.zeros_like(inputs.mask_BT), one_BT.detach())

    return surrogate


def clipped(anchor: str, clip_low: float, clip_high: float, dual_clip: float | None) -> SurrogateFunction:
    """PPO's pessimistic bound on the ratio to the anchor.

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        A < 0 and dual_clip c:  L = min(L, -c A)

    The gradient is 0 exactly where a bound is strictly the active branch; ties keep the gradient, so on-policy
    (r = 1) it is the plain policy gradient.

    Args:
        anchor: "behaviour" or "proximal", the policy in the ratio's denominator.
        clip_low: offset below 1.
        clip_high: offset above 1.
        dual_clip: c > 1, or None.

    Source: arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729; verl 0.9.1 `compute_policy_loss_vanilla`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        logp_anchor_BT = inputs.logp_proximal_BT if anchor == "proximal" else inputs.logp_behaviour_BT
        assert logp_anchor_BT is not None
        ratio_BT = ratio(inputs.logp_learner_BT, logp_anchor_BT)
        bound_BT = -inputs.advantage_BT * ratio_BT.detach().clamp(1 - clip_low, 1 + clip_high)
        loss_BT = -inputs.advantage_BT * ratio_BT
        clipped_BT = bound_BT > loss_BT
        loss_BT = torch.where(clipped_BT, bound_BT, loss_BT)
        if dual_clip is not None:
            ceiling_BT = -dual_clip * inputs.advantage_BT
            over_BT = (inputs.advantage_BT < 0) & (loss_BT > ceiling_BT)
            loss_BT = torch.where(over_BT, ceiling_BT, loss_BT)
            clipped_BT = clipped_BT | over_BT
        return Surrogate(loss_BT, clipped_BT, ratio_BT.detach())

    return surrogate
