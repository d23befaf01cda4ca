"""From learner versions to published policies: plan, stream, send, and keep until nobody needs them.

With worker processes the stream is made by a thread beside the next forward and backward pass: a forecast reads the
forecaster's own copies, which only `observe` changes, so `settle` before `observe` is all the care it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from farl.core.protocols import NamedTensors, Transport
from farl.core.types import DTYPES
from farl.forecast import Forecaster, ForecastPlan
from farl.runtime.config import LoopConfig
from farl.runtime.pool import RolloutPool
from farl.runtime.schedule import Dispatch, horizon_of, split_batch


@dataclass
class Publication:
    """Weights on their way, and the dispatches that still need them."""

    descriptor: Mapping[str, Any]
    dispatches: dict[int, Dispatch]


class Publisher:
    """Dispatches batches, each from one freshly published policy.

    Args:
        forecaster: plans and streams.
        transport: carries the weights.
        pool: generates.
        config: pipeline, rollout settings and seed.
    """

    def __init__(self, forecaster: Forecaster, transport: Transport, pool: RolloutPool, config: LoopConfig) -> None:
        self._forecaster = forecaster
        self._transport = transport
        self._pool = pool
        self._config = config
        self._open: dict[int, Publication] = {}
        self._plans: dict[int, ForecastPlan] = {}
        self._keeps = config.keeps_served_weights
        self._kept: dict[int, dict[str, Tensor]] = {}
        self.next_batch = 0
        self._next_dispatch_id = 0
        beside = config.pipeline.launch == "local"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="farl-publish") if beside else None
        self._sending: Future[None] | None = None
        self.failed = False

    def settle(self) -> None:
        """Waits until the last publication is out, and raises what went wrong with it."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def raise_failed(self) -> None:
        """Raises what went wrong with the last publication, if it is already known; does not wait."""
        if self._sending is not None and self._sending.done():
            self.settle()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()

    def dispatch_next(self) -> ForecastPlan:
        """Publishes the policy of the next batch and submits its dispatches.

        Returns:
            The plan that was shipped.
        """
        batch = self.next_batch
        plan = self._forecaster.plan(horizon_of(self._config.pipeline, batch))
        wire_dtype = self._config.pipeline.wire_dtype
        stamp = plan.stamp(wire_dtype)
        leaves = self._forecaster.weights(plan=plan, dtype=DTYPES[wire_dtype])
        dispatches = split_batch(
            batch=batch,
            first_dispatch_id=self._next_dispatch_id,
            rollout=self._config.rollout,
            num_workers=self._config.pipeline.num_workers,
            seed=self._config.seed,
            publication=batch,
            stamp=stamp,
        )
        self._plans[batch] = plan
        self.next_batch += 1
        self._next_dispatch_id += len(dispatches)
        self.settle()
        if self._thread is None:
            self._send(batch, leaves, dispatches)
        else:
            self._sending = self._thread.submit(self._send, batch, leaves, dispatches)
        return plan

    def _send(self, number: int, leaves: NamedTensors, dispatches: list[Dispatch]) -> None:
        """Publishes the weights that the dispatches, which share one stamp, were promised; then submits them."""
        try:
            descriptor = self._transport.send(number, dispatches[0].stamp, leaves)
        except BaseException:
            self.failed = True  # the batch counts as dispatched and is not: this state cannot be resumed
            raise
        self._open[number] = Publication(descriptor=descriptor, dispatches={d.dispatch_id: d for d in dispatches})
        for dispatch in dispatches:
            self._pool.submit(dispatch, descriptor)

    def finish(self, dispatch_id: int) -> bool:
        """Notes a finished dispatch; the weights are released with the last one of their publication.

        Returns:
            False for a dispatch that is not outstanding.
        """
        for number, publication in list(self._open.items()):
            if publication.dispatches.pop(dispatch_id, None) is not None:
                if not publication.dispatches:
                    if self._keeps:
                        self._kept[number] = self._copy(publication)
                    self._transport.release(number)
                    del self._open[number]
                return True
        return False

    def _copy(self, publication: Publication) -> dict[str, Tensor]:
        _, leaves = self._transport.receive(publication.descriptor)
        return {name: leaf.clone() for name, leaf in leaves}

    def forget_policies(self, before: int) -> None:
        """Drops the kept weights of batches below a number."""
        self._kept = {number: leaves for number, leaves in self._kept.items() if number >= before}

    def served_weights(self, batch: int) -> NamedTensors:
        """The weights that drew batch n, as they were on the wire; kept for replay only.

        Raises:
            KeyError: if they were not kept, or have been forgotten.
        """
        return self._kept[batch].items()

    def plan_of(self, batch: int) -> ForecastPlan:
        """The plan that drew batch n; forgotten once asked."""
        return self._plans.pop(batch)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Outstanding dispatches and the very weights they were promised.

        Returns:
            Tensors by publication and leaf, and a JSON record.
        """
        self.settle()
        tensors: dict[str, dict[str, Tensor]] = {}
        for number, publication in self._open.items():
            tensors[f"publication_{number}"] = self._copy(publication)
        for number, kept in self._kept.items():
            tensors[f"served_{number}"] = kept
        record = {
            "next_batch": self.next_batch,
            "next_dispatch_id": self._next_dispatch_id,
            "plans": {str(n): p.to_json() for n, p in self._plans.items()},
            "served": list(self._kept),
            "open": {str(n): [d.to_json() for d in p.dispatches.values()] for n, p in self._open.items()},
        }
        return tensors, record

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], record: Mapping[str, Any]) -> None:
        """Inverse of `state`: publishes the promised weights again and re-sends what was outstanding."""
        self.next_batch = record["next_batch"]
        self._next_dispatch_id = record["next_dispatch_id"]
        self._plans = {int(n): ForecastPlan.from_json(p) for n, p in record["plans"].items()}
        self._kept = {n: {k: v.clone() for k, v in tensors[f"served_{n}"].items()} for n in record["served"]}
        for number, dispatches in record["open"].items():
            leaves = tensors[f"publication_{number}"].items()
            self._send(int(number), leaves, [Dispatch.from_json(d) for d in dispatches])
