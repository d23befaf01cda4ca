"""Conformance laws that every corrector obeys, for those of the catalogue and for your own.

    from farl.testing import check_corrector
    check_corrector(my_factory, cap=2.0)

A law that does not apply to a corrector is listed, with the reason, in its `Corrector.exempt`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from farl.correct import Corrector, LossInputs, Need
from farl.correct.base import FIELD_OF_NEED
from farl.correct.reduce import reduce
from farl.correct.weighting import none as plain_policy_gradient
from farl.errors import ConfigError, ConformanceError

_TOLERANCE = 1e-11


def example_inputs(
    seed: int = 0,
    *,
    sequences: int = 6,
    width: int = 5,
    spread: float = 0.3,
    dtype: torch.dtype = torch.float64,
    on_policy: bool = False,
) -> LossInputs:
    """Random inputs with everything any corrector may need: groups of two, lags 0 to 3, two behaviour policies.

    Args:
        seed: of the draws.
        sequences: B, even.
        width: T; sequences have from 1 to T tokens.
        spread: standard deviation of the log-ratio of learner and behaviour, nats.
        dtype: of the floating tensors.
        on_policy: whether all policies are the learner.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    learner_BT = -draw(sequences, width).abs() - 0.1
    noise = 0.0 if on_policy else spread
    behaviour_BT = (learner_BT + noise * draw(sequences, width)).clamp(max=-1e-3)
    other_BT = (learner_BT + noise * draw(sequences, width)).clamp(max=-1e-3)
    if on_policy:
        behaviour_BT, other_BT = learner_BT.clone(), learner_BT.clone()
    first_B1 = (torch.arange(sequences) % 3 < 2).unsqueeze(1)
    share = first_B1.double().mean()
    length_B = torch.randint(1, width + 1, (sequences,), generator=generator)
    reward_B = torch.rand(sequences, generator=generator, dtype=dtype)
    advantage_B = reward_B - reward_B.view(-1, 2).mean(dim=1).repeat_interleave(2)
    return LossInputs(
        logp_learner_BT=learner_BT.clone().requires_grad_(),
        logp_behaviour_BT=behaviour_BT,
        logp_proximal_BT=learner_BT.clone() if on_policy else learner_BT + spread / 2 * draw(sequences, width),
        logp_reference_BT=learner_BT.clone(),
        mask_BT=torch.arange(width) < length_B[:, None],
        advantage_BT=advantage_B.unsqueeze(1).expand(sequences, width).contiguous(),
        reward_B=reward_B,
        group_B=torch.arange(sequences) // 2,
        lag_BT=torch.randint(0, 4, (sequences, width), generator=generator),
        gradient_norm_B=draw(sequences).abs() + 0.1,
        logp_sources_BTK=torch.stack(
            [torch.where(first_B1, behaviour_BT, other_BT), torch.where(first_B1, other_BT, behaviour_BT)], dim=-1
        ),
        log_share_BK=torch.stack([share, 1 - share]).log().to(dtype).expand(sequences, 2).contiguous(),
    )


def check_corrector(corrector: Corrector | Callable[..., Corrector], **options: object) -> tuple[str, ...]:
    """Checks a corrector, or what a factory makes of options, against every law.

    Returns:
        Names of the laws that were checked; those in `exempt` are left out.

    Raises:
        ConformanceError: naming every law that is broken, and how.
    """
    made = corrector if isinstance(corrector, Corrector) else corrector(**options)
    exempt = dict(made.exempt)
    if unknown := exempt.keys() - LAWS.keys():
        raise ConfigError(f"exempt={sorted(unknown)}: no such laws; known: {', '.join(LAWS)}")
    broken = []
    for name, law in LAWS.items():
        if name not in exempt:
            try:
                law(made)
            except ConformanceError as error:
                broken.append(f"{name}: {error}")
    if broken:
        raise ConformanceError(f"corrector {made.name!r} breaks {len(broken)} laws\n  " + "\n  ".join(broken))
    return tuple(name for name in LAWS if name not in exempt)


