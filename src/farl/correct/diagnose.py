"""Figures that mean the same for every corrector: distances, clipping, masking, weights, all by lag."""

from __future__ import annotations

import torch
from torch import Tensor

from farl.core.logprobs import policy_distance
from farl.correct.base import LossInputs, LossOutput

_MAX_LAGS_SHOWN = 16


@torch.no_grad()
def diagnose(
    inputs: LossInputs, output: LossOutput, *, lag_BT: Tensor | None = None, miss_BT: Tensor | None = None
) -> dict[str, float]:
    """Metrics of one batch, by the names of `docs/metrics.md`.

    Args:
        inputs: what the corrector saw.
        output: what it made of it.
        lag_BT: int64 versions since each token's policy; adds the figures by lag.
        miss_BT: float32 versions the forecast's aim was off.

    Returns:
        `policy/...`, `correct/...`, `lag/...` and `miss/...`, finite for an empty mask too. Distances leave out tokens
        whose behaviour log-prob is not finite; the others count them as dropped.
    """
    mask_BT = inputs.mask_BT
    count = max(int(mask_BT.sum()), 1)
    known_BT = mask_BT & torch.isfinite(inputs.logp_behaviour_BT)
    distance = policy_distance(inputs.logp_learner_BT, inputs.logp_behaviour_BT, known_BT)
    weight_BT, num_kept = output.weight_BT, int(output.keep_BT.sum())
    metrics = {
        "policy/kl_nats": distance.kl_nats,
        "policy/ess_fraction": distance.ess_fraction,
        "policy/weight_variance": distance.weight_variance,
        "correct/clip_fraction": int(output.clipped_BT.sum()) / count,
        "correct/mask_fraction": (int(mask_BT.sum()) - num_kept) / count,
        "correct/weight_mean": float(weight_BT.double().sum()) / max(num_kept, 1),
        "correct/weight_max": float(weight_BT.max()) if num_kept else 0.0,
    }
    if miss_BT is not None and mask_BT.any():
        metrics["miss/mean_versions"] = float(miss_BT[mask_BT].double().mean())
    if lag_BT is not None and mask_BT.any():
        lag_N = lag_BT[mask_BT]
        metrics["lag/mean_versions"] = float(lag_N.double().mean())
        metrics["lag/max_versions"] = float(lag_N.max())
        lags = torch.unique(lag_N).tolist()
        for lag in lags[:_MAX_LAGS_SHOWN] if len(lags) > 1 else ():
            at_BT = mask_BT & (lag_BT == lag)
            part = policy_distance(inputs.logp_learner_BT, inputs.logp_behaviour_BT, at_BT & known_BT)
            metrics[f"policy/kl_nats_lag_{lag}"] = part.kl_nats
            metrics[f"correct/clip_fraction_lag_{lag}"] = int((output.clipped_BT & at_BT).sum()) / int(at_BT.sum())
    return metrics
