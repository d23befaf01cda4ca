"""Groups that have been generated and not yet consumed, in dispatch order, each exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farl.core.types import Group
from farl.errors import StateError


def admits(group_id: int, *, num_consumed: int, waiting: Sequence[int]) -> bool:
    """Whether a group may enter: it was not consumed before and is not waiting already.

    Batches are consumed in dispatch order, so the consumed groups are those below `num_consumed`.
    """
    return group_id >= num_consumed and group_id not in waiting


class GroupBuffer:
    """Holds groups until their whole batch is there.

    Args:
        groups_per_batch: P.
    """

    def __init__(self, groups_per_batch: int) -> None:
        self._groups_per_batch = groups_per_batch
        self._waiting: dict[int, Group] = {}
        self._num_consumed = 0
        self.num_duplicates = 0

    @property
    def num_consumed(self) -> int:
        """Groups handed out so far; each group id below it was trained on exactly once."""
        return self._num_consumed

    def add(self, group: Group) -> bool:
        """Takes a group in; returns False, and counts it, if it was there before.

        Raises:
            StateError: if its rollouts were drawn from more than one policy.
        """
        stamps = {r.stamp for r in group.rollouts}
        if len(stamps) > 1:
            raise StateError(
                f"group {group.group_id}: its rollouts carry {len(stamps)} policy stamps; one frozen policy must draw "
                "the whole group"
            )
        if not admits(group.group_id, num_consumed=self._num_consumed, waiting=list(self._waiting)):
            self.num_duplicates += 1
            return False
        self._waiting[group.group_id] = group
        return True

    def take(self, batch: int) -> list[Group] | None:
        """The groups of batch n in order, or None while some are missing.

        Raises:
            StateError: if n is not the next batch.
        """
        first = batch * self._groups_per_batch
        if first != self._num_consumed:
            raise StateError(f"batch={batch}: the next is {self._num_consumed // self._groups_per_batch}")
        ids = range(first, first + self._groups_per_batch)
        if any(i not in self._waiting for i in ids):
            return None
        self._num_consumed += self._groups_per_batch
        return [self._waiting.pop(i) for i in ids]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `restore` inverts it exactly."""
        return {
            "num_consumed": self._num_consumed,
            "num_duplicates": self.num_duplicates,
            "waiting": [g.to_json() for _, g in sorted(self._waiting.items())],
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Inverse of `to_json`."""
        self._num_consumed = data["num_consumed"]
        self.num_duplicates = data["num_duplicates"]
        self._waiting = {g["group_id"]: Group.from_json(g) for g in data["waiting"]}
