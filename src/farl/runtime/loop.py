"""The training loop: dispatch ahead, collect in order, update, observe, record, checkpoint.

Batch n is consumed at a batch boundary; everything a resumed run needs is known there, so that is where
checkpoints are taken and stop requests are heard.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farl.core.protocols import Policy, Sampler, Task, Tokenizer, Transport
from farl.core.types import Group
from farl.errors import FarlError, TaskError
from farl.forecast import Forecaster
from farl.runtime.buffer import GroupBuffer
from farl.runtime.config import LoopConfig
from farl.runtime.consume import Consumer
from farl.runtime.evaluate import evaluate
from farl.runtime.pool import RolloutPool
from farl.runtime.publish import Publisher
from farl.runtime.records import JsonlWriter, Listener
from farl.runtime.state import CheckpointStore, flatten_optimizer, restore_optimizer
from farl.runtime.step import SkipCounter, make_optimizer
from farl.runtime.summary import Summary, summarise
from farl.runtime.timing import Timeline

log = logging.getLogger("farl.loop")
_COLLECT_S = 0.5
_MAX_FAILED_BATCHES = 3


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop is given: the pieces that know frameworks, processes or files."""

    policy: Policy
    tokenizer: Tokenizer
    pad_id: int
    task: Task
    eval_sampler: Sampler
    pool: RolloutPool
    transport: Transport
    listeners: Sequence[Listener]
    folder: Path


