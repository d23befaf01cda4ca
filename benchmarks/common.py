"""What several benchmarks share: quiet settings of a run, where records go, a mean with its spread, log-probs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
QUIET = (
    "--pipeline.launch", "inline", "--record.eval-every-batches", "0", "--record.no-save-model",
    "--record.no-tensorboard", "--task.num-eval", "10",
)  # fmt: skip


def spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


def log_probs(module, batch):
    """Log-probs of the whole vocabulary at every sampled token, [B, T, V]."""
    rows = batch.group_B
    ids = torch.cat([batch.prompt_ids_PL[rows], batch.completion_ids_BT], 1)
    mask = torch.cat([batch.prompt_mask_PL[rows], batch.mask_BT], 1)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    keep = batch.completion_ids_BT.shape[1] + 1
    out = module(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False, logits_to_keep=keep
    )
    return torch.log_softmax(out.logits[:, :-1].float(), -1)
