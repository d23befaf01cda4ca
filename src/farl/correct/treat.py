"""Detached treatments: weights that multiply a token's loss, and masks that drop tokens.

Each factory returns a function from masked inputs to a `Treatment`; weights of a sequence come as [B, 1].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from farl.correct.base import LossInputs, Treatment, TreatmentFunction
from farl.correct.ratio import Level, LogpFunction, lengths, weight_of

Survivor = Literal["unit", "token", "one"]


def importance_weight(
    numerator: LogpFunction,
    denominator: LogpFunction,
    *,
    level: Level,
    floor: float | None = None,
    cap: float | None = None,
    action: Literal["clamp", "mask"] = "clamp",
    survivor: Survivor = "unit",
    inverse: bool = False,
    scale: Tensor | None = None,
) -> TreatmentFunction:
    """Weight by `x = numerator / denominator` of a unit, kept in a band.

        clamp   W = min(max(x, floor), cap)
        mask    W = x * 1[floor <= x <= cap]

    Args:
        numerator: "proximal" in decoupled objectives, else the learner.
        denominator: the policy that drew the token.
        level: unit of x.
        floor: lower end of the band, or None.
        cap: upper end of the band, or None.
        action: what happens outside the band.
        survivor: weight inside the band: x itself, the token's own ratio, or 1.
        inverse: the band is one of `denominator / numerator`.
        scale: factor of every weight, or None.
    """

    def treatment(inputs: LossInputs) -> Treatment:
        above_BT, below_BT = numerator(inputs), denominator(inputs)
        unit = weight_of(above_BT, below_BT, inputs.mask_BT, level)
        keep: Tensor | None = None
        if action == "clamp":
            weight = unit if floor is None and cap is None else unit.clamp(floor, cap)
        else:
            tested = 1 / unit if inverse else unit
            keep = _within(tested, floor, cap)
            weight = unit
            if survivor == "token" and level != "token":
                weight = weight_of(above_BT, below_BT, inputs.mask_BT, "token")
        if survivor == "one":
            return Treatment(None, keep)
        return Treatment(weight if scale is None else weight * scale, keep)

    return treatment


def _within(value: Tensor, floor: float | None, cap: float | None) -> Tensor | None:
    keep = None if floor is None else value >= floor
    if cap is not None:
        keep = value <= cap if keep is None else keep & (value <= cap)
    return keep


def total_variation_mask(anchor: LogpFunction, gap_low: float, gap_high: float) -> TreatmentFunction:
    """Drops tokens whose probability has already moved far in the direction of their advantage.

        A > 0:   drop if p_learner - p_anchor > gap_high
        A <= 0:  drop if p_learner - p_anchor < -gap_low

    Source: DPPO, arXiv 2602.04879; verl 0.9.1 `compute_policy_loss_dppo_tv`.
    """

    def treatment(inputs: LossInputs) -> Treatment:
        gap_BT = torch.exp(inputs.logp_learner_BT.detach()) - torch.exp(anchor(inputs))
        keep_BT = torch.where(inputs.advantage_BT > 0, gap_BT <= gap_high, gap_BT >= -gap_low)
        return Treatment(None, keep_BT)

    return treatment


def binary_kl_mask(anchor: LogpFunction, kl_low: float, kl_high: float) -> TreatmentFunction:
    """The same with the KL divergence of "this token or another" as the distance.

        k = q log(q / p) + (1 - q) log((1 - q) / (1 - p)),  q anchor, p learner
        A > 0: drop if k > kl_high and p > q;   A <= 0: drop if k > kl_low and p < q

    Source: DPPO, arXiv 2602.04879; verl 0.9.1 `compute_policy_loss_dppo_kl` (whose 1e-8 inside the logs is kept).
    """

    def treatment(inputs: LossInputs) -> Treatment:
        learner_BT, anchor_BT = inputs.logp_learner_BT.detach(), anchor(inputs)
        p_BT, q_BT = torch.exp(learner_BT), torch.exp(anchor_BT)
        kl_BT = q_BT * (anchor_BT - learner_BT) + (1 - q_BT) * torch.log((1 - q_BT + 1e-8) / (1 - p_BT + 1e-8))
        keep_BT = torch.where(
            inputs.advantage_BT > 0, (kl_BT <= kl_high) | (p_BT <= q_BT), (kl_BT <= kl_low) | (p_BT >= q_BT)
        )
        return Treatment(None, keep_BT)

    return treatment


def sequence_distance_mask(anchor: LogpFunction, delta: float) -> TreatmentFunction:
    """Drops sequences to be discouraged that the learner has already left.

        drop if A < 0 and mean_t (log anchor - log learner) > delta

    Source: DeepSeek-V3.2, arXiv 2512.02556 eq. 9; TRL 1.16 `get_off_policy_mask`; slime `compute_opsm_mask`.
    """

    def treatment(inputs: LossInputs) -> Treatment:
        distance_BT = anchor(inputs) - inputs.logp_learner_BT.detach()
        mean_B1 = distance_BT.sum(dim=1, keepdim=True) / lengths(inputs.mask_BT)
        return Treatment(None, (inputs.advantage_BT >= 0) | (mean_B1 <= delta))

    return treatment


def soft_sequence_weight(
    anchor: LogpFunction, positive: tuple[float, float], negative: tuple[float, float]
) -> TreatmentFunction:
    """A gamma-shaped weight of the sequence's importance ratio X: near 1 around X = 1, small far from it.

        phi(X) = exp(l + k log X - l X),  (k, l) by the sign of A        phi(1) = 1, peak at X = k / l

    Args:
        anchor: policy in the denominator of X.
        positive: (k, l) where A >= 0.
        negative: (k, l) where A < 0.

    Source: VESPO, arXiv 2602.10693 and its `compute_policy_loss_vespo`; TRL 1.16 `get_gamma_weights`.
    """

    def treatment(inputs: LossInputs) -> Treatment:
        ratio_B1 = weight_of(inputs.logp_learner_BT, anchor(inputs), inputs.mask_BT, "sequence")

        def phi(shape: tuple[float, float]) -> Tensor:
            return torch.exp(shape[1] + shape[0] * torch.log(ratio_B1) - shape[1] * ratio_B1)

        return Treatment(torch.where(inputs.advantage_BT >= 0, phi(positive), phi(negative)))

    return treatment


def tapered_weight(
    anchor: LogpFunction, *, level: Level, split: Literal["reward", "advantage"], zero_is_positive: bool
) -> TreatmentFunction:
    """Weight 1 for positive examples, the importance ratio cut to [0, 1] for negative ones.

    Args:
        anchor: policy in the denominator of the ratio.
        level: unit of the ratio.
        split: whose sign tells positive from negative.
        zero_is_positive: where a value of exactly 0 belongs.

    Source: TOPR, arXiv 2503.14286 eq. 8; ROLL `_compute_topr_loss`.
    """

    def treatment(inputs: LossInputs) -> Treatment:
        if split == "reward":
            assert inputs.reward_B is not None
            value = inputs.reward_B.unsqueeze(1)
        else:
            value = inputs.advantage_BT
        positive = value >= 0 if zero_is_positive else value > 0
        tapered = weight_of(inputs.logp_learner_BT, anchor(inputs), inputs.mask_BT, level).clamp(max=1.0)
        return Treatment(torch.where(positive, 1.0, tapered))

    return treatment


def below_second_moment(numerator: LogpFunction, denominator: LogpFunction, limit: Tensor) -> TreatmentFunction:
    """Drops tokens whose squared log-ratio is above a limit; see `adapt.second_moment_limit`."""

    def treatment(inputs: LossInputs) -> Treatment:
        return Treatment(None, (numerator(inputs).detach() - denominator(inputs)).square() < limit)

    return treatment
