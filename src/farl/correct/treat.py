"""Detached treatments of an importance ratio: truncate it, or drop the tokens where it is too large."""

from __future__ import annotations

import torch

from farl.correct.base import LossInputs, Treatment, TreatmentFunction
from farl.correct.ratio import Level, weight_of


def importance_weight(numerator: str, *, level: Level, cap: float | None, cap_action: str) -> TreatmentFunction:
    """Weight by `numerator / behaviour`, capped.

        clamp   W = min(x, cap)
        mask    W = x * 1[x <= cap]

    Args:
        numerator: "proximal" (decoupled objectives) or "learner".
        level: "token", or "sequence" for one product for all tokens of a sequence.
        cap: absolute bound; None leaves the weight alone.
        cap_action: "clamp" or "mask".
    """

    def treatment(inputs: LossInputs) -> Treatment:
        logp_BT = inputs.logp_proximal_BT if numerator == "proximal" else inputs.logp_learner_BT
        assert logp_BT is not None
        weight_BT = weight_of(logp_BT, inputs.logp_behaviour_BT, inputs.mask_BT, level)
        keep_BT = torch.ones_like(inputs.mask_BT)
        if cap is not None and cap_action == "mask":
            keep_BT = weight_BT <= cap
        elif cap is not None:
            weight_BT = weight_BT.clamp(max=cap)
        return Treatment(weight_BT, keep_BT)

    return treatment
