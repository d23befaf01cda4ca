"""Distribution-matched replay: groups of recent behaviour policies, kept apart, chosen by distance to the learner.

Each policy that drew a batch is a *source*, numbered by its batch. A source is used while the importance weights of
its tokens keep enough effective sample size; of the sources in use, the groups nearest to the learner come first. What
is made of the samples is the corrector's business: each carries the log-probs of its own sampler, and `matched_replay`
weights by the mixture of all sources (Veach and Guibas 1995; Elvira et al., arXiv 1511.03095). Keeping the samples of
past proposals with their densities is adaptive multiple importance sampling (Cornuet et al., arXiv 0907.1254).

Choosing by sampled ratios is itself a selection: groups with unlikely tokens are under-represented. The bound on a
group's variance is therefore a bias, as any mask is; `max_weight_variance` sets its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farl.core.types import Group, TrainBatch
from farl.runtime.config import ReplayConfig


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """A consumed group, its advantages as they were, and the batch whose policy drew it."""

    group: Group
    advantage: tuple[float, ...]
    source: int


@dataclass(frozen=True, kw_only=True)
class Distances:
    """How far stored groups are from the learner.

    Attributes:
        variance: mean over a group's tokens of `(r - 1)^2`, r = learner / behaviour, for each group.
        ess_fraction: effective sample size over sample size of all stored tokens of each source.
    """

    variance: tuple[float, ...]
    ess_fraction: dict[int, float]


def measure(batch: TrainBatch, logp_learner_BT: Tensor, source_P: Sequence[int]) -> Distances:
    """Distances of the groups of a batch to the learner.

    Args:
        batch: the stored groups, in order.
        logp_learner_BT: nats of their tokens under the learner.
        source_P: source of each group.
    """
    log_BT = logp_learner_BT.detach().double() - batch.logp_behaviour_BT.double()
    mask_BT = batch.mask_BT & torch.isfinite(log_BT)
    ratio_BT = torch.exp(torch.where(mask_BT, log_BT, 0.0).clamp(-20, 20))
    ess = {}
    for source in set(source_P):
        groups = torch.tensor([p for p, s in enumerate(source_P) if s == source])
        rows_B = torch.isin(batch.group_B, groups)
        weight_N = ratio_BT[rows_B][mask_BT[rows_B]]
        count = max(len(weight_N), 1)
        ess[source] = float(weight_N.sum() ** 2 / (weight_N.square().sum() * count).clamp(min=1e-300))
    variance = []
    for p in range(batch.num_prompts):
        rows_B = batch.group_B == p
        excess_N = ratio_BT[rows_B][mask_BT[rows_B]] - 1
        variance.append(float(excess_N.square().mean()) if len(excess_N) else math.inf)
    return Distances(variance=tuple(variance), ess_fraction=ess)


def choose(distances: Distances, source_P: Sequence[int], *, max_groups: int, config: ReplayConfig) -> list[int]:
    """Indices of the stored groups to replay, nearest first; ties go to the newer source, then to the earlier group.

    Args:
        distances: of all stored groups.
        source_P: source of each.
        max_groups: at most so many.
        config: bounds on the variance of a group and the effective sample size of a source.
    """
    usable = [
        p
        for p, source in enumerate(source_P)
        if distances.ess_fraction[source] >= config.min_ess_fraction
        and distances.variance[p] <= config.max_weight_variance
    ]
    return sorted(usable, key=lambda p: (distances.variance[p], -source_P[p], p))[:max_groups]


class ReplayBuffer:
    """Groups of the last sources, a bounded number of each.

    Args:
        num_sources: how many sources are kept; 0 keeps nothing.
        max_groups: of each source.
    """

    def __init__(self, num_sources: int, max_groups: int) -> None:
        self._num_sources = num_sources
        self._max_groups = max_groups
        self._stored: list[StoredGroup] = []

    @property
    def stored(self) -> Sequence[StoredGroup]:
        """Everything that may be replayed, oldest source first."""
        return tuple(self._stored)

    def add(self, source: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> None:
        """Takes in a consumed batch; groups that taught nothing are left out, the oldest source goes.

        Args:
            source: number of the batch.
            groups: in order.
            advantages: of each group's members.
        """
        if not self._num_sources:
            return
        taught = [(g, a) for g, a in zip(groups, advantages, strict=True) if any(x != 0.0 for x in a)]
        self._stored.extend(
            StoredGroup(group=group, advantage=tuple(advantage), source=source)
            for group, advantage in taught[: self._max_groups]
        )
        self._stored = [s for s in self._stored if s.source > source - self._num_sources]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain JSON types; `restore` inverts it exactly."""
        return [{"group": s.group.to_json(), "advantage": list(s.advantage), "source": s.source} for s in self._stored]

    def restore(self, data: Sequence[dict[str, Any]]) -> None:
        """Inverse of `to_json`."""
        self._stored = [
            StoredGroup(group=Group.from_json(d["group"]), advantage=tuple(d["advantage"]), source=d["source"])
            for d in data
        ]
