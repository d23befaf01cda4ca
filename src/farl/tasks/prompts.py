"""From a question to prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

from farl.core.protocols import Tokenizer


@dataclass(frozen=True)
class Prompts:
    """Wraps a question in the template and the model's chat form.

    Attributes:
        tokenizer: encodes.
        template: with `{question}`.
        system: system prompt, or None.
    """

    tokenizer: Tokenizer
    template: str
    system: str | None

    def encode(self, question: str) -> tuple[int, ...]:
        """Token ids of the whole prompt."""
        return self.tokenizer.encode_prompt(self.template.replace("{question}", question), system=self.system)
