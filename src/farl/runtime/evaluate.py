"""Accuracy on held-out problems, always with the learner's exact weights and greedy decoding."""

from __future__ import annotations

from dataclasses import dataclass

from farl.core.protocols import Sampler, SampleRequest, SamplingParams, Task, Tokenizer
from farl.errors import TaskError
from farl.runtime.rollout import safe_reward

_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result on the held-out set.

    Attributes:
        accuracy: mean reward of one greedy completion for each problem.
        num_problems: problems scored.
        num_errors: problems whose scorer failed; they count as 0.
    """

    accuracy: float
    num_problems: int
    num_errors: int


def evaluate(
    sampler: Sampler,
    tokenizer: Tokenizer,
    task: Task,
    *,
    max_new_tokens: int,
) -> Evaluation:
    """Scores one greedy completion of every held-out problem.

    Args:
        sampler: over the learner's own module, so that its weights are the exact ones.
        tokenizer: decodes completions.
        task: problems and scorer.
        max_new_tokens: length limit.

    Raises:
        TaskError: if the held-out set is empty.
    """
    problems = list(task.eval_problems())
    if not problems:
        raise TaskError("task: the held-out set is empty; raise task.num_eval above 0")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    total, num_errors = 0.0, 0
    for start in range(0, len(problems), _CHUNK):
        chunk = problems[start : start + _CHUNK]
        requests = [SampleRequest(prompt_ids=p.prompt_ids, num_members=1, seed=0) for p in chunk]
        for problem, (completion,) in zip(chunk, sampler.sample(requests, params), strict=True):
            reward = safe_reward(task, problem, tokenizer.decode(completion.ids))
            total += reward or 0.0
            num_errors += reward is None
    return Evaluation(accuracy=total / len(problems), num_problems=len(problems), num_errors=num_errors)
