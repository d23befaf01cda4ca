"""Simulated asynchrony in this process: generation happens at submission, from the weights just published.

Same schedule, same numbers as `launch_local` with the same number of threads; for tests and experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farl.core.protocols import Transport
from farl.runtime.rollout import Generated, RolloutTools, work_off
from farl.runtime.schedule import Dispatch


class InlinePool:
    """Generates in the calling thread.

    Args:
        tools: sampler (with a model of its own), tokenizer, task, settings.
        transport: where the published weights are.
    """

    num_restarts = 0

    def __init__(self, tools: RolloutTools, transport: Transport) -> None:
        self._tools = tools
        self._transport = transport
        self._done: list[Generated] = []

    def submit(self, dispatch: Dispatch, descriptor: Mapping[str, Any]) -> None:
        """Loads the weights if they are not held yet, and generates."""
        self._done.append(work_off(dispatch, descriptor, self._transport, self._tools))

    def collect(self, timeout_s: float) -> list[Generated]:
        """Everything generated since the last call; never waits."""
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing to stop."""
        self._done.clear()
