"""The golden file as tensors, and random inputs for the laws."""

import json
from pathlib import Path

import torch

from farl.correct import LossInputs

GOLDEN = json.loads((Path(__file__).parent / "golden" / "correctors.json").read_text())


def golden_inputs(behaviour="behaviour"):
    data = GOLDEN["inputs"]

    def logs(name):
        return torch.tensor(data[name], dtype=torch.float64).log()

    return LossInputs(
        logp_learner_BT=logs("learner").requires_grad_(),
        logp_behaviour_BT=logs(behaviour),
        logp_proximal_BT=logs("proximal"),
        mask_BT=torch.tensor(data["mask"], dtype=torch.bool),
        advantage_BT=torch.tensor(data["advantage"], dtype=torch.float64)[:, None].expand(2, 3),
    )


def random_inputs(seed=0, *, sequences=6, width=5, spread=0.3, dtype=torch.float64, on_policy=False):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(sequences, width, generator=generator, dtype=dtype)

    learner = -draw().abs() - 0.1
    behaviour = learner if on_policy else learner + spread * draw()
    length = torch.randint(1, width + 1, (sequences,), generator=generator)
    return LossInputs(
        logp_learner_BT=learner.clone().requires_grad_(),
        logp_behaviour_BT=behaviour.clone(),
        logp_proximal_BT=learner.clone() if on_policy else learner + spread / 2 * draw(),
        mask_BT=torch.arange(width) < length[:, None],
        advantage_BT=torch.randn(sequences, 1, generator=generator, dtype=dtype).expand(sequences, width),
        reward_B=torch.rand(sequences, generator=generator),
        group_B=torch.arange(sequences) // 2,
        lag_BT=torch.ones(sequences, width, dtype=torch.int64),
    )


def scalar(corrector, inputs, denominator=None):
    context = corrector.prepare(inputs)
    if denominator is None:
        denominator = corrector.denominator(inputs.mask_BT, context)
    return corrector.aggregate(corrector(inputs, context), inputs.mask_BT, denominator)


def gradient(corrector, inputs):
    return torch.autograd.grad(scalar(corrector, inputs), inputs.logp_learner_BT)[0]
