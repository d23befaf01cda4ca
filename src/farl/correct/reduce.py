"""From token losses to a scalar, with the denominator passed in so that micro-batches add up exactly."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from farl.errors import ConfigError

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"]
Denominator = Literal["original", "kept"]

REDUCTIONS: tuple[Reduction, ...] = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)


def count_units(mask_BT: Tensor, reduction: Reduction, horizon: int | None) -> float:
    """Denominator of a whole batch; at least 1, so that an empty batch has loss 0.

        token_mean                    number of tokens
        sequence_mean_...             number of sequences with a token
        sequence_mean_token_sum_norm  the same times H, the horizon (padded length T if None)

    Source: verl 0.9.1 `core_algos.agg_loss`.
    """
    if reduction == "token_mean":
        return max(float(mask_BT.sum()), 1.0)
    count = max(float((mask_BT.sum(dim=1) > 0).sum()), 1.0)
    return count * (horizon or mask_BT.shape[1]) if reduction == "sequence_mean_token_sum_norm" else count


def reduce(token_loss_BT: Tensor, mask_BT: Tensor, reduction: Reduction, denominator: float) -> Tensor:
    """Sum of a micro-batch over the denominator of its batch.

    Args:
        token_loss_BT: 0 outside the mask.
        mask_BT: bool, the tokens that count.
        reduction: a name of `REDUCTIONS`.
        denominator: from `count_units` on the whole batch.

    Raises:
        ConfigError: for an unknown reduction.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
    if reduction == "sequence_mean_token_mean":
        length_B = mask_BT.sum(dim=1).clamp(min=1)
        return (token_loss_BT.sum(dim=1) / length_B).sum() / denominator
    return token_loss_BT.sum() / denominator
