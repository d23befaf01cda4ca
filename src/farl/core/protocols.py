"""The seams: what a policy model, a sampler, a task and a transport must offer to the loop.

Structural protocols only. Implementations live in `engines`, `tasks` and `wire`; `runtime` composes them
and imports none of their frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from farl.core.types import Completion, PolicyStamp, Problem, TrainBatch

NamedTensors = Iterable[tuple[str, Tensor]]
"""A stream of named leaves, in the order of `nn.Module.named_parameters`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn.

    Attributes:
        max_new_tokens: length limit of a completion, end token included.
        temperature: divides the logits before sampling; 0 takes the most likely token.
        top_p: nucleus mass; 1 keeps the whole vocabulary.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One prompt to complete `num_members` times, reproducibly.

    Attributes:
        prompt_ids: token ids to continue.
        num_members: completions wanted.
        seed: seeds a generator of this request alone, so the draw does not depend on its neighbours.
    """

    prompt_ids: tuple[int, ...]
    num_members: int
    seed: int


class Sampler(Protocol):
    """Generates completions from the weights last loaded; frozen between two calls of `load`."""

    @property
    def stamp(self) -> PolicyStamp | None:
        """Stamp of the weights held, or None before the first `load`."""

    def load(self, leaves: NamedTensors, stamp: PolicyStamp) -> None:
        """Copies every leaf into the sampler's own model; raises `WireError` on a missing or unknown one."""

    def sample(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_token: Callable[[], None] | None = None,
    ) -> list[list[Completion]]:
        """Draws all requests from the held weights.

        Args:
            requests: prompts, completed together in one padded batch.
            params: how to draw.
            on_token: called after every decoding step, as a sign of life.

        Returns:
            One list of `num_members` completions for each request, in order.
        """


class Policy(Protocol):
    """The trained policy: a torch module and the log-probs of a batch under it."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters the optimizer owns."""

    def logp(self, batch: TrainBatch, *, temperature: float) -> Tensor:
        """Log-probs in nats of the sampled tokens, float32 [B, T], differentiable; finite at padding."""


class Tokenizer(Protocol):
    """Text to ids and back, with the model's chat form applied to questions."""

    def encode_prompt(self, question: str, *, system: str | None = None) -> tuple[int, ...]:
        """Token ids of the prompt that asks `question`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""


@runtime_checkable
class Task(Protocol):
    """A stream of training problems, a fixed held-out set, and a scorer."""

    def train_problem(self, index: int) -> Problem:
        """The `index`-th training problem; a pure function of the index and the task's config."""

    def eval_problems(self) -> Sequence[Problem]:
        """The held-out problems; none of their keys occurs among the training problems."""

    def score(self, problem: Problem, completion: str) -> float:
        """Reward of a completion, usually in [0, 1]. May raise: the caller counts and continues."""


class Transport(Protocol):
    """Moves one published set of weights from the learner to the samplers, whole or not at all."""

    def send(self, publication: int, stamp: PolicyStamp, leaves: NamedTensors) -> Mapping[str, Any]:
        """Publishes the leaves under an increasing number; returns the descriptor `receive` needs (JSON types)."""

    def receive(self, descriptor: Mapping[str, Any]) -> tuple[PolicyStamp, Iterator[tuple[str, Tensor]]]:
        """Opens a publication; raises `WireError` if it is gone, incomplete or fails its checksum."""

    def release(self, publication: int) -> None:
        """Gives the memory of a publication back; idempotent."""

    def close(self) -> None:
        """Releases everything; idempotent."""
