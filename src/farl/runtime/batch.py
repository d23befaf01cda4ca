"""From groups of rollouts to one padded training batch, with lag and miss measured per trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farl.core.types import Group, TrainBatch


def make_batch(groups: Sequence[Group], advantage_B: Tensor, *, version: int, pad_id: int) -> TrainBatch:
    """Pads prompts on the left and completions on the right.

    Args:
        groups: at least one group, each with at least one rollout.
        advantage_B: float32 [B], in the order of the rollouts.
        version: learner version now, from which lag and miss count.
        pad_id: token id to pad with.

    Returns:
        The batch; `lag = version - base_version`, `miss = version - target_version` of each stamp.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    width = max(max(len(r.ids) for r in rollouts), 1)
    prompt_width = max(len(g.prompt_ids) for g in groups)
    prompt_ids_PL = torch.full((len(groups), prompt_width), pad_id, dtype=torch.int64)
    prompt_mask_PL = torch.zeros(len(groups), prompt_width, dtype=torch.bool)
    for p, group in enumerate(groups):
        prompt_ids_PL[p, prompt_width - len(group.prompt_ids) :] = torch.tensor(group.prompt_ids)
        prompt_mask_PL[p, prompt_width - len(group.prompt_ids) :] = True
    shape = (len(rollouts), width)
    ids_BT = torch.full(shape, pad_id, dtype=torch.int64)
    mask_BT = torch.zeros(shape, dtype=torch.bool)
    logp_BT = torch.zeros(shape)
    for b, rollout in enumerate(rollouts):
        length = len(rollout.ids)
        ids_BT[b, :length] = torch.tensor(rollout.ids, dtype=torch.int64)
        mask_BT[b, :length] = True
        logp_BT[b, :length] = torch.tensor(rollout.logp_behaviour)
    base_B = torch.tensor([r.stamp.base_version for r in rollouts])
    target_B = torch.tensor([float(r.stamp.target_version) for r in rollouts])
    return TrainBatch(
        prompt_ids_PL=prompt_ids_PL,
        prompt_mask_PL=prompt_mask_PL,
        group_B=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.rollouts) for g in groups])),
        completion_ids_BT=ids_BT,
        mask_BT=mask_BT,
        logp_behaviour_BT=logp_BT,
        advantage_BT=advantage_B.unsqueeze(1) * mask_BT,
        reward_B=torch.tensor([r.reward for r in rollouts]),
        lag_BT=(version - base_B).unsqueeze(1).expand(shape),
        miss_BT=(version - target_B).unsqueeze(1).expand(shape),
    )
