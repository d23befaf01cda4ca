"""The records of a corrector and how its parts are put together."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from farl.correct.reduce import Denominator, Reduction, count_units, reduce
from farl.errors import ConfigError, ShapeError


class Need(enum.Enum):
    """What a corrector needs beyond learner and behaviour log-probs, mask and advantage."""

    PROXIMAL = "proximal log-probs"
    REFERENCE = "reference log-probs"
    REWARD = "rewards"
    GROUP = "group ids"
    LAG = "lags"
    BATCH_STATISTICS = "a look at the whole batch before the first micro-batch"


_FIELD_OF_NEED = {
    Need.PROXIMAL: "logp_proximal_BT",
    Need.REFERENCE: "logp_reference_BT",
    Need.REWARD: "reward_B",
    Need.GROUP: "group_B",
    Need.LAG: "lag_BT",
}


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a corrector may look at. Entries outside the mask are never read, whatever they hold.

    Attributes:
        logp_learner_BT: nats of the sampled tokens under the learner; carries the gradient.
        logp_behaviour_BT: nats reported by the sampler that drew them.
        mask_BT: bool, True on tokens that are trained on.
        advantage_BT: per token, usually constant along a sequence.
        logp_proximal_BT: nats under the anchor of the trust region, or None.
        logp_reference_BT: nats under the frozen regulariser, or None.
        reward_B: rewards, or None.
        group_B: int64 group of each sequence, or None.
        lag_BT: int64 versions, or None.
    """

    logp_learner_BT: Tensor
    logp_behaviour_BT: Tensor
    mask_BT: Tensor
    advantage_BT: Tensor
    logp_proximal_BT: Tensor | None = None
    logp_reference_BT: Tensor | None = None
    reward_B: Tensor | None = None
    group_B: Tensor | None = None
    lag_BT: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A corrector's verdict on each token.

    Attributes:
        token_loss_BT: to be minimised; float32 or better, 0 outside the mask and where dropped.
        keep_BT: bool, the mask without the tokens that were dropped.
        clipped_BT: bool, tokens whose gradient a clip has stopped.
        weight_BT: detached factor that multiplies `advantage * grad logp` of a token that is not clipped; 0
            where dropped.
    """

    token_loss_BT: Tensor
    keep_BT: Tensor
    clipped_BT: Tensor
    weight_BT: Tensor


@dataclass(frozen=True)
class Surrogate:
    """Per-token loss before weighting: `loss`, where a clip stopped the gradient, and the detached ratio."""

    loss_BT: Tensor
    clipped_BT: Tensor
    ratio_BT: Tensor


@dataclass(frozen=True)
class Treatment:
    """A detached factor and the tokens that stay."""

    weight_BT: Tensor
    keep_BT: Tensor


SurrogateFunction = Callable[[LossInputs], Surrogate]
TreatmentFunction = Callable[[LossInputs], Treatment]


@dataclass(frozen=True, kw_only=True)
class Corrector:
    """A composed corrector; pure and reusable.

        token_loss = weight_1 * weight_2 * ... * surrogate        0 where any treatment drops the token

    Attributes:
        name: in the catalogue.
        needs: what `LossInputs` must carry.
        surrogate: the differentiable per-token loss.
        treatments: detached weights and masks, multiplied.
        reduction: how token losses become a scalar.
        denominator_rule: whether dropped tokens still count in the denominator.
        horizon: H of the reduction that divides by a fixed length.
    """

    name: str
    needs: frozenset[Need]
    surrogate: SurrogateFunction
    treatments: tuple[TreatmentFunction, ...] = ()
    reduction: Reduction = "token_mean"
    denominator_rule: Denominator = "original"
    horizon: int | None = None

    def __call__(self, inputs: LossInputs, context: Any = None) -> LossOutput:
        """Per-token losses of a batch or micro-batch.

        Args:
            inputs: all [B, T] or [B].
            context: what `prepare` returned for the whole batch, or None.

        Returns:
            The losses; `aggregate` makes the scalar.

        Raises:
            ShapeError: for tensors that do not fit each other.
            ConfigError: if something in `needs` is missing.
        """
        check_inputs(inputs, self.needs)
        safe = mask_out(inputs)
        surrogate = self.surrogate(safe)
        keep_BT = safe.mask_BT
        weight_BT = torch.ones_like(surrogate.ratio_BT)
        for treatment in self.treatments:
            treated = treatment(safe)
            weight_BT = weight_BT * treated.weight_BT
            keep_BT = keep_BT & treated.keep_BT
        zero_BT = torch.zeros_like(weight_BT)
        weight_BT = torch.where(keep_BT, weight_BT, zero_BT)
        return LossOutput(
            token_loss_BT=torch.where(keep_BT, surrogate.loss_BT * weight_BT, zero_BT),
            keep_BT=keep_BT,
            clipped_BT=surrogate.clipped_BT & keep_BT,
            weight_BT=surrogate.ratio_BT * weight_BT,
        )

    def prepare(self, inputs: LossInputs) -> Tensor | None:
        """What micro-batches need to know of the whole batch: the tokens kept, if the denominator counts those."""
        if self.denominator_rule == "original":
            return None
        with torch.no_grad():
            return self(inputs).keep_BT

    def denominator(self, mask_BT: Tensor, context: Tensor | None = None) -> float:
        """What the sum over the whole batch is divided by.

        Args:
            mask_BT: of the whole batch, all micro-batches together.
            context: from `prepare`.
        """
        counted_BT = mask_BT if context is None else context
        return count_units(counted_BT, self.reduction, self.horizon)

    def aggregate(self, output: LossOutput, mask_BT: Tensor, denominator: float) -> Tensor:
        """Scalar loss of a micro-batch; the micro-batches of a batch add up to the batch's loss.

        Args:
            output: of this micro-batch.
            mask_BT: its mask.
            denominator: of the whole batch.
        """
        counted_BT = mask_BT if self.denominator_rule == "original" else output.keep_BT
        return reduce(output.token_loss_BT, counted_BT, self.reduction, denominator)


def check_inputs(inputs: LossInputs, needs: frozenset[Need]) -> None:
    """The one check of shapes, dtypes and needs."""
    shape = inputs.logp_learner_BT.shape
    if len(shape) != 2:
        raise ShapeError(f"logp_learner_BT: shape {tuple(shape)}, must be [B, T]")
    if inputs.mask_BT.dtype != torch.bool:
        raise ShapeError(f"mask_BT: dtype {inputs.mask_BT.dtype}, must be bool; use mask != 0")
    for need in needs - {Need.BATCH_STATISTICS}:
        if getattr(inputs, _FIELD_OF_NEED[need]) is None:
            raise ConfigError(f"{_FIELD_OF_NEED[need]}=None: this corrector needs {need.value}")
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        expected = shape[: 1 if field.name.endswith("_B") else 2]
        if value is not None and value.shape != expected:
            raise ShapeError(f"{field.name}: shape {tuple(value.shape)}, must be {tuple(expected)}")


def mask_out(inputs: LossInputs) -> LossInputs:
    """Float32 or better, 0 wherever the mask is False, no gradient but the learner's."""

    def safe(value_BT: Tensor) -> Tensor:
        wide_BT = value_BT if value_BT.dtype == torch.float64 else value_BT.float()
        return torch.where(inputs.mask_BT, wide_BT, torch.zeros_like(wide_BT))

    def detached(value_BT: Tensor | None) -> Tensor | None:
        return None if value_BT is None else safe(value_BT.detach())

    return replace(
        inputs,
        logp_learner_BT=safe(inputs.logp_learner_BT),
        logp_behaviour_BT=safe(inputs.logp_behaviour_BT.detach()),
        advantage_BT=safe(inputs.advantage_BT.detach()),
        logp_proximal_BT=detached(inputs.logp_proximal_BT),
        logp_reference_BT=detached(inputs.logp_reference_BT),
    )
