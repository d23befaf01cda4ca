"""Settings of the loop, each section checked when made; the whole tree is `farl.config`.

Counts of time are learner updates unless a name says batches or seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from farl.core.types import DTYPES
from farl.correct import CorrectorConfig, Need, make_corrector
from farl.errors import ConfigError
from farl.forecast import ForecastConfig

Aim = Literal["first", "middle", "last", "window"]
Decay = Literal["none", "linear", "cosine"]
Launch = Literal["inline", "local"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How rollouts are drawn.

    Attributes:
        prompts_per_batch: P, groups in one consumed batch.
        members: G, completions of each prompt.
        max_new_tokens: length limit of a completion.
        temperature: of sampling, above 0; the learner's log-probs use it too.
        top_p: nucleus mass; below 1 the ratio to the learner is no longer exact (trap 9), so 1 is the default.
        groups_per_request: groups generated together; None spreads a batch evenly over the workers. Fix it to
            keep results equal for any number of workers.
    """

    prompts_per_batch: int = 4
    members: int = 8
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    groups_per_request: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts_per_batch", "max_new_tokens"):
            _at_least("rollout", name, getattr(self, name), 1)
        _at_least("rollout", "members", self.members, 2, "a group needs 2 to compare")
        if self.groups_per_request is not None:
            _at_least("rollout", "groups_per_request", self.groups_per_request, 1)
        if not self.temperature > 0:
            raise ConfigError(f"rollout.temperature={self.temperature}: must be above 0; greedy rollouts teach nothing")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p}: must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """The pipeline between dispatch and consumption.

    Attributes:
        lag: updates between dispatch and the first update that consumes; a multiple of `updates_per_batch`.
            0 is synchronous, `updates_per_batch` is one-step-off.
        updates_per_batch: M, minibatch updates made from one consumed batch.
        aim: point of the consumption window (lags h .. h+M-1) that a forecast aims at: its "first" update, its
            "middle", which lies between two updates for even M, its "last", or the mean of the whole "window".
        launch: "inline" runs everything in this process with the same numbers; "local" overlaps processes.
        num_workers: rollout processes of "local".
        threads: torch threads of the learner and of each worker.
        wire_dtype: dtype of weights on the wire; bfloat16 halves the bytes and adds a KL floor of its own.
        wire_folder: where published weights go; "" takes /dev/shm, or the folder for temporary files.
        heartbeat_timeout_s: silence after which a worker that has started counts as hung.
        progress_timeout_s: time without a new token or reward after which a busy worker counts as hung.
        startup_timeout_s: time a worker may take to load its model.
        max_restarts: worker restarts in one run before it gives up.
    """

    lag: int = 1
    updates_per_batch: int = 1
    aim: Aim = "middle"
    launch: Launch = "local"
    num_workers: int = 1
    threads: int = 1
    wire_dtype: str = "float32"
    wire_folder: str = ""
    heartbeat_timeout_s: float = 10.0
    progress_timeout_s: float = 120.0
    startup_timeout_s: float = 180.0
    max_restarts: int = 16

    def __post_init__(self) -> None:
        _at_least("pipeline", "lag", self.lag, 0, "0 trains only on fresh batches")
        for name in ("updates_per_batch", "num_workers", "threads"):
            _at_least("pipeline", name, getattr(self, name), 1)
        _at_least("pipeline", "max_restarts", self.max_restarts, 0)
        if self.lag % self.updates_per_batch:
            raise ConfigError(
                f"pipeline.lag={self.lag}: must be a multiple of updates_per_batch={self.updates_per_batch}, since a "
                "batch is consumed whole; 0 is synchronous"
            )
        if self.aim not in get_args(Aim):
            raise ConfigError(f"pipeline.aim={self.aim!r}: must be 'first', 'middle', 'last' or 'window'")
        if self.launch not in ("inline", "local"):
            raise ConfigError(f"pipeline.launch={self.launch!r}: must be 'inline' or 'local'")
        if self.wire_dtype not in DTYPES:
            raise ConfigError(f"pipeline.wire_dtype={self.wire_dtype!r}: must be one of {', '.join(DTYPES)}")
        for name in ("heartbeat_timeout_s", "progress_timeout_s", "startup_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"pipeline.{name}={getattr(self, name)}: must be above 0 seconds")

    @property
    def depth(self) -> int:
        """Batches between dispatch and consumption."""
        return self.lag // self.updates_per_batch

    @property
    def aim_offsets(self) -> tuple[float, ...]:
        """Updates past the start of the consumption window that a forecast aims at; several share it equally."""
        last = self.updates_per_batch - 1
        if self.aim == "window":
            return tuple(range(self.updates_per_batch))
        return ({"first": 0, "middle": last / 2, "last": last}[self.aim],)

    @property
    def max_horizon(self) -> int:
        """Largest lag a token can meet; also the largest horizon."""
        return max(self.lag + self.updates_per_batch - 1, 1)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The learner's optimizer.

    Attributes:
        name: "adamw" or "sgd".
        lr: peak learning rate.
        beta1: first moment decay of AdamW, momentum of SGD.
        beta2: second moment decay of AdamW.
        eps: of AdamW.
        weight_decay: decoupled for AdamW.
        warmup_updates: linear warm-up from `lr / warmup_updates`.
        decay: how the rate falls after the warm-up: "none", "linear" or "cosine".
        decay_updates: updates over which it falls to `min_lr_fraction * lr`, where it stays.
        min_lr_fraction: what is left of the rate in the end.
        max_grad_norm: gradient norm limit; 0 turns clipping off.
        max_skipped: consecutive updates with non-finite gradients before the run stops.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_updates: int = 0
    decay: Decay = "none"
    decay_updates: int = 0
    min_lr_fraction: float = 0.1
    max_grad_norm: float = 1.0
    max_skipped: int = 8

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "sgd"):
            raise ConfigError(f"optimizer.name={self.name!r}: must be 'adamw' or 'sgd'")
        if not self.lr > 0:
            raise ConfigError(f"optimizer.lr={self.lr}: must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}: must be in [0, 1)")
        for name in ("weight_decay", "max_grad_norm", "warmup_updates", "decay_updates", "max_skipped"):
            _at_least("optimizer", name, getattr(self, name), 0)
        if self.decay not in get_args(Decay):
            raise ConfigError(f"optimizer.decay={self.decay!r}: must be 'none', 'linear' or 'cosine'")
        if self.decay != "none":
            _at_least("optimizer", "decay_updates", self.decay_updates, 1, f"the {self.decay} decay needs a length")
        if not 0 <= self.min_lr_fraction <= 1:
            raise ConfigError(f"optimizer.min_lr_fraction={self.min_lr_fraction}: must be in [0, 1]")

    def lr_at(self, version: int) -> float:
        """Learning rate of the update that makes version `version + 1`."""
        if version < self.warmup_updates:
            return self.lr * (version + 1) / self.warmup_updates
        if self.decay == "none":
            return self.lr
        done = min((version - self.warmup_updates + 1) / self.decay_updates, 1.0)
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr_fraction + (1 - self.min_lr_fraction) * left)


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How batches become gradients.

    Attributes:
        num_batches: batches consumed in the run.
        advantage: "group_std" is GRPO's (r - mean) / std; "group_mean" leaves the scale.
        micro_groups: groups in one forward and backward pass; None takes the whole update at once.
        probe_fraction: share of each update's groups re-scored under stale weights; 0 turns the probe off.
    """

    num_batches: int = 16
    advantage: Literal["group_std", "group_mean"] = "group_std"
    micro_groups: int | None = None
    probe_fraction: float = 0.125

    def __post_init__(self) -> None:
        _at_least("learner", "num_batches", self.num_batches, 1)
        if self.micro_groups is not None:
            _at_least("learner", "micro_groups", self.micro_groups, 1)
        if self.advantage not in ("group_std", "group_mean"):
            raise ConfigError(f"learner.advantage={self.advantage!r}: must be 'group_std' or 'group_mean'")
        if not 0 <= self.probe_fraction <= 1:
            raise ConfigError(f"learner.probe_fraction={self.probe_fraction}: must be in [0, 1]; 0 turns it off")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Whether earlier samples are used again beside the fresh ones, and which.

    Attributes:
        policies: K, behaviour policies in use, the newest included; 0 or 1 turns replay off. None is 4 with the
            corrector `matched_replay` and 0 with any other.
        fraction: replayed groups for each fresh group at most, rounded up to a group; of each policy so many of the
            groups that taught something are stored, the first ones of their batch.
        min_ess_fraction: a policy is used while the importance weights of its tokens keep this share of their number
            as effective sample size.
        max_weight_variance: a group is used while the mean of (learner / behaviour - 1)^2 over its tokens is below.
    """

    policies: int | None = None
    fraction: float = 0.5
    min_ess_fraction: float = 0.5
    max_weight_variance: float = 0.25

    def __post_init__(self) -> None:
        if self.policies is not None:
            _at_least("replay", "policies", self.policies, 0)
        for name in ("fraction", "min_ess_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"replay.{name}={getattr(self, name)}: must be in (0, 1]")
        if not self.max_weight_variance > 0:
            raise ConfigError(f"replay.max_weight_variance={self.max_weight_variance}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is kept of a run.

    Attributes:
        eval_every_batches: evaluations between start and end; 0 for start and end only.
        checkpoint_every_batches: 0 for the end, and for a stop by Ctrl-C or SIGTERM, only.
        keep_checkpoints: newest checkpoints kept.
        save_model: write the final exact weights as an ordinary model folder.
        tensorboard: write TensorBoard events.
        samples_per_batch: completions written to `samples.jsonl` for each batch.
    """

    eval_every_batches: int = 0
    checkpoint_every_batches: int = 0
    keep_checkpoints: int = 1
    save_model: bool = True
    tensorboard: bool = True
    samples_per_batch: int = 2

    def __post_init__(self) -> None:
        for name in ("eval_every_batches", "checkpoint_every_batches", "samples_per_batch"):
            _at_least("record", name, getattr(self, name), 0)
        _at_least("record", "keep_checkpoints", self.keep_checkpoints, 1)


_REPLAY_POLICIES = 4
"""K where the corrector asks for replay and the config does not say."""


def _at_least(section: str, name: str, value: float, minimum: int, why: str = "") -> None:
    if value < minimum:
        raise ConfigError(f"{section}.{name}={value}: must be {minimum} or more{'; ' + why if why else ''}")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Everything the loop depends on, engines and tasks aside.

    Attributes:
        seed: of prompts, sampling and initial weights.
        rollout: how rollouts are drawn.
        pipeline: lag, launcher and workers.
        forecast: the forecaster; its `max_horizon` is raised to what the pipeline needs.
        corrector: the off-policy corrector.
        replay: use of earlier samples.
        optimizer: the learner's optimizer.
        learner: batches, advantages, probe.
        record: evaluation, checkpoints, logs.
    """

    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    pipeline: AsyncConfig = field(default_factory=AsyncConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    corrector: CorrectorConfig = field(default_factory=CorrectorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    record: RecordConfig = field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        groups, updates = self.rollout.prompts_per_batch, self.pipeline.updates_per_batch
        if groups % updates:
            raise ConfigError(
                f"rollout.prompts_per_batch={groups}: must be a multiple of pipeline.updates_per_batch={updates}, "
                "since a minibatch is made of whole groups"
            )
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed}: must be from 0 to 2^31 - 1")
        if self.corrector.anchor == "proximal" and updates == 1:
            raise ConfigError(
                "corrector.anchor='proximal': with pipeline.updates_per_batch=1 the proximal policy is the learner "
                "itself, every ratio to it is 1 and no clip or pull acts; anchor at 'behaviour', or make several "
                "updates from a batch"
            )
        corrector = make_corrector(self.corrector)
        if Need.REFERENCE in corrector.needs:
            raise ConfigError(
                f"corrector={self.corrector.name!r}: needs reference log-probs, and the loop keeps no reference policy"
            )
        if self._mixes and self.num_replay_policies < 2:
            raise ConfigError(
                f"replay.policies={self.replay.policies}: corrector.name='matched_replay' weights by a mixture of "
                "policies and needs 2 or more; for one policy use 'tis' with base='policy_gradient'"
            )
        if self.num_replay_policies > 1 and not corrector.reads_behaviour:
            raise ConfigError(
                f"replay.policies={self.replay.policies}: corrector={corrector.name!r} does not look at who drew a "
                "sample and would take replayed ones for the learner's own; use 'matched_replay', or 'tis' with "
                "base='policy_gradient'"
            )
        for f in fields(ReplayConfig):
            value = getattr(self.replay, f.name)
            if self.num_replay_policies < 2 and f.name != "policies" and value != f.default:
                raise ConfigError(
                    f"replay.{f.name}={value}: nothing is replayed; set replay.policies to 2 or more, or leave it out"
                )

    @property
    def _mixes(self) -> bool:
        return self.corrector.name == "matched_replay" and not self.corrector.import_from

    @property
    def num_replay_policies(self) -> int:
        """K, behaviour policies in use; 0 or 1 without replay."""
        if self.replay.policies is None:
            return _REPLAY_POLICIES if self._mixes else 0
        return self.replay.policies

    @property
    def keeps_served_weights(self) -> bool:
        """Whether weights are kept after they were served, to evaluate other policies' samples under them."""
        return self.num_replay_policies > 1 and Need.SOURCES in make_corrector(self.corrector).needs

    @property
    def groups_per_update(self) -> int:
        """Groups in one minibatch update."""
        return self.rollout.prompts_per_batch // self.pipeline.updates_per_batch

    @property
    def forecast_for_pipeline(self) -> ForecastConfig:
        """The forecast settings with a history long enough for every lag of the pipeline."""
        return replace(self.forecast, max_horizon=max(self.forecast.max_horizon, self.pipeline.max_horizon))
