"""Which task is trained on: the settings, checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from farl.errors import ConfigError

Scorer = Literal["exact", "number", "math"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task.

    Attributes:
        name: a name of `TASKS`.
        import_from: "package.module:factory" of a task of your own, called as `factory(config, tokenizer)`; in TOML
            the key is `import`. `name` is then only a label.
        seed: of the problems.
        num_eval: held-out problems.
        template: turns the question into the user's message; `{question}` stands for it.
        dataset: of `reasoning_gym`: name of one of its datasets.
        options: of `reasoning_gym`: settings of the dataset; of an imported task: whatever it reads.
        path: of `jsonl`: the file, one object a line.
        question_field: of `jsonl`.
        answer_field: of `jsonl`.
        scorer: of `jsonl`: "exact" compares stripped text, "number" the last number, "math" uses math-verify.
    """

    name: str = "reasoning_gym"
    import_from: str = ""
    seed: int = 0
    num_eval: int = 100
    template: str = "{question}"
    dataset: str = "chain_sum"
    options: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    question_field: str = "question"
    answer_field: str = "answer"
    scorer: Scorer = "exact"

    def __post_init__(self) -> None:
        if self.num_eval < 1:
            raise ConfigError(f"task.num_eval={self.num_eval}: must be 1 or more, to measure what training did")
        if "{question}" not in self.template:
            raise ConfigError(f"task.template={self.template!r}: must contain {{question}}")
        if self.import_from and ":" not in self.import_from:
            raise ConfigError(f"task.import={self.import_from!r}: must read 'package.module:factory'")
        if self.scorer not in ("exact", "number", "math"):
            raise ConfigError(f"task.scorer={self.scorer!r}: must be 'exact', 'number' or 'math'")
