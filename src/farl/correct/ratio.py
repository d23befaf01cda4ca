"""Ratios of policies: which two are compared, and over which unit.

A ratio names both ends, numerator first. Inputs are masked log-probs (0 outside the mask).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: any cap bites long before, and float32 squares of it are finite (verl 0.9.1 clamps the same)."""


def ratio(logp_numerator_BT: Tensor, logp_denominator_BT: Tensor) -> Tensor:
    """Token ratio `exp(clamp(log a - log b, -20, 20))`; differentiable in either argument that has a gradient."""
    return torch.exp((logp_numerator_BT - logp_denominator_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def weight_of(logp_numerator_BT: Tensor, logp_denominator_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """The same, detached, for each token or as one product for its whole sequence.

    token      x_t
    sequence   X = exp(sum_t log x_t), the same for every token of the sequence
    """
    log_BT = (logp_numerator_BT - logp_denominator_BT).detach()
    if level == "sequence":
        log_BT = (log_BT * mask_BT).sum(dim=1, keepdim=True).expand_as(log_BT)
    return torch.exp(log_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