def _require(condition: bool | Tensor, message: str) -> None:
    if not bool(condition):
        raise ConformanceError(message)


def _gradient(corrector: Corrector, inputs: LossInputs) -> Tensor:
    (gradient_BT,) = torch.autograd.grad(
        corrector.loss(inputs), inputs.logp_learner_BT, allow_unused=True, materialize_grads=True
    )
    return gradient_BT


def _policy_gradient_part(corrector: Corrector, inputs: LossInputs) -> Tensor:
    """The gradient without that of the penalty."""
    context = corrector.prepare(inputs)
    output = corrector(inputs, context)
    if output.penalty_BT is not None:
        output = replace(output, token_loss_BT=output.token_loss_BT - output.penalty_BT)
    loss = corrector.aggregate(output, inputs.mask_BT, corrector.denominator(inputs.mask_BT, context))
    (gradient_BT,) = torch.autograd.grad(loss, inputs.logp_learner_BT, allow_unused=True, materialize_grads=True)
    return gradient_BT


def padding(corrector: Corrector) -> None:
    """What stands outside the mask changes neither value nor gradient, be it NaN, nor does a row without tokens."""
    inputs = example_inputs()
    empty_row = 3
    mask_BT = inputs.mask_BT.clone()
    mask_BT[empty_row] = False
    inputs = replace(inputs, mask_BT=mask_BT)
    value, gradient_BT = corrector.loss(inputs), _gradient(corrector, inputs)
    _require(not gradient_BT[~inputs.mask_BT].any(), "padding has a gradient")
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {}
        for f in fields(LossInputs):
            tensor = getattr(inputs, f.name)
            if f.name.rsplit("_", 1)[1] in ("BT", "BTK") and tensor.is_floating_point():
                mask = inputs.mask_BT if tensor.ndim == 2 else inputs.mask_BT.unsqueeze(-1)
                dirty[f.name] = torch.where(mask, tensor.detach(), garbage)
            elif f.name in ("reward_B", "gradient_norm_B"):
                dirty[f.name] = tensor.clone()
                dirty[f.name][empty_row] = garbage
        other = replace(inputs, **dirty)
        other.logp_learner_BT.requires_grad_()
        _require(torch.equal(corrector.loss(other), value), f"{garbage} at padding changes the loss")
        _require(torch.equal(_gradient(corrector, other), gradient_BT), f"{garbage} at padding changes the gradient")


def on_policy(corrector: Corrector) -> None:
    """Where all policies are the learner, the gradient is `on_policy_scale` times the plain policy gradient."""
    inputs = example_inputs(on_policy=True)
    plain = plain_policy_gradient(reduction=corrector.reduction, horizon=corrector.horizon)
    expected_BT = corrector.on_policy_scale * _gradient(plain, inputs)
    _close(_gradient(corrector, inputs), expected_BT, "on-policy gradient is not the plain policy gradient")


def zero_advantage(corrector: Corrector) -> None:
    """Without advantage there is no gradient but a penalty's."""
    inputs = example_inputs()
    inputs = replace(inputs, advantage_BT=torch.zeros_like(inputs.advantage_BT))
    _require(not _policy_gradient_part(corrector, inputs).any(), "zero advantage has a gradient")


def micro_batches(corrector: Corrector) -> None:
    """The losses of micro-batches, with the context of the whole batch, add up to the batch's."""
    inputs = example_inputs(sequences=8)
    advantage_BT = inputs.advantage_BT.clone()
    advantage_BT[1] = 0.0  # of a group that is in use
    inputs = replace(inputs, advantage_BT=advantage_BT)
    context = corrector.prepare(inputs)
    denominator = corrector.denominator(inputs.mask_BT, context)
    whole, gradient_BT = corrector.loss(inputs), _gradient(corrector, inputs)
    for cuts in ((0, 1, 4, 8), (0, 2, 4, 6, 8), (0, 7, 8)):
        total = torch.zeros((), dtype=torch.float64)
        for start, stop in itertools.pairwise(cuts):
            part = inputs.select(slice(start, stop))
            total = total + corrector.aggregate(corrector(part, context), part.mask_BT, denominator)
        _close(total, whole, "micro-batches do not add up to the batch")
        split_BT = torch.autograd.grad(total, inputs.logp_learner_BT)[0]
        _close(split_BT, gradient_BT, "micro-batches change the gradient")


