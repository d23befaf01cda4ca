"""The seam between the loop and whoever generates: submit dispatches, collect groups.

`launch_inline` and `launch_local` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from farl.runtime.rollout import Generated
from farl.runtime.schedule import Dispatch


class RolloutPool(Protocol):
    """Generates dispatches, each exactly once as far as the caller can see."""

    def submit(self, dispatch: Dispatch, descriptor: Mapping[str, Any]) -> None:
        """Queues work; `descriptor` opens its weights through the transport."""

    def collect(self, timeout_s: float) -> list[Generated]:
        """Finished work, waiting up to `timeout_s` for the first; empty if none came.

        Raises:
            WorkerError: if workers keep failing.
            TaskError: if a worker reports a task or prompt that cannot be used.
        """

    @property
    def num_restarts(self) -> int:
        """Workers replaced so far."""

    def close(self) -> None:
        """Stops the workers; idempotent."""
