"""From one batch of groups to its updates: advantages, replay, minibatches, step, probe, observation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farl.core.protocols import Policy
from farl.core.types import Group
from farl.correct import Need, make_corrector
from farl.forecast import Forecaster, ForecastPlan
from farl.runtime.advantage import group_advantages
from farl.runtime.batch import make_batch
from farl.runtime.config import LoopConfig
from farl.runtime.needs import Minibatch, evaluate_logp, source_logps
from farl.runtime.publish import Publisher
from farl.runtime.replay import ReplayBuffer, StoredGroup, choose, measure
from farl.runtime.step import SkipCounter, stale_probe, update


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The groups of one update: fresh ones, then replayed ones."""

    groups: Sequence[StoredGroup]
    num_fresh: int

    @property
    def advantages(self) -> Tensor:
        return torch.tensor([a for g in self.groups for a in g.advantage])

    @property
    def sources(self) -> list[int]:
        return [g.source for g in self.groups]


class Consumer:
    """Makes the updates of each batch.

    Args:
        policy: the learner.
        pad_id: token id to pad with.
        optimizer: owns its parameters.
        forecaster: observes each update.
        publisher: has the weights that were served.
        skips: counts updates with gradients that are not finite.
        config: the settings.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        pad_id: int,
        optimizer: torch.optim.Optimizer,
        forecaster: Forecaster,
        publisher: Publisher,
        skips: SkipCounter,
        config: LoopConfig,
    ) -> None:
        self._policy = policy
        self._pad_id = pad_id
        self._optimizer = optimizer
        self._forecaster = forecaster
        self._publisher = publisher
        self._skips = skips
        self._config = config
        self.corrector = make_corrector(config.corrector)
        if self.corrector.horizon is None:
            self.corrector = replace(self.corrector, horizon=config.rollout.max_new_tokens)
        self._max_replayed = math.ceil(config.replay.fraction * config.rollout.prompts_per_batch)
        self._num_sources = max(config.num_replay_policies - 1, 0)
        self.replay = ReplayBuffer(self._num_sources, self._max_replayed)

    def consume(self, groups: Sequence[Group], *, batch: int, plan: ForecastPlan) -> Iterator[dict[str, Any]]:
        """Makes M updates from one batch, one at each step of the iterator.

        Args:
            groups: all of the batch, in order.
            batch: its number.
            plan: that drew it.

        Yields:
            The metrics of each update, by the names of `docs/metrics.md`.
        """
        config, updates = self._config, self._config.pipeline.updates_per_batch
        advantage_B, num_equal, num_failed = group_advantages(
            groups, divide_by_std=config.learner.advantage == "group_std"
        )
        sizes = [len(g.rollouts) for g in groups]
        advantages = [a.tolist() for a in torch.split(advantage_B, sizes)]
        fresh = [
            StoredGroup(group=g, advantage=tuple(a), source=batch) for g, a in zip(groups, advantages, strict=True)
        ]
        start_s = time.monotonic()
        replayed, shared = self._choose_replayed()
        shared |= _batch_metrics(groups, num_equal, num_failed)
        size = config.groups_per_update
        parts = [
            _Part(groups=[*fresh[i * size : (i + 1) * size], *replayed[i::updates]], num_fresh=size)
            for i in range(updates)
        ]
        anchors: list[Tensor | None] = [None] * updates
        if updates > 1 and Need.PROXIMAL in self.corrector.needs:
            # the learner's own log-probs are exact for the first update
            later = [self._minibatch(part, with_sources=False).batch for part in parts[1:]]
            anchors[1:] = [evaluate_logp(self._policy, batch, config) for batch in later]
        for part, anchor_BT in zip(parts, anchors, strict=True):
            metrics = self._update(self._minibatch(part, anchor_BT), plan)
            yield {
                "update": self._forecaster.version,
                "batch": batch,
                **shared,
                **metrics,
                "time/train_s": time.monotonic() - start_s,
            }
            start_s = time.monotonic()
        self.replay.add(batch, groups, advantages)
        self._publisher.forget_policies(before=batch + 1 - self._num_sources)

    def _choose_replayed(self) -> tuple[list[StoredGroup], dict[str, Any]]:
        """Stored groups near enough to the learner, and what was measured; one forward pass over what is stored."""
        stored = self.replay.stored
        if not self._num_sources:
            return [], {}
        if not stored:
            return [], {"replay/num_groups": 0, "replay/num_policies": 0}
        part = _Part(groups=stored, num_fresh=0)
        whole, sources = self._minibatch(part, with_sources=False).batch, part.sources
        distances = measure(whole, evaluate_logp(self._policy, whole, self._config), sources)
        chosen = choose(distances, sources, max_groups=self._max_replayed, config=self._config.replay)
        newest_first = sorted((stored[i] for i in chosen), key=lambda s: -s.source)
        return newest_first, {
            "replay/num_groups": len(chosen),
            "replay/num_policies": len({sources[i] for i in chosen}),
            "replay/ess_fraction_min": min(distances.ess_fraction.values()),
        }

    def _minibatch(self, part: _Part, anchor_BT: Tensor | None = None, *, with_sources: bool = True) -> Minibatch:
        batch = make_batch(
            [s.group for s in part.groups], part.advantages, version=self._forecaster.version, pad_id=self._pad_id
        )
        logp_sources_BTK = log_share_BK = None
        if with_sources and Need.SOURCES in self.corrector.needs:
            logp_sources_BTK, log_share_BK = source_logps(
                self._policy, batch, part.sources, self._presented, self._config
            )
        return Minibatch(
            batch=batch,
            num_fresh=part.num_fresh,
            logp_proximal_BT=anchor_BT,
            logp_sources_BTK=logp_sources_BTK,
            log_share_BK=log_share_BK,
        )

    def _presented(self, source: int) -> AbstractContextManager[None]:
        return self._forecaster.presented(self._publisher.served_weights(source))

    def _update(self, mini: Minibatch, plan: ForecastPlan) -> dict[str, Any]:
        config = self._config
        fresh_lag = self._forecaster.version - plan.base_version
        probed: dict[str, float] = {}

        def probe(logp_learner_BT: Tensor) -> None:
            probed.update(stale_probe(self._policy, self._forecaster, mini, logp_learner_BT, plan, config))
            if self._forecaster.streams_live_weights:
                self._publisher.settle()

        result = update(
            self._policy,
            self._optimizer,
            self.corrector,
            mini,
            config=config,
            lr=config.optimizer.lr_at(self._forecaster.version),
            before_step=probe,
        )
        self._skips.note(result.stepped)
        scored: dict[str, Any] = {}
        if result.stepped:
            self._publisher.settle()
            observation = self._forecaster.observe()
            assert observation is not None
            scored["forecast/displacement_norm"] = observation.displacement
            if observation.scored:
                scored["forecast/error_ratio"] = observation.scored[-1].error_ratio
        return {
            **result.metrics,
            **probed,
            **scored,
            "lag/fresh_versions": fresh_lag,
            "forecast/rule": plan.rule,
            "forecast/damping": plan.damping if plan.moves else 0.0,
            "forecast/horizon_versions": plan.horizon,
        }


def _batch_metrics(groups: Sequence[Group], num_equal: int, num_failed: int) -> dict[str, Any]:
    rollouts = [r for g in groups for r in g.rollouts]
    return {
        "reward/mean": sum(r.reward for r in rollouts) / len(rollouts),
        "reward/equal_group_fraction": num_equal / len(groups),
        "reward/num_failed_groups": num_failed,
        "rollout/length_mean_tokens": sum(len(r.ids) for r in rollouts) / len(rollouts),
        "rollout/finished_fraction": sum(r.finished for r in rollouts) / len(rollouts),
    }