def order(corrector: Corrector) -> None:
    """Permuting sequences permutes the token losses and changes nothing else."""
    inputs = example_inputs()
    rows = torch.tensor([3, 0, 5, 1, 4, 2])
    moved_BT = corrector(inputs.select(rows)).token_loss_BT
    _close(moved_BT, corrector(inputs).token_loss_BT[rows], "token losses depend on the order of the sequences")


def dropped(corrector: Corrector) -> None:
    """Dropped and clipped tokens have no gradient but a penalty's, and are marked as such."""
    inputs = example_inputs(spread=1.5)
    output, gradient_BT = corrector(inputs), _policy_gradient_part(corrector, inputs)
    _require(not gradient_BT[~output.keep_BT].any(), "a dropped token has a gradient")
    _require(not gradient_BT[output.clipped_BT].any(), "a clipped token has a gradient")
    _require(not output.weight_BT[~output.keep_BT].any(), "a dropped token has a weight")
    _require(not (output.keep_BT & ~inputs.mask_BT).any(), "a token outside the mask is kept")
    _require(not (output.clipped_BT & ~output.keep_BT).any(), "a dropped token counts as clipped")


def weight(corrector: Corrector) -> None:
    """`weight_BT` is what multiplies `-advantage grad logp` of a live token."""
    for seed, spread in ((0, 0.3), (1, 1.5)):
        inputs = example_inputs(seed, spread=spread)
        context = corrector.prepare(inputs)
        output, gradient_BT = corrector(inputs, context), _policy_gradient_part(corrector, inputs)
        counted_BT = inputs.mask_BT if corrector.denominator_rule == "original" else output.keep_BT
        ones_BT = torch.ones_like(inputs.advantage_BT, requires_grad=True)
        unit = reduce(ones_BT, counted_BT, corrector.reduction, corrector.denominator(inputs.mask_BT, context))
        unit_BT = torch.autograd.grad(unit, ones_BT)[0]
        live_BT = output.keep_BT & ~output.clipped_BT
        expected_BT = -inputs.advantage_BT * output.weight_BT * unit_BT
        _close(gradient_BT[live_BT], expected_BT[live_BT], "weight_BT is not the factor of A grad logp")


def finite(corrector: Corrector) -> None:
    """Loss and gradient are finite at ratios of exp(-300) and exp(300) to the behaviour or the proximal policy."""
    names = ("logp_behaviour_BT", "logp_sources_BTK"), ("logp_proximal_BT",)
    for shift, moved in itertools.product((300.0, -300.0), names):
        inputs = example_inputs(dtype=torch.float32)
        inputs = replace(inputs, **{name: getattr(inputs, name) + shift for name in moved})
        _require(torch.isfinite(corrector.loss(inputs)), f"loss not finite with {moved[0]} off by {shift}")
        _require(
            torch.isfinite(_gradient(corrector, inputs)).all(), f"gradient not finite with {moved[0]} off by {shift}"
        )


def detached(corrector: Corrector) -> None:
    """No gradient reaches any policy but the learner, and no input is modified."""
    inputs = example_inputs()
    names = [f.name for f in fields(LossInputs) if f.name not in ("mask_BT", "group_B", "lag_BT")]
    tensors = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in names}
    inputs = replace(inputs, **tensors)
    copies = {f.name: getattr(inputs, f.name).detach().clone() for f in fields(LossInputs)}
    loss = corrector.loss(inputs)
    others = {name: tensor for name, tensor in tensors.items() if name != "logp_learner_BT"}
    for name, gradient in zip(others, torch.autograd.grad(loss, list(others.values()), allow_unused=True), strict=True):
        _require(gradient is None, f"a gradient reaches {name}")
    for name, copy in copies.items():
        _require(torch.equal(getattr(inputs, name), copy), f"{name} was modified")


