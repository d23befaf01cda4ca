"""Group-relative advantages: each completion against the other completions of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farl.core.types import Group

_STD_EPS = 1e-4


def group_advantages(groups: Sequence[Group], *, divide_by_std: bool) -> tuple[Tensor, int, int]:
    """Advantages of all rollouts, group after group.

        A_i = (r_i - mean r) / (std r + 1e-4)        std with n - 1; without the division for Dr. GRPO

    A group whose rewards are all equal has advantage 0. A group in which a reward function failed is left
    out of learning: advantage 0 as well.

    Args:
        groups: groups with their rewards.
        divide_by_std: whether to normalise the scale.

    Returns:
        float32 [B], the number of groups with equal rewards, and the number left out.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv 2503.20783.
    """
    parts, num_equal, num_failed = [], 0, 0
    for group in groups:
        reward_G = torch.tensor([r.reward for r in group.rollouts], dtype=torch.float32)
        if group.num_reward_errors:
            num_failed += 1
            parts.append(torch.zeros_like(reward_G))
        elif bool((reward_G == reward_G[0]).all()):
            num_equal += 1
            parts.append(torch.zeros_like(reward_G))
        else:
            centred_G = reward_G - reward_G.mean()
            parts.append(centred_G / (reward_G.std() + _STD_EPS) if divide_by_std else centred_G)
    return torch.cat(parts), num_equal, num_failed
