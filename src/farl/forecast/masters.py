"""Which tensor holds the full-precision weights of a parameter: itself, an fp32 master in the optimizer, or a getter's.

At RL learning rates most of an update vanishes in bf16 (trap 1 of the method), so displacements come from masters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from farl.errors import ConfigError

Masters = Callable[[str, Tensor], Tensor | None] | Mapping[str, Tensor]
"""Gives the fp32 master of a named parameter, or None where the parameter is its own."""
_STATE_KEYS = ("master_param", "master_weight", "fp32_param")
"""Where optimizers keep masters in a parameter's state: Transformer Engine's FusedAdam and its kin."""
HALF = (torch.bfloat16, torch.float16)


def find_master(
    name: str, parameter: Tensor, optimizers: list[torch.optim.Optimizer], masters: Masters | None
) -> Tensor:
    """The tensor to follow for a parameter.

    Args:
        name: of the parameter.
        parameter: as the model holds it.
        optimizers: whose state may hold a master.
        masters: the user's own answer; asked first.

    Raises:
        ConfigError: if the master given has another shape.
    """
    given = None
    if masters is not None:
        given = masters.get(name) if isinstance(masters, Mapping) else masters(name, parameter)
    for optimizer in optimizers:
        if given is None:
            state = optimizer.state.get(parameter, {})
            given = next((state[key] for key in _STATE_KEYS if isinstance(state.get(key), Tensor)), None)
    if given is None:
        return parameter
    if given.shape != parameter.shape:
        raise ConfigError(
            f"masters: that of {name!r} has shape {tuple(given.shape)}, the parameter {tuple(parameter.shape)}; give "
            "the master of this parameter"
        )
    return given


def warn_of_half_precision(tracked: Mapping[str, Tensor]) -> None:
    """Says what a learner without full-precision weights loses."""
    low = [name for name, leaf in tracked.items() if leaf.dtype in HALF]
    if low:
        warnings.warn(
            f"{len(low)} trained parameters are half precision (first {low[0]!r}): at RL learning rates about 99 % "
            "of an update is lost in rounding, for training as for the forecast; keep fp32 master weights and pass "
            "them with masters=",
            stacklevel=4,
        )
