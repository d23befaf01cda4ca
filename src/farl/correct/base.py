"""The records of a corrector and how its parts are put together.

Suffixes: B sequences, T completion positions, K behaviour policies that a batch was drawn from.
"""

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
    GRADIENT_NORM = "the gradient norm of each trajectory"
    SOURCES = "log-probs under every behaviour policy of the batch"
    BATCH_STATISTICS = "a look at the whole batch before the first micro-batch"


FIELD_OF_NEED = {
    Need.PROXIMAL: "logp_proximal_BT",
    Need.REFERENCE: "logp_reference_BT",
    Need.REWARD: "reward_B",
    Need.GROUP: "group_B",
    Need.LAG: "lag_BT",
    Need.GRADIENT_NORM: "gradient_norm_B",
    Need.SOURCES: "logp_sources_BTK",
}
_INTEGER_FIELDS = ("group_B", "lag_BT")


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a corrector may look at. Entries outside the mask are never read, whatever they hold.

    A token whose behaviour, proximal or source log-prob is not finite is dropped: no gradient, but it still counts in
    the denominator (unless that is "kept"), so that a sampler that loses some log-probs neither ends a run nor changes
    the step size. Learner log-probs and advantages are taken as they are: a NaN there is a NaN loss.

    Attributes:
        logp_learner_BT: nats of the sampled tokens under the learner; carries the gradient.
        logp_behaviour_BT: nats reported by the sampler that drew them.
        mask_BT: bool, True on tokens that are trained on.
        advantage_BT: per token, usually constant along a sequence.
        logp_proximal_BT: nats under the anchor of the trust region, or None.
        logp_reference_BT: nats under the frozen regulariser, or None.
        reward_B: rewards, or None.
        group_B: int64 group of each sequence, counted from 0, or None; the same in every micro-batch of a batch.
        lag_BT: int64 versions, or None.
        gradient_norm_B: norm of the gradient of each trajectory's log-prob, or None.
        logp_sources_BTK: nats under each of the K behaviour policies that the batch was drawn from, or None.
        log_share_BK: log of each policy's share of the batch's sequences, the same in every row, or None.
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
    gradient_norm_B: Tensor | None = None
    logp_sources_BTK: Tensor | None = None
    log_share_BK: Tensor | None = None

    def select(self, rows: Tensor | slice) -> LossInputs:
        """The sequences that an index of the first dimension picks."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        chosen: dict[str, Any] = {name: None if value is None else value[rows] for name, value in values.items()}
        return LossInputs(**chosen)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A corrector's verdict on each token.

    Attributes:
        token_loss_BT: to be minimised; float32 or better, 0 outside the mask. Includes the penalty.
        keep_BT: bool, the mask without the tokens that were dropped.
        clipped_BT: bool, kept tokens whose gradient a clip has stopped.
        factor_BT: detached factor that multiplies `advantage * grad logp` of a token that is kept and not clipped;
            arbitrary elsewhere, `weight_BT` is the same with 0 there.
        penalty_BT: the part of the loss that does not come from the advantage (a pull towards a policy), which
            dropped tokens have too; None for correctors without one.
    """

    token_loss_BT: Tensor
    keep_BT: Tensor
    clipped_BT: Tensor
    factor_BT: Tensor
    penalty_BT: Tensor | None = None

    @property
    def weight_BT(self) -> Tensor:
        """What `advantage * grad logp` of each token was multiplied by; 0 where dropped or clipped. Made on demand."""
        return torch.where(self.keep_BT & ~self.clipped_BT, self.factor_BT, 0.0)


@dataclass(frozen=True)
class Surrogate:
    """Per-token loss before weighting, where a clip stopped the gradient, and the detached factor of A grad logp.

    Inputs are 0 at padding, advantages too; loss and penalty must be 0 there. `clipped_BT` is None if nothing can be
    clipped. `penalty_BT` is the part of a regularised loss that no weight and no treatment touches.
    """

    loss_BT: Tensor
    clipped_BT: Tensor | None
    factor_BT: Tensor
    penalty_BT: Tensor | None = None


@dataclass(frozen=True)
class Treatment:
    """A detached factor (None for 1) and the tokens that stay (None for all)."""

    weight_BT: Tensor | None = None
    keep_BT: Tensor | None = None


