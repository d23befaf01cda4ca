"""One learner update: corrected loss over micro-batches, optimizer step, and the stale probe.

Suffixes: B sequences, T completion positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farl.core.logprobs import policy_distance
from farl.core.protocols import Policy
from farl.core.types import DTYPES
from farl.correct import Corrector, LossOutput, Need, diagnose
from farl.errors import FarlError
from farl.forecast import Forecaster, ForecastPlan
from farl.runtime.config import LoopConfig, OptimizerConfig
from farl.runtime.needs import Minibatch, evaluate_logp, gradient_norms, micro_slices


@dataclass(frozen=True, kw_only=True)
class Update:
    """The outcome of one learner update.

    Attributes:
        stepped: False when a gradient was not finite and the optimizer was left alone.
        metrics: by the names of `docs/metrics.md`.
    """

    stepped: bool
    metrics: dict[str, float]


def make_optimizer(policy: Policy, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters that require gradients."""
    parameters = [p for p in policy.module.parameters() if p.requires_grad]
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.beta1, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    corrector: Corrector,
    mini: Minibatch,
    *,
    config: LoopConfig,
    lr: float,
    before_step: Callable[[Tensor], None] | None = None,
) -> Update:
    """Makes one optimizer step from one minibatch.

    Args:
        policy: the learner.
        optimizer: owns its parameters.
        corrector: turns log-probs and advantages into a loss.
        mini: the minibatch.
        config: temperature, micro-batches, clipping.
        lr: learning rate of this step, before the corrector's own scale.
        before_step: called with the learner's log-probs while the weights are still those that made them.

    Returns:
        The outcome. Gradients that are not finite leave the weights, the optimizer and the version alone.
    """
    batch = mini.batch
    optimizer.zero_grad(set_to_none=True)
    norms_B = gradient_norms(policy, batch, config) if Need.GRADIENT_NORM in corrector.needs else None
    known = mini.loss_inputs(batch.logp_behaviour_BT, gradient_norm_B=norms_B)
    slices = list(micro_slices(batch.num_prompts, config.learner.micro_groups))
    context = whole_BT = None
    if Need.BATCH_STATISTICS in corrector.needs:
        if len(slices) == 1:  # the pass that makes the gradient sees the whole batch
            whole_BT = policy.logp(batch, temperature=config.rollout.temperature)
            before_BT = whole_BT.detach()
        else:
            before_BT = evaluate_logp(policy, batch, config)
        context = corrector.prepare(mini.loss_inputs(before_BT, gradient_norm_B=norms_B))
    lr *= corrector.step_scale(context)
    for group in optimizer.param_groups:
        group["lr"] = lr
    denominator = corrector.denominator(batch.mask_BT, context)
    outputs: list[LossOutput] = []
    logps: list[Tensor] = []
    loss_value = 0.0
    for start, stop in slices:
        rows_B = (batch.group_B >= start) & (batch.group_B < stop)
        micro = batch.select_groups(start, stop)
        logp_BT = policy.logp(micro, temperature=config.rollout.temperature) if whole_BT is None else whole_BT
        inputs = replace(known.select(rows_B), logp_learner_BT=logp_BT)
        if mini.logp_proximal_BT is None:
            inputs = replace(inputs, logp_proximal_BT=logp_BT.detach())
        output = corrector(inputs, context)
        loss = corrector.aggregate(output, micro.mask_BT, denominator)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_value += float(loss.detach())
        outputs.append(output)
        logps.append(logp_BT.detach())
    logp_learner_BT = torch.cat(logps)
    grad_norm = _clip_gradients(policy, config.optimizer.max_grad_norm)
    stepped = math.isfinite(grad_norm) and math.isfinite(loss_value)
    if before_step:
        before_step(logp_learner_BT)
    if stepped:
        optimizer.step()
    metrics = diagnose(mini.loss_inputs(logp_learner_BT), _join(outputs), lag_BT=batch.lag_BT, miss_BT=batch.miss_BT)
    metrics |= {"loss/value": loss_value, "optim/grad_norm": grad_norm, "optim/lr": lr}
    return Update(stepped=stepped, metrics=metrics)


