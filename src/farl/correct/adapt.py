"""Statistics of a whole batch that some correctors are tuned to. All without gradient, on masked inputs.

What changes from batch to batch reaches the parts as tensors, so that a compiled corrector is compiled once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from farl.correct.base import Adaptation, LossInputs, SurrogateFunction
from farl.correct.ratio import LogpFunction, RatioFunction, weight_of
from farl.correct.surrogate import clipped, with_advantage
from farl.correct.treat import below_second_moment, importance_weight
from farl.errors import ShapeError

AdaptFunction = Callable[[LossInputs], Adaptation]
StepScale = Literal["sqrt", "linear", "off"]


def second_moment_limit(square_N: Tensor, threshold: float) -> float:
    """The limit below which squared log-ratios are kept, so that the mean of those kept is under the threshold.

    Drops the fewest, largest first. Lies half way between the largest kept and the smallest dropped, so that rounding
    differences between two evaluations of the same batch move no token across it; equal values share one fate. If not
    even the smallest fits, all are dropped.

    Args:
        square_N: squared log-ratios of the batch's tokens.
        threshold: tau_M2.

    Source: M2PO, arXiv 2510.01161; areal 1.0.4 `_get_m2po_loss_mask`, which keeps one token where we keep none.
    """
    if square_N.numel() == 0:
        return math.inf
    ordered_N = square_N.double().sort().values
    mean_N = ordered_N.cumsum(0) / torch.arange(1, len(ordered_N) + 1, device=ordered_N.device)
    num_kept = int((mean_N < threshold).sum())
    if num_kept == len(ordered_N):
        return math.inf
    dropped = float(ordered_N[num_kept])
    kept_N = ordered_N[:num_kept][ordered_N[:num_kept] < dropped]
    return (float(kept_N[-1]) + dropped) / 2 if len(kept_N) else dropped


def second_moment(numerator: LogpFunction, denominator: LogpFunction, threshold: float) -> AdaptFunction:
    """M2PO: masks the batch's tokens with the largest squared log-ratios."""

    def adapt(inputs: LossInputs) -> Adaptation:
        square_BT = (numerator(inputs) - denominator(inputs)).square()
        limit = square_BT.new_tensor(second_moment_limit(square_BT[inputs.mask_BT], threshold))
        return Adaptation(treatments=(below_second_moment(numerator, denominator, limit),))

    return adapt


def balanced_bounds(
    ratio_N: Tensor,
    advantage_N: Tensor,
    *,
    target: float,
    lower: tuple[float, float],
    upper: tuple[float, float],
    step: float,
) -> tuple[float, float]:
    """BAPO's clip bounds for a batch.

        P = sum over A > 0 of A min(r, upper),  N = sum over A < 0 of |A| max(r, lower)

    While P / N < target, `lower` goes up by `step` to the end of its range, then `upper` to the end of its own.
    Without negative tokens P / N is infinite and nothing moves.

    Source: arXiv 2510.18927 algorithm 1; WooooDyy/BAPO `policy_loss.py`.
    """
    positive_N, negative_N = advantage_N.clamp(min=0).double(), (-advantage_N).clamp(min=0).double()
    ratio_N = ratio_N.double()

    def satisfied(low: float, high: float) -> bool:
        total = float((positive_N * ratio_N.clamp(max=high)).sum())
        return total >= target * float((negative_N * ratio_N.clamp(min=low)).sum())

    def grid(ends: tuple[float, float]) -> list[float]:
        count = math.ceil((ends[1] - ends[0]) / step - 1e-9)
        return [min(ends[0] + i * step, ends[1]) for i in range(1, count + 1)]

    low, high = lower[0], upper[0]
    if satisfied(low, high):
        return low, high
    for low in grid(lower):
        if satisfied(low, high):
            return low, high
    for high in grid(upper):
        if satisfied(low, high):
            break
    return low, high


def balanced_clip(
    ratio: RatioFunction,
    *,
    target: float,
    lower: tuple[float, float],
    upper: tuple[float, float],
    step: float,
    dual_clip: float | None,
) -> AdaptFunction:
    """BAPO: PPO clip with the bounds that `balanced_bounds` finds in the batch."""

    def adapt(inputs: LossInputs) -> Adaptation:
        low, high = balanced_bounds(
            ratio(inputs)[inputs.mask_BT],
            inputs.advantage_BT[inputs.mask_BT],
            target=target,
            lower=lower,
            upper=upper,
            step=step,
        )
        bounds = inputs.advantage_BT.new_tensor([low, high])
        return Adaptation(surrogate=clipped(ratio, bounds[0], bounds[1], dual_clip=dual_clip))

    return adapt


def ess_fraction(weight_B: Tensor) -> float:
    """Kish's effective sample size over the number of samples, `(sum w)^2 / (B sum w^2)`; 1 for none."""
    if weight_B.numel() == 0:
        return 1.0
    weight_B = weight_B.double()
    return float(weight_B.sum() ** 2 / (weight_B.square().sum() * len(weight_B)).clamp(min=1e-300))


