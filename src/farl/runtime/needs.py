"""What correctors need beyond a plain forward pass: made here, only when it is listed in `Corrector.needs`.

Suffixes: B sequences, T completion positions, P groups, K behaviour policies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from farl.core.protocols import Policy
from farl.core.types import TrainBatch
from farl.correct import LossInputs
from farl.runtime.config import LoopConfig


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The data of one update, and what has been computed for it.

    Attributes:
        batch: padded tensors; replayed groups follow the fresh ones.
        num_fresh: leading groups that were not replayed.
        logp_proximal_BT: nats under the weights at the start of the batch; None lets the learner's own stand in,
            which is exact for the first update of a batch.
        logp_sources_BTK: nats under each behaviour policy in the batch, or None.
        log_share_BK: log of each policy's share of the sequences, or None.
    """

    batch: TrainBatch
    num_fresh: int
    logp_proximal_BT: Tensor | None = None
    logp_sources_BTK: Tensor | None = None
    log_share_BK: Tensor | None = None

    def loss_inputs(self, logp_learner_BT: Tensor, *, gradient_norm_B: Tensor | None = None) -> LossInputs:
        """What a corrector sees of the whole minibatch."""
        batch = self.batch
        return LossInputs(
            logp_learner_BT=logp_learner_BT,
            logp_behaviour_BT=batch.logp_behaviour_BT,
            logp_proximal_BT=logp_learner_BT.detach() if self.logp_proximal_BT is None else self.logp_proximal_BT,
            mask_BT=batch.mask_BT,
            advantage_BT=batch.advantage_BT,
            reward_B=batch.reward_B,
            group_B=batch.group_B,
            lag_BT=batch.lag_BT,
            gradient_norm_B=gradient_norm_B,
            logp_sources_BTK=self.logp_sources_BTK,
            log_share_BK=self.log_share_BK,
        )


def micro_slices(num_groups: int, micro_groups: int | None) -> Iterator[tuple[int, int]]:
    """Contiguous group ranges of at most `micro_groups` groups."""
    size = micro_groups or num_groups
    for start in range(0, num_groups, size):
        yield start, min(start + size, num_groups)


@torch.no_grad()
def evaluate_logp(policy: Policy, batch: TrainBatch, config: LoopConfig) -> Tensor:
    """Log-probs of a batch under the policy's present weights, without gradient, float32 [B, T].

    Larger batches than one update's go through in pieces of that size.
    """
    size = config.learner.micro_groups or config.groups_per_update
    parts = [
        policy.logp(batch.select_groups(a, b), temperature=config.rollout.temperature)
        for a, b in micro_slices(batch.num_prompts, size)
    ]
    return torch.cat(parts)


def gradient_norms(policy: Policy, batch: TrainBatch, config: LoopConfig) -> Tensor:
    """Norm of the gradient of each trajectory's log-prob with respect to the trained parameters, float32 [B].

    0 for groups without an advantage, from which nothing is learned. One forward and backward pass for each other
    sequence alone: the flops of one more update, in B small passes. On a small model the passes cost far more than
    their flops (tiny-addition: see `time/train_s` of vcpo in benchmarks/results/every_corrector.json).
    """
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    norms = []
    taught = _groups_with_advantage(batch)
    for b, group in enumerate(batch.group_B.tolist()):
        if group not in taught or not bool(batch.mask_BT[b].any()):
            norms.append(torch.zeros(()))
            continue
        single = _one_sequence(batch, b)
        logp_1T = policy.logp(single, temperature=config.rollout.temperature)
        total = torch.where(single.mask_BT, logp_1T, 0.0).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        norms.append(torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).detach().float())
    return torch.stack(norms)


def _groups_with_advantage(batch: TrainBatch) -> set[int]:
    return set(batch.group_B[(batch.advantage_BT != 0).any(dim=1)].tolist())


def _one_sequence(batch: TrainBatch, b: int) -> TrainBatch:
    group = int(batch.group_B[b])
    whole_group = batch.select_groups(group, group + 1)
    row = slice((first := b - int((batch.group_B < group).sum())), first + 1)
    width = max(int(batch.mask_BT[b].sum()), 1)
    return replace(
        whole_group,
        group_B=whole_group.group_B[row],
        completion_ids_BT=whole_group.completion_ids_BT[row, :width],
        mask_BT=whole_group.mask_BT[row, :width],
        logp_behaviour_BT=whole_group.logp_behaviour_BT[row, :width],
        advantage_BT=whole_group.advantage_BT[row, :width],
        reward_B=whole_group.reward_B[row],
        lag_BT=whole_group.lag_BT[row, :width],
        miss_BT=whole_group.miss_BT[row, :width],
    )


def source_logps(
    policy: Policy,
    batch: TrainBatch,
    source_P: Sequence[int],
    presented: Callable[[int], AbstractContextManager[None]],
    config: LoopConfig,
) -> tuple[Tensor, Tensor]:
    """Log-probs of every sequence under every behaviour policy of the batch.

    What a policy says of the sequences it drew itself is what its sampler reported; of the others it takes a forward
    pass. Shares count the sequences of groups that have an advantage, the only ones that are ever stored for replay:
    a policy's share is then of the samples that the gradient is made of.

    Args:
        policy: evaluates.
        batch: of groups from one or more policies; the groups of one policy stand together.
        source_P: which policy drew each group.
        presented: shows the weights of a source through the policy, inside a `with` block.
        config: temperature and micro-batches.

    Returns:
        Nats [B, T, K] and the log of each policy's share [B, K], newest policy first; policies without a share are
        not among the K, unless there is nothing else.
    """
    taught = _groups_with_advantage(batch) or set(range(batch.num_prompts))
    counts = Counter(source_P[p] for p in batch.group_B.tolist() if p in taught)
    sources = sorted(counts, reverse=True)
    columns = []
    for source in sources:
        column_BT = batch.logp_behaviour_BT.clone()
        if len(sources) > 1:
            with presented(source):
                for start, stop in _foreign_runs(source_P, source):
                    rows_B = (batch.group_B >= start) & (batch.group_B < stop)
                    column_BT[rows_B] = evaluate_logp(policy, batch.select_groups(start, stop), config)
        columns.append(column_BT)
    log_share_K = torch.tensor([math.log(counts[s] / counts.total()) for s in sources])
    return torch.stack(columns, dim=-1), log_share_K.expand(batch.num_sequences, len(sources))


def _foreign_runs(source_P: Sequence[int], source: int) -> Iterator[tuple[int, int]]:
    """Maximal ranges of groups that other policies drew."""
    start = 0
    for own, run in groupby(source_P, key=lambda s: s == source):
        length = len(list(run))
        if not own:
            yield start, start + length
        start += length