class Trainer:
    """Trains one policy.

    Args:
        config: the settings.
        parts: engine, task, workers, transport, listeners and run folder.
        config_hash: identity of the resolved config; a checkpoint of another one is refused.
        stop: set it, from a signal handler for example, to stop at the next batch boundary.
    """

    def __init__(
        self, config: LoopConfig, parts: Parts, *, config_hash: str = "", stop: threading.Event | None = None
    ) -> None:
        self.config, self.parts = config, parts
        self._config_hash = config_hash
        self._stop = stop or threading.Event()
        self.optimizer = make_optimizer(parts.policy, config.optimizer)
        self.forecaster = Forecaster(
            parts.policy.module.named_parameters(),
            self.optimizer,
            config=config.forecast_for_pipeline,
            lr_schedule=config.optimizer.lr_at,
        )
        self.publisher = Publisher(self.forecaster, parts.transport, parts.pool, config)
        self.buffer = GroupBuffer(config.rollout.prompts_per_batch)
        self.store = CheckpointStore(parts.folder / "checkpoints", keep=config.record.keep_checkpoints)
        self.timeline = Timeline()
        self.skips = SkipCounter(config.optimizer.max_skipped)
        self.consumer = Consumer(
            policy=parts.policy,
            pad_id=parts.pad_id,
            optimizer=self.optimizer,
            forecaster=self.forecaster,
            publisher=self.publisher,
            skips=self.skips,
            config=config,
        )
        self.history: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._next_batch = 0
        self._failed_batches = 0
        self._mid_batch = False
        self._elapsed_s = 0.0
        self._samples = JsonlWriter(parts.folder / "samples.jsonl")

    @property
    def version(self) -> int:
        """Learner version: optimizer steps made."""
        return self.forecaster.version

    def run(self) -> Summary:
        """Trains to the end, or to a stop request, and returns what came of it.

        Raises:
            FarlError: whatever ended the run early. If that was at a batch boundary, as almost everything is,
                the state has been saved; else the last checkpoint stands.
        """
        start_s = time.monotonic()
        try:
            self._dispatch_ahead()
            if not self.evaluations:
                self._evaluate()
            while self._next_batch < self.config.learner.num_batches:
                groups = self._collect()
                if groups is None:
                    break
                self._mid_batch = True
                self._consume(groups)
                self._mid_batch = False
                self._refuse_failures()
                self._at_boundary()
        except FarlError as error:
            self._save_after(error)
            raise
        finished = self._next_batch >= self.config.learner.num_batches
        if finished and self.evaluations[-1]["update"] != self.version:
            self._evaluate()
        end_s = time.monotonic()
        self._elapsed_s += end_s - start_s
        self.save()
        return summarise(
            self.history,
            self.evaluations,
            self.timeline.report(),
            finished=finished,
            num_restarts=self.parts.pool.num_restarts,
            num_skipped=self.skips.total,
            elapsed_s=self._elapsed_s,
        )

    def close(self) -> None:
        """Closes the trainer's own thread and files; parts and listeners belong to the caller."""
        self.publisher.close()
        self._samples.close()

    def _dispatch_ahead(self) -> None:
        last = min(self._next_batch + self.config.pipeline.depth, self.config.learner.num_batches - 1)
        while self.publisher.next_batch <= last:
            plan = self.publisher.dispatch_next()
            if plan.held and plan.base_version > 0:
                self._event(f"version {plan.base_version}: forecast held, {plan.held}")

    def _collect(self) -> list[Group] | None:
        """Waits for the next batch; None when a stop was asked for."""
        while True:
            if self._stop.is_set():
                return None
            groups = self.buffer.take(self._next_batch)
            if groups is not None:
                return groups
            self.publisher.raise_failed()
            for generated in self.parts.pool.collect(_COLLECT_S):
                if not self.publisher.finish(generated.dispatch_id):
                    log.warning("dispatch %d arrived again and was dropped", generated.dispatch_id)
                    continue
                self.timeline.generate.append((generated.start_s, generated.end_s))
                for group in generated.groups:
                    self.buffer.add(group)

    def _consume(self, groups: list[Group]) -> None:
        """Makes M updates from one batch, recording each."""
        waited_from_s = self.timeline.train[-1][1] if self.timeline.train else None
        begin_s = time.monotonic()
        waited_s = 0.0 if waited_from_s is None else begin_s - waited_from_s
        plan = self.publisher.plan_of(self._next_batch)
        for metrics in self.consumer.consume(groups, batch=self._next_batch, plan=plan):
            metrics |= {
                "time/wait_s": waited_s,
                "optim/num_skipped": self.skips.total,
                "worker/num_restarts": self.parts.pool.num_restarts,
            }
            self.timeline.train.append((time.monotonic() - metrics["time/train_s"], time.monotonic()))
            metrics = {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}
            self.history.append(metrics)
            for listener in self.parts.listeners:
                listener.on_update(metrics)
        self._failed_batches = self._failed_batches + 1 if all(g.num_reward_errors for g in groups) else 0
        self._write_samples(groups)
        self._next_batch += 1

    def _refuse_failures(self) -> None:
        """Ends a run that does nothing but skip or fail; at a boundary, so that it can be resumed once mended."""
        self.skips.refuse()
        if self._failed_batches >= _MAX_FAILED_BATCHES:
            raise TaskError(
                f"the reward function failed in every group of {_MAX_FAILED_BATCHES} batches in a row; the reasons are "
                "in the worker logs of the run folder"
            )

    def _at_boundary(self) -> None:
        record = self.config.record
        every = record.eval_every_batches
        if every and self._next_batch % every == 0:
            self._evaluate()
        every = record.checkpoint_every_batches
        if every and self._next_batch % every == 0 and self._next_batch < self.config.learner.num_batches:
            try:
                self.save()
            except FarlError as error:
                self._event(f"checkpoint failed, training goes on: {error}")
        self._dispatch_ahead()

    def _evaluate(self) -> None:
        start_s = time.monotonic()
        result = evaluate(
            self.parts.eval_sampler,
            self.parts.tokenizer,
            self.parts.task,
            max_new_tokens=self.config.rollout.max_new_tokens,
        )
        self.timeline.left_out.append((start_s, time.monotonic()))
        self.evaluations.append({"update": self.version, "accuracy": result.accuracy, "problems": result.num_problems})
        self._event(
            f"version {self.version}: accuracy {result.accuracy:.3f} on {result.num_problems} held-out problems"
        )

    def _write_samples(self, groups: list[Group]) -> None:
        for group in groups[: self.config.record.samples_per_batch]:
            rollout = group.rollouts[0]
            self._samples.write(
                {"batch": self._next_batch, "group": group.group_id, "text": rollout.text, "reward": rollout.reward}
                | {"stamp": rollout.stamp.to_json()}
            )

    def _event(self, text: str) -> None:
        for listener in self.parts.listeners:
            listener.on_event(text)

    def _save_after(self, error: FarlError) -> None:
        if self._mid_batch or self.publisher.failed:
            log.error("%s in the middle of a batch; the last checkpoint stands", type(error).__name__)
            return
        try:
            self.save()
        except FarlError as second:
            log.error("could not save after %s: %s", type(error).__name__, second)

    def save(self) -> None:
        """Writes a checkpoint of the present batch boundary.

        Raises:
            CheckpointError: if it cannot be written; earlier ones are intact.
        """
        optimizer_tensors, optimizer_record = flatten_optimizer(self.optimizer.state_dict())
        forecaster = self.forecaster.state_dict()
        publications, publisher_record = self.publisher.state()
        tensors = {
            "model": {n: p.detach() for n, p in self.parts.policy.module.named_parameters()},
            "optimizer": optimizer_tensors,
            "forecaster": forecaster["tensors"],
            "random": {"torch": torch.get_rng_state()},
            **publications,
        }
        records = {
            "loop": {
                "next_batch": self._next_batch,
                "version": self.version,
                "config_hash": self._config_hash,
                "num_skipped": self.skips.total,
                "elapsed_s": self._elapsed_s,
            },
            "optimizer": optimizer_record,
            "forecaster": forecaster["record"],
            "publisher": publisher_record,
            "buffer": self.buffer.to_json(),
            "replay": self.consumer.replay.to_json(),
            "evaluations": self.evaluations,
            "history": self.history,
        }
        self.store.save(self._next_batch, tensors, records)

    def restore(self, step: int) -> None:
        """Continues from a checkpoint as if the run had never stopped.

        Raises:
            CheckpointError: if it is damaged.
            FarlError: if it belongs to another config.
        """
        tensors, records = self.store.load(step)
        loop = records["loop"]
        if loop["config_hash"] != self._config_hash:
            raise FarlError(
                f"checkpoint {step} was written with another config (hash {loop['config_hash']}, now "
                f"{self._config_hash}); resume with the config in the run folder"
            )
        with torch.no_grad():
            for name, parameter in self.parts.policy.module.named_parameters():
                parameter.copy_(tensors["model"][name])
        self.optimizer.load_state_dict(restore_optimizer(tensors.get("optimizer", {}), records["optimizer"]))
        self.forecaster.load_state_dict({"tensors": tensors["forecaster"], "record": records["forecaster"]})
        torch.set_rng_state(tensors["random"]["torch"])
        self._next_batch = loop["next_batch"]
        self._elapsed_s = loop["elapsed_s"]
        self.skips.total = loop["num_skipped"]
        self.buffer.restore(records["buffer"])
        self.consumer.replay.restore(records["replay"])
        self.evaluations, self.history = list(records["evaluations"]), list(records["history"])
        self._samples.drop_from("batch", self._next_batch)
        for listener in self.parts.listeners:
            listener.on_resume(self.version, self._next_batch)
        self.publisher.restore(tensors, records["publisher"])