def optimal_baseline(
    weight_B: Tensor, gradient_norm_B: Tensor, reward_B: Tensor, group_B: Tensor, num_groups: int
) -> Tensor:
    """The baseline of each group that minimises the variance of its off-policy gradient; [P].

        b = sum_i X_i^2 |g_i|^2 R_i / sum_i X_i^2 |g_i|^2        the plain mean if all weights are 0

    Source: OPOB, arXiv 2602.17616; mit-han-lab/vcpo `compute_opob_baseline`.
    """
    share_B = (weight_B.double() * gradient_norm_B.double()).square()
    total_P = _group_sum(share_B, group_B, num_groups)
    mean_P = _group_mean(reward_B, group_B, num_groups)
    weighted_P = _group_sum(share_B * reward_B, group_B, num_groups) / torch.where(total_P > 0, total_P, 1.0)
    return torch.where(total_P > 0, weighted_P, mean_P)


def _group_sum(value_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    zero_P = torch.zeros(num_groups, dtype=torch.float64, device=value_B.device)
    return zero_P.index_add_(0, group_B, value_B.double())


def _group_mean(value_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    count_P = _group_sum(torch.ones_like(value_B), group_B, num_groups)
    return _group_sum(value_B, group_B, num_groups) / count_P.clamp(min=1)


def _group_deviation(reward_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    """Population deviation of each group's rewards, [P]; the authors' choice of n, not n - 1."""
    centred_B = reward_B.double() - _group_mean(reward_B, group_B, num_groups)[group_B]
    return _group_mean(centred_B.square(), group_B, num_groups).sqrt() + 1e-8


def _count_groups(group_B: Tensor) -> int:
    """P, from ids that count from 0.

    Raises:
        ShapeError: for other ids.
    """
    if not len(group_B):
        return 0
    lowest, highest = int(group_B.min()), int(group_B.max())
    if lowest < 0 or highest >= len(group_B):
        raise ShapeError(
            f"group_B: ids from {lowest} to {highest}, must be from 0 and below B={len(group_B)}; "
            "use torch.unique(ids, return_inverse=True)[1]"
        )
    return highest + 1


def variance_controlled(
    surrogate: SurrogateFunction,
    anchor: LogpFunction,
    *,
    base_ess_fraction: float,
    step_scale: StepScale,
    optimal: bool,
    divide_by_std: bool,
) -> AdaptFunction:
    """VCPO: a shorter step where the batch's effective sample size is small, and the minimum-variance baseline.

    step_scale = min(1, (ESS / B) / base_ess_fraction) ^ (1/2 for "sqrt", 1 for "linear")

    Source: arXiv 2602.17616; mit-han-lab/vcpo `compute_global_ess_ratio`.
    """

    def adapt(inputs: LossInputs) -> Adaptation:
        present_B = inputs.mask_BT.any(dim=1)
        weight_B = weight_of(inputs.logp_learner_BT, anchor(inputs), inputs.mask_BT, "sequence").squeeze(1)[present_B]
        relative = min(1.0, ess_fraction(weight_B) / base_ess_fraction)
        scale = {"sqrt": math.sqrt(relative), "linear": relative, "off": 1.0}[step_scale]
        if not optimal:
            return Adaptation(step_scale=scale)
        assert inputs.gradient_norm_B is not None
        assert inputs.reward_B is not None
        assert inputs.group_B is not None
        num_groups = _count_groups(inputs.group_B)
        norm_B, reward_B, group_B = (x[present_B] for x in (inputs.gradient_norm_B, inputs.reward_B, inputs.group_B))
        baseline_P = optimal_baseline(weight_B, norm_B, reward_B, group_B, num_groups)
        scale_P = _group_deviation(reward_B, group_B, num_groups) if divide_by_std else torch.ones_like(baseline_P)
        # a group whose given advantages are all 0 was left out, and stays out
        in_use_P = _group_sum((inputs.advantage_BT != 0).any(dim=1), inputs.group_B, num_groups) > 0
        return Adaptation(surrogate=with_advantage(surrogate, baseline_P, scale_P, in_use_P), step_scale=scale)

    return adapt


def normalised_weight(
    numerator: LogpFunction,
    denominator: LogpFunction,
    *,
    level: Literal["token", "sequence"],
    floor: float | None,
    cap: float | None,
) -> AdaptFunction:
    """The truncated weight divided by its mean over the batch, taken after truncation: over tokens, or sequences.

    Source: verl 0.9.1 `rollout_is_batch_normalize`.
    """

    def adapt(inputs: LossInputs) -> Adaptation:
        weight = weight_of(numerator(inputs), denominator(inputs), inputs.mask_BT, level).clamp(floor, cap)
        counted = inputs.mask_BT if level == "token" else inputs.mask_BT.any(dim=1, keepdim=True)
        mean = float(weight[counted].double().mean()) if bool(counted.any()) else 1.0
        scale = weight.new_tensor(1 / max(mean, 1e-8))
        return Adaptation(
            treatments=(importance_weight(numerator, denominator, level=level, floor=floor, cap=cap, scale=scale),)
        )

    return adapt