def _clip_gradients(policy: Policy, max_norm: float) -> float:
    gradients = [p.grad for p in policy.module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0 and bool(torch.isfinite(norm)) and float(norm) > max_norm:
        torch._foreach_mul_(gradients, max_norm / float(norm))
    return float(norm)


def _join(outputs: list[LossOutput]) -> LossOutput:
    return LossOutput(
        token_loss_BT=torch.cat([o.token_loss_BT.detach() for o in outputs]),
        keep_BT=torch.cat([o.keep_BT for o in outputs]),
        clipped_BT=torch.cat([o.clipped_BT for o in outputs]),
        factor_BT=torch.cat([o.factor_BT.expand_as(o.keep_BT) for o in outputs]),
    )


def probe_groups(num_groups: int, fraction: float, version: int) -> tuple[int, int] | None:
    """Contiguous groups to probe at a version, at another place each time; None where it is not its turn.

    A share of less than one group is amortised: one group every `1 / (fraction * num_groups)` versions.
    """
    if fraction == 0:
        return None
    if fraction * num_groups < 1:
        every = round(1 / (fraction * num_groups))
        turn, off = divmod(version, every)
        return None if off else (turn % num_groups, turn % num_groups + 1)
    count = min(num_groups, round(fraction * num_groups))
    start = (version * count) % (num_groups - count + 1)
    return start, start + count


def stale_probe(
    policy: Policy,
    forecaster: Forecaster,
    mini: Minibatch,
    logp_learner_BT: Tensor,
    plan: ForecastPlan,
    config: LoopConfig,
) -> dict[str, float]:
    """Measures what policy distance the same tokens would have had under stale weights, and tells the gate.

    Where the forecast was held, the tokens are of stale weights already, and the pass looks at the forecast that was
    kept back. Call it before the optimizer steps: the forecaster must still hold the version that consumed the batch.

    Args:
        policy: the learner.
        forecaster: holds the displacements back to the dispatch.
        mini: the minibatch; only its fresh groups are probed.
        logp_learner_BT: its log-probs under the learner before the step.
        plan: that drew the fresh groups.
        config: fraction of the groups to probe.

    Returns:
        `policy/kl_probe_nats`, `policy/kl_stale_nats` and so on; for trajectories that stale weights drew
        both are the same measurement.
    """
    groups = probe_groups(mini.num_fresh, config.learner.probe_fraction, forecaster.version)
    if groups is None:
        return {}
    start_s = time.monotonic()
    batch = mini.batch
    rows_B = (batch.group_B >= groups[0]) & (batch.group_B < groups[1])
    part = batch.select_groups(*groups)
    learner_BT, stale_BT = logp_learner_BT[rows_B], part.logp_behaviour_BT
    known_BT = part.mask_BT & torch.isfinite(part.logp_behaviour_BT)
    if forecaster.can_probe(plan):
        wire_dtype = DTYPES[config.pipeline.wire_dtype]
        with forecaster.presented(forecaster.probe_weights(plan, dtype=wire_dtype)):
            probe_BT = evaluate_logp(policy, part, config)
        forecaster.probe(
            plan,
            logp_learner_BT=learner_BT,
            logp_behaviour_BT=part.logp_behaviour_BT,
            logp_probe_BT=probe_BT,
            mask_BT=known_BT,
        )
        stale_BT = probe_BT if plan.moves else stale_BT
    elif plan.moves:
        return {}  # history does not reach back to the dispatch: nothing to compare with
    mine = policy_distance(learner_BT, part.logp_behaviour_BT, known_BT)
    stale = policy_distance(learner_BT, stale_BT, known_BT)
    return {
        "policy/kl_probe_nats": mine.kl_nats,
        "policy/kl_stale_nats": stale.kl_nats,
        "policy/ess_probe_fraction": mine.ess_fraction,
        "policy/ess_stale_fraction": stale.ess_fraction,
        "policy/weight_variance_probe": mine.weight_variance,
        "policy/weight_variance_stale": stale.weight_variance,
        "time/probe_s": time.monotonic() - start_s,
    }


class SkipCounter:
    """Counts updates skipped for non-finite gradients, and ends a run that does nothing else.

    Args:
        max_consecutive: skips in a row that are tolerated.
    """

    def __init__(self, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._in_a_row = 0
        self.total = 0

    def note(self, stepped: bool) -> None:
        """Counts one update."""
        self._in_a_row = 0 if stepped else self._in_a_row + 1
        self.total += not stepped

    def refuse(self) -> None:
        """Raises `FarlError` after more than `max_consecutive` skips in a row; call it at a batch boundary."""
        if self._in_a_row > self._max_consecutive:
            raise FarlError(
                f"gradients were not finite for {self._in_a_row} updates in a row (optimizer.max_skipped="
                f"{self._max_consecutive}); lower optimizer.lr or look at the rewards"
            )
