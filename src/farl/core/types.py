"""The records that travel between the layers: stamps, rollouts, groups and training batches.

All are frozen and keyword-only. Dimension suffixes: B sequences, T completion positions (right padded),
P prompts, L prompt positions (left padded). Records that cross a process boundary convert to and from
plain JSON here; how they are sent is the business of `runtime`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyStamp:
    """Which weights drew a trajectory: enough to reconstruct them from the learner's history.

    Attributes:
        base_version: learner version (optimizer steps) the forecast started from.
        target_version: learner version the forecast aimed at, between two for a fractional horizon; equals
            `base_version` for exact weights.
        rule: name of the forecast rule that was really used ("stale" when held).
        coefficients: weights of the displacements, newest first; empty for stale weights.
        wire_dtype: dtype the weights were cast to last, for example "float32".
    """

    base_version: int
    target_version: float
    rule: str = "stale"
    coefficients: tuple[float, ...] = ()
    wire_dtype: str = "float32"

    @property
    def horizon(self) -> float:
        """Learner updates the forecast looked ahead."""
        return self.target_version - self.base_version

    @property
    def is_forecast(self) -> bool:
        """Whether these weights differ from those of `base_version`."""
        return any(c != 0.0 for c in self.coefficients)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; `from_json` inverts it exactly."""
        return asdict(self) | {"coefficients": list(self.coefficients)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PolicyStamp:
        """Inverse of `to_json`."""
        return cls(**{**data, "coefficients": tuple(data["coefficients"])})


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One task item, tokenised.

    Attributes:
        key: identity of the item within its task; equal keys are the same question.
        prompt_ids: token ids the policy continues.
        entry: what the task's scorer needs (JSON types only).
        text: the question as shown to people.
    """

    key: str
    prompt_ids: tuple[int, ...]
    entry: Mapping[str, Any]
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a sampler drew for one request.

    Attributes:
        ids: sampled token ids, with the end token when it was drawn.
        logp_behaviour: log-prob in nats of each id under the distribution really sampled from
            (after temperature and truncation), measured by the sampler; same length as `ids`.
        finished: whether the end token was drawn; False when the length limit cut it.
    """

    ids: tuple[int, ...]
    logp_behaviour: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion with its reward and the stamp of the single policy that drew all of it."""

    ids: tuple[int, ...]
    logp_behaviour: tuple[float, ...]
    finished: bool
    reward: float
    text: str
    stamp: PolicyStamp

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; `from_json` inverts it exactly; log-probs that are not finite become NaN."""
        return {
            "ids": list(self.ids),
            "logp_behaviour": [x if math.isfinite(x) else None for x in self.logp_behaviour],
            "finished": self.finished,
            "reward": self.reward,
            "text": self.text,
            "stamp": self.stamp.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rollout:
        """Inverse of `to_json`."""
        return cls(
            ids=tuple(data["ids"]),
            logp_behaviour=tuple(math.nan if x is None else x for x in data["logp_behaviour"]),
            finished=data["finished"],
            reward=data["reward"],
            text=data["text"],
            stamp=PolicyStamp.from_json(data["stamp"]),
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The completions of one prompt, all drawn from one frozen policy.

    Attributes:
        group_id: position of the group in dispatch order, unique in a run.
        prompt_ids: the shared prompt.
        rollouts: the members, in member order.
        num_reward_errors: members whose reward function raised or returned a non-finite number;
            they carry reward 0.
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    num_reward_errors: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON types; `from_json` inverts it exactly."""
        return {
            "group_id": self.group_id,
            "prompt_ids": list(self.prompt_ids),
            "rollouts": [r.to_json() for r in self.rollouts],
            "num_reward_errors": self.num_reward_errors,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Group:
        """Inverse of `to_json`."""
        return cls(
            group_id=data["group_id"],
            prompt_ids=tuple(data["prompt_ids"]),
            rollouts=tuple(Rollout.from_json(r) for r in data["rollouts"]),
            num_reward_errors=data["num_reward_errors"],
        )


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Padded tensors of one learner update; prompts are stored once per group.

    Attributes:
        prompt_ids_PL: int64, left padded.
        prompt_mask_PL: bool, True on real prompt tokens.
        group_B: int64, row of `prompt_ids_PL` that sequence b continues; groups are contiguous.
        completion_ids_BT: int64, right padded.
        mask_BT: bool, True on sampled tokens.
        logp_behaviour_BT: float32 nats, 0 at padding.
        advantage_BT: float32, 0 at padding.
        reward_B: float32.
        lag_BT: int64, learner version at consumption minus the base version of each token's policy.
        miss_BT: float32, the same minus the target version, which may lie between two.
    """

    prompt_ids_PL: Tensor
    prompt_mask_PL: Tensor
    group_B: Tensor
    completion_ids_BT: Tensor
    mask_BT: Tensor
    logp_behaviour_BT: Tensor
    advantage_BT: Tensor
    reward_B: Tensor
    lag_BT: Tensor
    miss_BT: Tensor

    @property
    def num_prompts(self) -> int:
        """P, the number of groups."""
        return self.prompt_ids_PL.shape[0]

    @property
    def num_sequences(self) -> int:
        """B, the number of completions."""
        return self.completion_ids_BT.shape[0]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens in the batch."""
        return int(self.mask_BT.sum())

    def select_groups(self, start: int, stop: int) -> TrainBatch:
        """Returns the contiguous groups `start <= p < stop` as views; `group_B` counts from 0 again."""
        rows = (self.group_B >= start) & (self.group_B < stop)
        index_B = rows.nonzero().squeeze(1)
        return TrainBatch(
            prompt_ids_PL=self.prompt_ids_PL[start:stop],
            prompt_mask_PL=self.prompt_mask_PL[start:stop],
            group_B=self.group_B[index_B] - start,
            completion_ids_BT=self.completion_ids_BT[index_B],
            mask_BT=self.mask_BT[index_B],
            logp_behaviour_BT=self.logp_behaviour_BT[index_B],
            advantage_BT=self.advantage_BT[index_B],
            reward_B=self.reward_B[index_B],
            lag_BT=self.lag_BT[index_B],
            miss_BT=self.miss_BT[index_B],
        )


DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Names of the dtypes a config may use for weights on the wire and for history."""