SurrogateFunction = Callable[[LossInputs], Surrogate]
TreatmentFunction = Callable[[LossInputs], Treatment]


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What the statistics of a whole batch change: parts tuned to it, and the length of its step.

    Attributes:
        surrogate: instead of the corrector's, or None.
        treatments: after the corrector's.
        step_scale: factor of this update's learning rate.
    """

    surrogate: SurrogateFunction | None = None
    treatments: tuple[TreatmentFunction, ...] = ()
    step_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class BatchContext:
    """What micro-batches need to know of the whole batch; made by `Corrector.prepare`.

    Attributes:
        adaptation: of a corrector that adapts to the batch.
        keep_BT: tokens kept in the whole batch, where the denominator counts those.
    """

    adaptation: Adaptation | None = None
    keep_BT: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Corrector:
    """A composed corrector; pure and reusable.

        token_loss = weight_1 * weight_2 * ... * surrogate + penalty        the product is 0 where a treatment drops

    Attributes:
        name: in the catalogue.
        needs: what `LossInputs` must carry.
        surrogate: the differentiable per-token loss.
        treatments: detached weights and masks, multiplied.
        reduction: how token losses become a scalar.
        denominator_rule: whether dropped tokens still count in the denominator.
        horizon: H of the reduction that divides by a fixed length.
        adapt: for correctors tuned to each batch: from the whole batch, masked and without gradient, to the
            parts that replace or follow those above.
        reads_behaviour: False for correctors that take the samples as they are; the behaviour log-probs may then hold
            anything.
        on_policy_scale: where learner and behaviour are the same policy the gradient is this times the plain policy
            gradient.
        exempt: conformance laws (`farl.testing`) that do not apply, each with the reason.
    """

    name: str
    needs: frozenset[Need]
    surrogate: SurrogateFunction
    treatments: tuple[TreatmentFunction, ...] = ()
    reduction: Reduction = "token_mean"
    denominator_rule: Denominator = "original"
    horizon: int | None = None
    adapt: Callable[[LossInputs], Adaptation] | None = None
    reads_behaviour: bool = True
    on_policy_scale: float = 1.0
    exempt: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.adapt is not None or self.denominator_rule == "kept":
            object.__setattr__(self, "needs", self.needs | {Need.BATCH_STATISTICS})

    def __call__(self, inputs: LossInputs, context: BatchContext | None = None) -> LossOutput:
        """Per-token losses of a batch or micro-batch.

        Args:
            inputs: all [B, T] or [B].
            context: what `prepare` returned for the whole batch; without it these inputs are the whole batch.

        Returns:
            The losses; `aggregate` makes the scalar.

        Raises:
            ShapeError: for tensors that do not fit each other.
            ConfigError: if something in `needs` is missing.
        """
        check_inputs(inputs, self.needs)
        safe = mask_out(inputs, self.needs, reads_behaviour=self.reads_behaviour)
        adaptation = context.adaptation if context is not None else None
        if adaptation is None and self.adapt is not None:
            adaptation = self._adapted(safe)
        return self._combine(safe, adaptation)

    def _adapted(self, safe: LossInputs) -> Adaptation:
        assert self.adapt is not None
        return self.adapt(replace(safe, logp_learner_BT=safe.logp_learner_BT.detach()))

    def _combine(self, safe: LossInputs, adaptation: Adaptation | None) -> LossOutput:
        surrogate_of, treatments = self.surrogate, self.treatments
        if adaptation is not None:
            surrogate_of, treatments = adaptation.surrogate or surrogate_of, treatments + adaptation.treatments
        surrogate = surrogate_of(safe)
        weight_BT = stay_BT = None
        for treatment in treatments:
            treated = treatment(safe)
            if treated.weight_BT is not None:
                weight_BT = treated.weight_BT if weight_BT is None else weight_BT * treated.weight_BT
            if treated.keep_BT is not None:
                stay_BT = treated.keep_BT if stay_BT is None else stay_BT & treated.keep_BT
        loss_BT, factor_BT, keep_BT = surrogate.loss_BT, surrogate.factor_BT, safe.mask_BT
        if weight_BT is not None:
            loss_BT, factor_BT = loss_BT * weight_BT, factor_BT * weight_BT
        if stay_BT is not None:
            keep_BT = keep_BT & stay_BT
            loss_BT = torch.where(keep_BT, loss_BT, 0.0)
        if surrogate.penalty_BT is not None:
            loss_BT = loss_BT + surrogate.penalty_BT
        clipped_BT = surrogate.clipped_BT
        return LossOutput(
            token_loss_BT=loss_BT,
            keep_BT=keep_BT,
            clipped_BT=torch.zeros_like(keep_BT) if clipped_BT is None else clipped_BT & keep_BT,
            factor_BT=factor_BT,
            penalty_BT=surrogate.penalty_BT,
        )

    @torch.no_grad()
    def prepare(self, inputs: LossInputs) -> BatchContext | None:
        """What micro-batches need to know of the whole batch; None for correctors that need nothing.

        Args:
            inputs: of the whole batch; gradients are not used.
        """
        if Need.BATCH_STATISTICS not in self.needs:
            return None
        check_inputs(inputs, self.needs)
        safe = mask_out(inputs, self.needs, reads_behaviour=self.reads_behaviour)
        adaptation = None if self.adapt is None else self._adapted(safe)
        kept = self.denominator_rule == "kept"
        return BatchContext(adaptation=adaptation, keep_BT=self._combine(safe, adaptation).keep_BT if kept else None)

    def denominator(self, mask_BT: Tensor, context: BatchContext | None = None) -> float:
        """What the sum over the whole batch is divided by.

        Args:
            mask_BT: of the whole batch, all micro-batches together.
            context: from `prepare`.
        """
        counted_BT = mask_BT if context is None or context.keep_BT is None else context.keep_BT
        return count_units(counted_BT, self.reduction, self.horizon)

    def step_scale(self, context: BatchContext | None) -> float:
        """Factor of the learning rate of the update that the batch makes."""
        return 1.0 if context is None or context.adaptation is None else context.adaptation.step_scale

    def aggregate(self, output: LossOutput, mask_BT: Tensor, denominator: float) -> Tensor:
        """Scalar loss of a micro-batch; the micro-batches of a batch add up to the batch's loss.

        Args:
            output: of this micro-batch.
            mask_BT: its mask.
            denominator: of the whole batch.
        """
        counted_BT = mask_BT if self.denominator_rule == "original" else output.keep_BT
        return reduce(output.token_loss_BT, counted_BT, self.reduction, denominator)

    def loss(self, inputs: LossInputs) -> Tensor:
        """Scalar loss of a whole batch in one call: `prepare`, call, `denominator`, `aggregate`."""
        context = self.prepare(inputs)
        output = self(inputs, context)
        return self.aggregate(output, inputs.mask_BT, self.denominator(inputs.mask_BT, context))


def check_inputs(inputs: LossInputs, needs: frozenset[Need]) -> None:
    """The one check of shapes, dtypes and needs.

    Raises:
        ShapeError: for a shape or dtype that does not fit.
        ConfigError: for something that is needed and missing.
    """
    shape = inputs.logp_learner_BT.shape
    if len(shape) != 2:
        raise ShapeError(f"logp_learner_BT: shape {tuple(shape)}, must be [B, T]")
    if inputs.mask_BT.dtype != torch.bool:
        raise ShapeError(f"mask_BT: dtype {inputs.mask_BT.dtype}, must be bool; use mask != 0")
    for need, name in FIELD_OF_NEED.items():
        if need in needs and getattr(inputs, name) is None:
            raise ConfigError(f"{name}=None: this corrector needs {need.value}")
    if (inputs.logp_sources_BTK is None) != (inputs.log_share_BK is None):
        raise ConfigError("logp_sources_BTK and log_share_BK: give both or neither")
    for name in _FIELDS:
        value = getattr(inputs, name)
        if value is None:
            continue
        dimensions = len(name.rsplit("_", 1)[1])
        expected = {"B": shape[:1], "T": shape}.get(name[-1])
        if expected is None:  # ends with K
            assert inputs.logp_sources_BTK is not None
            expected = (*shape[: dimensions - 1], *inputs.logp_sources_BTK.shape[-1:])
        if value.shape != expected:
            raise ShapeError(f"{name}: shape {tuple(value.shape)}, must be {tuple(expected)}")
        if name in _INTEGER_FIELDS and value.is_floating_point():
            raise ShapeError(f"{name}: dtype {value.dtype}, must be an integer type")
        if name not in _INTEGER_FIELDS and name != "mask_BT" and not value.is_floating_point():
            raise ShapeError(f"{name}: dtype {value.dtype}, must be a floating type")


_FIELDS = tuple(f.name for f in fields(LossInputs))


def mask_out(inputs: LossInputs, needs: frozenset[Need], *, reads_behaviour: bool = True) -> LossInputs:
    """Float32 or better, 0 wherever the mask is False, no gradient but the learner's; odd log-probs leave the mask.

    What is not needed is None, so that no corrector can read what it has not listed.
    """
    mask_BT = inputs.mask_BT
    if reads_behaviour:
        mask_BT = mask_BT & _finite(inputs.logp_behaviour_BT)
    if inputs.logp_proximal_BT is not None and Need.PROXIMAL in needs:
        mask_BT = mask_BT & _finite(inputs.logp_proximal_BT)
    if inputs.logp_sources_BTK is not None and Need.SOURCES in needs:
        mask_BT = mask_BT & _finite(inputs.logp_sources_BTK).all(dim=-1)

    def safe(value_BT: Tensor) -> Tensor:
        wide_BT = value_BT if value_BT.dtype == torch.float64 else value_BT.float()
        return torch.where(mask_BT if wide_BT.ndim == 2 else mask_BT.unsqueeze(-1), wide_BT, 0.0)

    found: dict[str, Any] = {}
    for need, name in FIELD_OF_NEED.items():
        value = getattr(inputs, name) if need in needs else None
        if value is not None and name not in _INTEGER_FIELDS:
            value = safe(value.detach()) if value.ndim > 1 else value.detach()
        found[name] = value
    return LossInputs(
        mask_BT=mask_BT,
        logp_learner_BT=safe(inputs.logp_learner_BT),
        logp_behaviour_BT=safe(inputs.logp_behaviour_BT.detach()) if reads_behaviour else inputs.logp_behaviour_BT,
        advantage_BT=safe(inputs.advantage_BT.detach()),
        log_share_BK=inputs.log_share_BK.detach() if found["logp_sources_BTK"] is not None else None,  # type: ignore[union-attr]
        **found,
    )


def _finite(value: Tensor) -> Tensor:
    """`torch.isfinite` at half its cost."""
    return value.abs() < float("inf")
