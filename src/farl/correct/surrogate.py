"""Differentiable per-token losses: the part of a corrector that carries the gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from farl.correct.base import LossInputs, Surrogate, SurrogateFunction
from farl.correct.ratio import LogpFunction, RatioFunction, lengths, log_ratio


def filled(like_BT: Tensor, value: float) -> Tensor:
    """One value in the shape, dtype and device of a tensor, without its memory; read-only."""
    return like_BT.new_full((), value).expand_as(like_BT)


def policy_gradient(form: str) -> SurrogateFunction:
    """Plain policy gradient, as if the learner had drawn the tokens.

        "ratio"   L = -exp(lp - sg(lp)) * A         value -A
        "score"   L = -A * lp                       value -A log pi

    Both have gradient `-A grad lp`. Source: torchforge `simple_grpo_loss`; verl 0.9.1 `compute_policy_loss_gpg`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        logp_BT = inputs.logp_learner_BT
        factor_BT = torch.exp(logp_BT - logp_BT.detach()) if form == "ratio" else logp_BT
        return Surrogate(-inputs.advantage_BT * factor_BT, None, filled(inputs.advantage_BT, 1.0))

    return surrogate


def importance(ratio: RatioFunction) -> SurrogateFunction:
    """The unclipped importance-sampled objective, `L = -A r`, differentiable in r."""

    def surrogate(inputs: LossInputs) -> Surrogate:
        ratio_BT = ratio(inputs)
        return Surrogate(-inputs.advantage_BT * ratio_BT, None, ratio_BT.detach())

    return surrogate


