"""The transport of one process: for the inline launcher, and the fake in other people's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from farl.core.protocols import NamedTensors
from farl.core.types import PolicyStamp
from farl.errors import WireError
from farl.wire.layout import Layout


class InProcessTransport:
    """Keeps each publication in a buffer of its own.

    Args:
        layout: of the leaves.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._published: dict[int, tuple[PolicyStamp, Tensor]] = {}
        self._free: list[Tensor] = []

    def send(self, publication: int, stamp: PolicyStamp, leaves: NamedTensors) -> Mapping[str, Any]:
        """Casts and copies the leaves.

        Raises:
            WireError: if the number is in use or the leaves do not fit the layout.
        """
        if publication in self._published:
            raise WireError(f"publication={publication}: already published and not released")
        buffer = self._free.pop() if self._free else torch.empty(self._layout.num_bytes, dtype=torch.uint8)
        self._layout.fill(buffer, leaves)
        self._published[publication] = (stamp, buffer)
        return {"publication": publication}

    def receive(self, descriptor: Mapping[str, Any]) -> tuple[PolicyStamp, Iterator[tuple[str, Tensor]]]:
        """Views of a publication, valid until it is released.

        Raises:
            WireError: if it was released or never published.
        """
        number = descriptor["publication"]
        if number not in self._published:
            raise WireError(f"publication={number}: not published, or released already")
        stamp, buffer = self._published[number]
        return stamp, self._layout.views(buffer)

    def release(self, publication: int) -> None:
        """Gives the buffer of a publication to the next one; idempotent."""
        if publication in self._published:
            self._free.append(self._published.pop(publication)[1])

    def close(self) -> None:
        """Drops everything; idempotent."""
        self._published.clear()
        self._free.clear()
