"""What an optimizer's own state says: the displacement it has just made, and where it goes with an assumed gradient.

Pure functions of a `Moments` record; which optimizers are understood, and how their state is read, is `read_moments`. n
entries of a piece of one leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from farl.errors import ConfigError

Kind = Literal["adam", "sgd"]


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Optimizer state of one leaf after its last step.

    Attributes:
        kind: "adam" (Adam, AdamW) or "sgd".
        first_N: `exp_avg` of Adam, momentum buffer of SGD; None for SGD without momentum.
        second_N: `exp_avg_sq` of Adam; None for SGD.
        step: steps made.
        lr: learning rate of the last step.
        beta1: decay of the first moment; momentum of SGD.
        beta2: decay of the second moment.
        eps: of Adam.
        weight_decay: strength.
        decoupled: True where decay scales the weights (AdamW), False where it is added to the gradient.
        dampening: of SGD.
        nesterov: of SGD.
        amsgrad: True where Adam divides by a running maximum, which no closed form follows.
    """

    kind: Kind
    first_N: Tensor | None
    second_N: Tensor | None
    step: int
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = True
    dampening: float = 0.0
    nesterov: bool = False
    amsgrad: bool = False

    @property
    def tells_displacement(self) -> bool:
        """Whether the last step can be read back from this state alone."""
        if self.kind == "adam":
            return not self.amsgrad
        return self.first_N is not None and not self.nesterov and not (self.weight_decay and not self.decoupled)

    def piece(self, part: slice | Tensor) -> tuple[Tensor | None, Tensor | None]:
        """First and second moment of a piece, flat and float32."""
        first = None if self.first_N is None else self.first_N.reshape(-1)[part].float()
        second = None if self.second_N is None else self.second_N.reshape(-1)[part].float()
        return first, second


def understands(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `read_moments` can read this optimizer's state."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.SGD)  # AdamW is a subclass of Adam


def read_moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Moments | None:
    """The optimizer state of one parameter of a group; None if it is not understood or there is none yet."""
    state = optimizer.state.get(parameter) or {}
    common: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0.0))}
    if isinstance(optimizer, torch.optim.Adam):
        if not state:
            return None
        beta1, beta2 = (float(b) for b in group["betas"])
        return Moments(
            kind="adam",
            first_N=state["exp_avg"],
            second_N=state["exp_avg_sq"],
            step=int(state["step"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
            amsgrad=bool(group["amsgrad"]),
            **common,
        )
    if isinstance(optimizer, torch.optim.SGD):
        return Moments(
            kind="sgd",
            first_N=state.get("momentum_buffer"),
            second_N=None,
            step=1,
            beta1=float(group["momentum"]),
            decoupled=False,
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            **common,
        )
    return None


def refuse_amsgrad(optimizer: torch.optim.Optimizer) -> None:
    """Raises `ConfigError` if any parameter group uses amsgrad."""
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ConfigError(
            "optimizer: amsgrad=True divides by a running maximum of the second moment, which no closed form follows; "
            "use a history rule (auto, copy, least_squares) with source='weights', or amsgrad=False"
        )


def last_displacement(moments: Moments, weights_n: Tensor, part: slice | Tensor) -> Tensor:
    """The displacement the last step made, float32 [n], from the state after it.

        AdamW:  D = -lr m^ / (sqrt(v^) + eps) - lr wd theta_before,   theta_before = theta - D
        SGD:    D = -lr u

    Args:
        moments: with `tells_displacement`.
        weights_n: the weights after the step.
        part: of the leaf, a slice or positions.
    """
    first, second = moments.piece(part)
    assert first is not None
    if second is None:
        return first.mul(-moments.lr)
    correction1 = 1 - moments.beta1**moments.step
    correction2 = 1 - moments.beta2**moments.step
    denominator = second.div(correction2).sqrt_().add_(moments.eps)
    moved = first.div(denominator).mul_(-moments.lr / correction1)
    decay = moments.lr * moments.weight_decay
    if decay and moments.decoupled:
        moved.sub_(weights_n, alpha=decay).div_(1 - decay)
    return moved


def run_ahead(
    moments: Moments,
    weights_n: Tensor,
    part: slice | Tensor,
    *,
    shares: Sequence[float],
    assumed: float,
    lrs: Sequence[float],
) -> Tensor:
    """Weights `theta^ - theta` after the coming updates, had each the same assumed gradient, float32 [n].

    The optimizer's own recursion, entry by entry: with `g = assumed * m^` (0 is "next gradient zero", 1 "the drift goes
    on"), decay included, it is what really running the optimizer with those gradients gives.

    Args:
        moments: after the last step.
        weights_n: `theta[t]` of the piece.
        part: of the leaf, a slice or positions.
        shares: w of the aim; update i counts with `w_i`.
        assumed: multiple of the bias-corrected first moment taken as the next gradients.
        lrs: learning rate of each coming update, at least as many as shares.

    Source: the method, section 4, "optimiser-aware"; Kingma & Ba, 2015, algorithm 1; Loshchilov & Hutter, 2019.
    """
    first, second = moments.piece(part)
    weights = weights_n.float()
    total = torch.zeros_like(weights)
    if first is None:
        first = torch.zeros_like(weights)
    adam = moments.kind == "adam"
    drift = first * (assumed * mean_gradient_factor(moments))
    here = weights
    for i, share in enumerate(shares, start=1):
        lr = lrs[i - 1]
        gradient = drift if moments.decoupled or not moments.weight_decay else drift + moments.weight_decay * here
        if adam:
            assert second is not None
            first = first * moments.beta1 + gradient * (1 - moments.beta1)
            second = second * moments.beta2 + gradient.square() * (1 - moments.beta2)
            step = moments.step + i
            scaled = second.div(1 - moments.beta2**step).sqrt_().add_(moments.eps)
            moved = first.div(scaled).mul_(-lr / (1 - moments.beta1**step))
            if moments.weight_decay and moments.decoupled:
                moved = moved.sub_(here, alpha=lr * moments.weight_decay)
        else:
            first = first * moments.beta1 + gradient * (1 - moments.dampening) if moments.beta1 else gradient
            direction = gradient + moments.beta1 * first if moments.nesterov else first
            moved = direction * -lr
        here = here + moved
        total = total.add_(moved, alpha=share)
    return total


def mean_gradient_factor(moments: Moments) -> float:
    """What the first moment is multiplied with to estimate the mean gradient."""
    if moments.kind == "adam":
        return 1 / (1 - moments.beta1**moments.step) if moments.step else 0.0
    return (1 - moments.beta1) / (1 - moments.dampening)