def clipped(
    ratio: RatioFunction,
    lower: Tensor | float,
    upper: Tensor | float,
    *,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> SurrogateFunction:
    """PPO's pessimistic bound on a ratio.

        L = max(-A r, -A clip(r, lower, upper))
        A < 0 and dual_clip c:  L = min(L, -c A)
        ratio_cap d:            -A min(r, d) in the place of -A r

    The gradient is 0 exactly where a bound is strictly the active branch; ties keep the gradient, so on-policy
    (r = 1) it is the plain policy gradient.

    Args:
        ratio: differentiable.
        lower: bound of the ratio, `1 - clip_low` in the papers; a tensor if it changes from batch to batch.
        upper: bound of the ratio, `1 + clip_high` in the papers; both of one kind.
        dual_clip: c > 1, or None.
        ratio_cap: d > upper, or None.

    Source: arXiv 1707.06347 eq. 7; dual clip arXiv 1912.09729; ratio cap ("two-sided clip") arXiv 2505.07291 and
    TRL 1.16 `delta`; verl 0.9.1 `compute_policy_loss_vanilla`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        ratio_BT = ratio(inputs)
        cost_BT = -inputs.advantage_BT
        bound_BT = cost_BT * torch.clamp(ratio_BT.detach(), lower, upper)  # type: ignore[arg-type]
        loss_BT = cost_BT * ratio_BT
        clipped_BT = bound_BT > loss_BT
        loss_BT = torch.where(clipped_BT, bound_BT, loss_BT)
        ceiling = min(dual_clip or float("inf"), ratio_cap or float("inf"))
        if ceiling != float("inf"):
            ceiling_BT = ceiling * cost_BT
            over_BT = (cost_BT > 0) & (loss_BT > ceiling_BT)
            loss_BT = torch.where(over_BT, ceiling_BT, loss_BT)
            clipped_BT = clipped_BT | over_BT
        return Surrogate(loss_BT, clipped_BT, ratio_BT.detach())

    return surrogate


def smooth_gate(ratio: RatioFunction, tau_positive: float, tau_negative: float) -> SurrogateFunction:
    """SAPO: a sigmoid instead of a clip.

        L = -A f(r),  f(r) = (4 / tau) sigmoid(tau (r - 1)),  tau by the sign of A

    df/dr is 1 at r = 1 and decays to both sides, so no token's gradient is ever exactly 0. Its value at r = 1 is
    2 / tau, not 1.

    Source: arXiv 2511.20347; verl 0.9.1 `compute_policy_loss_sapo`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        ratio_BT = ratio(inputs)
        # 1 where A > 0, else 0: arithmetic, because selecting by a bool tensor costs five times as much on a CPU
        positive_BT = torch.sign(inputs.advantage_BT).clamp_(min=0)
        tau_BT = positive_BT.mul_(tau_positive - tau_negative).add_(tau_negative)
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
        own_BT = gate_BT.detach()
        return Surrogate(
            gate_BT * torch.div(inputs.advantage_BT, tau_BT).mul_(-4),
            None,
            torch.addcmul(own_BT, own_BT, own_BT, value=-1).mul_(ratio_BT.detach()).mul_(4),
        )

    return surrogate


def geometric_mean(anchor: LogpFunction, log_cap: float) -> SurrogateFunction:
    """GMPO: token log-ratios clipped on the side the advantage pushes to, then their geometric mean.

        z_t = min(l_t, log_cap) if A > 0, max(l_t, -log_cap) if A < 0,  l_t = log r_t
        L = -A exp(mean_t z_t)                         the same for every token of the sequence

    Clipped tokens have no gradient, the others share the sequence's factor.

    Source: arXiv 2507.20673; verl 0.9.1 `compute_policy_loss_geo_mean`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        log_BT = log_ratio(inputs.logp_learner_BT, anchor(inputs))
        sign_BT = torch.sign(inputs.advantage_BT)
        clipped_BT = sign_BT * log_BT.detach() > log_cap
        log_BT = torch.where(clipped_BT, sign_BT * log_cap, log_BT)
        mean_BT = torch.exp(log_BT.sum(dim=1, keepdim=True) / lengths(inputs.mask_BT)).expand_as(log_BT)
        return Surrogate(-inputs.advantage_BT * mean_BT, clipped_BT, mean_BT.detach())

    return surrogate


def flipped(ratio: RatioFunction, clip_low: float, clip_high: float, weight_cap: float) -> SurrogateFunction:
    """ASPO: tokens to be reinforced are weighted by 1 / r, so that those the learner has lost are learned most.

        A > 0: factor 1 / r, no gradient where r > 1 + clip_high
        A < 0: factor r, no gradient where r < 1 - clip_low
        factors above weight_cap are cut to it, and keep their gradient

    Source: arXiv 2510.06062; Archer2.0 `compute_policy_loss_archer`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        ratio_BT = ratio(inputs)
        own_BT = ratio_BT.detach()
        positive_BT = inputs.advantage_BT > 0
        factor_BT = torch.where(positive_BT, 1 / own_BT, own_BT)
        clipped_BT = torch.where(positive_BT, own_BT > 1 + clip_high, own_BT < 1 - clip_low)
        bound_BT = torch.where(positive_BT, own_BT.new_tensor(1 / (1 + clip_high)), 1 - clip_low)
        factor_BT = factor_BT.clamp(max=weight_cap)
        live_BT = factor_BT * torch.exp(inputs.logp_learner_BT - inputs.logp_learner_BT.detach())
        loss_BT = -inputs.advantage_BT * torch.where(clipped_BT, bound_BT, live_BT)
        return Surrogate(loss_BT, clipped_BT & (inputs.advantage_BT != 0), factor_BT)

    return surrogate


def mirror_descent(anchor: LogpFunction, tau: float) -> SurrogateFunction:
    """Policy mirror descent as a regression of each response's advantage on its log-ratio.

        L_i = (A_i - tau S_i)^2,  S_i = sum_t (lp - lp_anchor)        1 / length of it on each token
            = A^2 - 2 tau A S + tau^2 S^2

    The middle term is 2 tau times the score-form policy gradient; the last is a penalty that pulls to the anchor.

    Source: Kimi k1.5, arXiv 2501.12599 eq. 3; with the group mean as the log-normaliser ("PMD-mean"), arXiv 2602.05933.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        log_BT = inputs.logp_learner_BT - anchor(inputs)
        length_B1 = lengths(inputs.mask_BT)
        total_B1 = log_BT.sum(dim=1, keepdim=True)
        penalty_BT = inputs.mask_BT * ((tau * total_B1) ** 2 + inputs.advantage_BT**2) / length_B1
        factor_BT = filled(inputs.advantage_BT, 2 * tau)
        return Surrogate(-2 * tau * inputs.advantage_BT * log_BT, None, factor_BT, penalty_BT)

    return surrogate


def pulled(base: SurrogateFunction, anchor: LogpFunction, coefficient: float) -> SurrogateFunction:
    """Adds `coefficient (lp - lp_anchor)^2` on every token, dropped ones too.

    Source: the KL term of prime-rl `default_loss_fn`; with coefficient beta / 2 and the score form, verl 0.9.1
    `compute_policy_loss_dro`; with tau / 2, ROLL `_compute_kimi15_loss`.
    """

    def surrogate(inputs: LossInputs) -> Surrogate:
        plain = base(inputs)
        log_BT = inputs.logp_learner_BT - anchor(inputs)
        penalty_BT = coefficient * log_BT * log_BT
        return Surrogate(plain.loss_BT, plain.clipped_BT, plain.factor_BT, penalty_BT)

    return surrogate


def with_advantage(base: SurrogateFunction, baseline_P: Tensor, scale_P: Tensor, in_use_P: Tensor) -> SurrogateFunction:
    """The base surrogate on `(reward - baseline) / scale` of each sequence's group; other groups stay out."""

    def surrogate(inputs: LossInputs) -> Surrogate:
        assert inputs.reward_B is not None
        assert inputs.group_B is not None
        advantage_B = (inputs.reward_B - baseline_P[inputs.group_B]) / scale_P[inputs.group_B]
        in_use_BT = inputs.mask_BT & in_use_P[inputs.group_B].unsqueeze(1)
        advantage_BT = torch.where(in_use_BT, advantage_B.unsqueeze(1).to(inputs.advantage_BT.dtype), 0.0)
        return base(replace(inputs, advantage_BT=advantage_BT))

    return surrogate