def half_precision(corrector: Corrector) -> None:
    """Log-probs in bfloat16 are computed in float32, with the value of the same numbers given in float32."""
    inputs = example_inputs(dtype=torch.float32)

    def cast(dtype: torch.dtype) -> LossInputs:
        values = {f.name: getattr(inputs, f.name) for f in fields(LossInputs)}
        return LossInputs(
            **{n: v.detach().bfloat16().to(dtype) if v.is_floating_point() else v for n, v in values.items()}
        )

    output = corrector(cast(torch.bfloat16))
    _require(output.token_loss_BT.dtype == torch.float32, f"token losses are {output.token_loss_BT.dtype}")
    _require(torch.equal(output.token_loss_BT, corrector(cast(torch.float32)).token_loss_BT), "rounded on the way")


def empty(corrector: Corrector) -> None:
    """A batch with every token masked has loss 0 and gradient 0."""
    inputs = example_inputs()
    inputs = replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    _require(corrector.loss(inputs) == 0, "an empty batch has a loss")
    _require(not _gradient(corrector, inputs).any(), "an empty batch has a gradient")


def needs(corrector: Corrector) -> None:
    """What is listed in `needs` is refused when missing, by name; what is not listed may be missing."""
    inputs = example_inputs()
    for need, name in FIELD_OF_NEED.items():
        missing: dict[str, Any] = {name: None}
        if need is Need.SOURCES:
            missing["log_share_BK"] = None
        without = replace(inputs, **missing)
        if need not in corrector.needs:
            corrector(without)
            continue
        try:
            corrector(without)
        except ConfigError as error:
            _require(name in str(error), f"the error for a missing {name} does not name it: {error}")
        else:
            raise ConformanceError(f"{name} is needed, and missing it goes unnoticed")


def lost_log_probs(corrector: Corrector) -> None:
    """A token without a finite behaviour (or needed proximal) log-prob is dropped; others keep a finite gradient."""
    names = ["logp_behaviour_BT", *(["logp_proximal_BT"] if Need.PROXIMAL in corrector.needs else [])]
    for odd, name in itertools.product((math.nan, math.inf, -math.inf), names):
        inputs = example_inputs()
        lost_BT = getattr(inputs, name).clone()
        lost_BT[:, 0] = odd
        inputs = replace(inputs, **{name: lost_BT})
        output, gradient_BT = corrector(inputs), _gradient(corrector, inputs)
        _require(not output.keep_BT[:, 0].any(), f"a token with {name} {odd} is kept")
        _require(not gradient_BT[:, 0].any(), f"a token with {name} {odd} has a gradient")
        _require(torch.isfinite(gradient_BT).all(), f"{name} {odd} spoils other tokens")


def _close(got: Tensor, expected: Tensor, message: str) -> None:
    got, expected = got.detach().double(), expected.detach().double()
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1.0)
    worst = float((got - expected).abs().max()) if got.numel() else 0.0
    _require(worst <= _TOLERANCE * scale, f"{message} (largest difference {worst:.3g})")


LAWS: Mapping[str, Callable[[Corrector], None]] = {
    "padding": padding,
    "on_policy": on_policy,
    "zero_advantage": zero_advantage,
    "micro_batches": micro_batches,
    "order": order,
    "dropped": dropped,
    "weight": weight,
    "finite": finite,
    "detached": detached,
    "half_precision": half_precision,
    "empty": empty,
    "needs": needs,
    "lost_log_probs": lost_log_probs,
}
"""Every law by name; a corrector may list names in `exempt`, with reasons."""
