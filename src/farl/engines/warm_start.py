"""A short supervised warm start, so that a new tiny model gets some answers right before RL begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of prompt and answer."""


def warm_start(
    module: nn.Module, examples: Iterator[Example], *, num_steps: int, lr: float, batch_size: int = 64
) -> float:
    """Minimises the cross-entropy of the answers; changes the module in place.

    Args:
        module: a causal language model with the transformers calling convention.
        examples: endless.
        num_steps: AdamW steps.
        lr: peak learning rate, falling linearly to a tenth.
        batch_size: examples a step.

    Returns:
        Loss of the last step, nats a token.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.0)
    value = float("nan")
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - 0.9 * step / num_steps)
        batch = [next(examples) for _ in range(batch_size)]
        width = max(len(p) + len(a) for p, a in batch)
        ids_BT = torch.zeros(batch_size, width, dtype=torch.int64)
        labels_BT = torch.full((batch_size, width), -100)
        for b, (prompt, answer) in enumerate(batch):
            row = torch.tensor([*prompt, *answer])
            ids_BT[b, : len(row)] = row
            labels_BT[b, len(prompt) : len(row)] = row[len(prompt) :]
        logits_BTV = module(input_ids=ids_BT).logits
        loss = nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value = float(loss.detach())
    return value
