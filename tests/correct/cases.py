"""The golden file as tensors, and shorthands."""

import json
import math
from pathlib import Path

import torch

from farl.correct import LossInputs

GOLDEN = json.loads((Path(__file__).parent / "golden" / "correctors.json").read_text())


def golden_inputs(behaviour="behaviour", case=None):
    """The inputs of a case; `case` may override advantage, lag, group, gradient norms and name the sources."""
    data, case = GOLDEN["inputs"], case or {}

    def logs(name):
        return torch.tensor(data[name], dtype=torch.float64).log()

    def optional(name):
        return torch.tensor(case[name]) if name in case else None

    advantage = torch.tensor(case.get("advantage", data["advantage"]), dtype=torch.float64)
    sources = case.get("sources")
    return LossInputs(
        logp_learner_BT=logs("learner").requires_grad_(),
        logp_behaviour_BT=logs(behaviour),
        logp_proximal_BT=logs("proximal"),
        mask_BT=torch.tensor(data["mask"], dtype=torch.bool),
        advantage_BT=advantage[:, None].expand(2, 3),
        reward_B=torch.tensor(data["reward"], dtype=torch.float64),
        group_B=optional("group"),
        lag_BT=optional("lag"),
        gradient_norm_B=optional("gradient_norm"),
        logp_sources_BTK=torch.stack([logs(s) for s in sources], dim=-1) if sources else None,
        log_share_BK=torch.full((2, len(sources)), -math.log(len(sources))) if sources else None,
    )


def gradient(corrector, inputs):
    return torch.autograd.grad(corrector.loss(inputs), inputs.logp_learner_BT)[0]
