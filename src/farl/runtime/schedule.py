"""Arithmetic of the deterministic pipeline: pure functions of the config and a batch index.

Batch n is dispatched as soon as batch n - depth - 1 has been consumed, and batches are consumed in dispatch
order, so a run is a function of its config and seed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from farl.core.types import PolicyStamp
from farl.forecast import Horizon
from farl.runtime.config import AsyncConfig, RolloutConfig


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One unit of work for a rollout worker: some groups of one batch, from one published policy.

    Attributes:
        dispatch_id: position in dispatch order, unique in a run.
        batch: n, the batch it belongs to.
        group_ids: groups to generate; a group's id is also the index of its training problem.
        seeds: sampling seed of each group.
        publication: number of the published weights.
        stamp: what those weights are.
    """

    dispatch_id: int
    batch: int
    group_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    publication: int
    stamp: PolicyStamp

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        return {
            "dispatch_id": self.dispatch_id,
            "batch": self.batch,
            "group_ids": list(self.group_ids),
            "seeds": list(self.seeds),
            "publication": self.publication,
            "stamp": self.stamp.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Dispatch:
        """Inverse of `to_json`."""
        return cls(
            dispatch_id=data["dispatch_id"],
            batch=data["batch"],
            group_ids=tuple(data["group_ids"]),
            seeds=tuple(data["seeds"]),
            publication=data["publication"],
            stamp=PolicyStamp.from_json(data["stamp"]),
        )


def horizon_of(pipeline: AsyncConfig, batch: int) -> Horizon:
    """Updates from the dispatch of batch n to the aimed point, or points, of its consumption window.

    0 in a synchronous pipeline, whose policies are always exact. The first batches, dispatched together from
    version 0, have to wait for their turn: their horizon is shorter.
    """
    if pipeline.depth == 0:
        return 0
    start = min(batch, pipeline.depth) * pipeline.updates_per_batch
    if len(pipeline.aim_offsets) == 1:
        return start + pipeline.aim_offsets[0]
    return {start + offset: 1.0 for offset in pipeline.aim_offsets}


def sampling_seed(seed: int, group_id: int) -> int:
    """Seed of one group's generator: depends on the run's seed and the group alone."""
    digest = hashlib.blake2b(f"farl sampling {seed} {group_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def split_batch(
    *,
    batch: int,
    first_dispatch_id: int,
    rollout: RolloutConfig,
    num_workers: int,
    seed: int,
    publication: int,
    stamp: PolicyStamp,
) -> list[Dispatch]:
    """The dispatches of batch n, in order.

    Args:
        batch: n.
        first_dispatch_id: id of the first one.
        rollout: P, and how many groups go together.
        num_workers: workers to spread over when `groups_per_request` is None.
        seed: of the run.
        publication: number of the weights to use.
        stamp: their stamp.
    """
    size = rollout.groups_per_request or -(-rollout.prompts_per_batch // num_workers)
    first = batch * rollout.prompts_per_batch
    groups = range(first, first + rollout.prompts_per_batch)
    return [
        Dispatch(
            dispatch_id=first_dispatch_id + i,
            batch=batch,
            group_ids=tuple(groups[start : start + size]),
            seeds=tuple(sampling_seed(seed, g) for g in groups[start : start + size]),
            publication=publication,
            stamp=stamp,
        )
        for i, start in enumerate(range(0, len(groups), size))
    ]
