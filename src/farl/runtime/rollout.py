"""What a rollout worker does with one dispatch: load the frozen policy, sample, reward. No processes here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from farl.core.protocols import NamedTensors, Sampler, SampleRequest, SamplingParams, Task, Tokenizer
from farl.core.types import Completion, Group, PolicyStamp, Problem, Rollout
from farl.errors import StateError
from farl.runtime.config import RolloutConfig
from farl.runtime.schedule import Dispatch

log = logging.getLogger("farl.rollout")


@dataclass(frozen=True, kw_only=True)
class RolloutTools:
    """What a worker needs to turn a dispatch into groups."""

    sampler: Sampler
    tokenizer: Tokenizer
    task: Task
    config: RolloutConfig


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The outcome of one dispatch.

    Attributes:
        dispatch_id: which.
        groups: in the order of `group_ids`.
        start_s: when work began, on the machine's monotonic clock.
        end_s: when it ended.
    """

    dispatch_id: int
    groups: tuple[Group, ...]
    start_s: float
    end_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        return {
            "dispatch_id": self.dispatch_id,
            "groups": [g.to_json() for g in self.groups],
            "start_s": self.start_s,
            "end_s": self.end_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Generated:
        """Inverse of `to_json`."""
        return cls(
            dispatch_id=data["dispatch_id"],
            groups=tuple(Group.from_json(g) for g in data["groups"]),
            start_s=data["start_s"],
            end_s=data["end_s"],
        )


class Receiver(Protocol):
    """The receiving half of a transport."""

    def receive(self, descriptor: Mapping[str, Any]) -> tuple[PolicyStamp, NamedTensors]:
        """Opens a publication."""


def work_off(
    dispatch: Dispatch,
    descriptor: Mapping[str, Any],
    receiver: Receiver,
    tools: RolloutTools,
    on_token: Callable[[], None] | None = None,
) -> Generated:
    """Loads the promised weights, unless the sampler holds them already, and generates.

    Args:
        dispatch: the work.
        descriptor: opens its weights through `receiver`.
        receiver: of the transport they were sent by.
        tools: as for `generate`.
        on_token: as for `generate`.
    """
    if tools.sampler.stamp != dispatch.stamp:
        stamp, leaves = receiver.receive(descriptor)
        tools.sampler.load(leaves, stamp)
    return generate(dispatch, tools, on_token)


def generate(dispatch: Dispatch, tools: RolloutTools, on_token: Callable[[], None] | None = None) -> Generated:
    """Samples and scores every group of a dispatch from the weights the sampler holds.

    Args:
        dispatch: the work; its stamp must be the sampler's.
        tools: sampler, tokenizer, task and rollout settings.
        on_token: sign of life, called after every decoding step and every reward.

    Returns:
        The groups. A reward function that raises or returns a number that is not finite gives reward 0 and is
        counted in the group, which then takes no part in learning.

    Raises:
        StateError: if the sampler holds other weights than the dispatch names.
        TaskError: for a prompt that cannot be completed within the model's context.
    """
    if tools.sampler.stamp != dispatch.stamp:
        raise StateError(
            f"dispatch {dispatch.dispatch_id} names {dispatch.stamp}, the sampler holds {tools.sampler.stamp}"
        )
    start_s = time.monotonic()
    config = tools.config
    problems = [tools.task.train_problem(i) for i in dispatch.group_ids]
    requests = [
        SampleRequest(prompt_ids=p.prompt_ids, num_members=config.members, seed=s)
        for p, s in zip(problems, dispatch.seeds, strict=True)
    ]
    params = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature, top_p=config.top_p)
    completions = tools.sampler.sample(requests, params, on_token)
    groups = []
    for group_id, problem, members in zip(dispatch.group_ids, problems, completions, strict=True):
        groups.append(_score_group(group_id, problem, members, dispatch.stamp, tools))
        if on_token:
            on_token()
    return Generated(dispatch_id=dispatch.dispatch_id, groups=tuple(groups), start_s=start_s, end_s=time.monotonic())


def _score_group(
    group_id: int, problem: Problem, members: list[Completion], stamp: PolicyStamp, tools: RolloutTools
) -> Group:
    rollouts, num_errors = [], 0
    for completion in members:
        text = tools.tokenizer.decode(completion.ids)
        reward = safe_reward(tools.task, problem, text)
        num_errors += reward is None
        rollouts.append(
            Rollout(
                ids=completion.ids,
                logp_behaviour=completion.logp_behaviour,
                finished=completion.finished,
                reward=reward or 0.0,
                text=text,
                stamp=stamp,
            )
        )
    return Group(
        group_id=group_id,
        prompt_ids=problem.prompt_ids,
        rollouts=tuple(rollouts),
        num_reward_errors=num_errors,
    )


def safe_reward(task: Task, problem: Problem, text: str) -> float | None:
    """The task's reward, or None with a logged reason when the scorer raises or is not finite."""
    try:
        reward = float(task.score(problem, text))
    except Exception as error:  # a scorer is foreign code: whatever it raises must not end the run
        log.warning("reward of problem %s failed on %r: %s: %s", problem.key, text, type(error).__name__, error)
        return None
    if not math.isfinite(reward):
        log.warning("reward of problem %s on %r is %s, must be finite", problem.key, text, reward)
        return None
    return reward
