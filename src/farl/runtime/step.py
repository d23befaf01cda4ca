"""One learner update: corrected loss over micro-batches, optimizer step, and the stale probe.

Suffixes: B sequences, T completion positions, P groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farl.core.logprobs import policy_distance
from farl.core.protocols import Policy
from farl.core.types import PolicyStamp, TrainBatch
from farl.correct import Corrector, LossInputs, LossOutput, Need, diagnose
from farl.errors import FarlError
from farl.forecast import Forecaster
from farl.runtime.config import LoopConfig, OptimizerConfig


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


def micro_slices(num_groups: int, micro_groups: int | None) -> Iterator[tuple[int, int]]:
    """Contiguous group ranges of at most `micro_groups` groups."""
    size = micro_groups or num_groups
    for start in range(0, num_groups, size):
        yield start, min(start + size, num_groups)


@torch.no_grad()
def evaluate_logp(policy: Policy, batch: TrainBatch, config: LoopConfig) -> Tensor:
    """Log-probs of a batch under the policy's present weights, without gradient, float32 [B, T]."""
    parts = [
        policy.logp(batch.select_groups(a, b), temperature=config.rollout.temperature)
        for a, b in micro_slices(batch.num_prompts, config.learner.micro_groups)
    ]
    return torch.cat(parts)


def loss_inputs(batch: TrainBatch, logp_learner_BT: Tensor, logp_proximal_BT: Tensor | None) -> LossInputs:
    """What a corrector sees of a batch."""
    return LossInputs(
        logp_learner_BT=logp_learner_BT,
        logp_behaviour_BT=batch.logp_behaviour_BT,
        logp_proximal_BT=logp_proximal_BT,
        mask_BT=batch.mask_BT,
        advantage_BT=batch.advantage_BT,
        reward_B=batch.reward_B,
        group_B=batch.group_B,
        lag_BT=batch.lag_BT,
    )


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    corrector: Corrector,
    batch: TrainBatch,
    *,
    logp_proximal_BT: Tensor | None,
    config: LoopConfig,
    lr: float,
    before_step: Callable[[Tensor], None] | None = None,
) -> Update:
    """Makes one optimizer step from one minibatch.

    Args:
        policy: the learner.
        optimizer: owns its parameters.
        corrector: turns log-probs and advantages into a loss.
        batch: the minibatch.
        logp_proximal_BT: log-probs under the weights at the start of the batch; None lets the learner's own
            stand in, which is exact for the first update of a batch.
        config: temperature, micro-batches, clipping.
        lr: learning rate of this step.
        before_step: called with the learner's log-probs while the weights are still those that made them.

    Returns:
        The outcome. Gradients that are not finite leave the weights, the optimizer and the version alone.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    context = None
    if Need.BATCH_STATISTICS in corrector.needs:
        before_BT = evaluate_logp(policy, batch, config)
        proximal_BT = before_BT if logp_proximal_BT is None else logp_proximal_BT
        context = corrector.prepare(loss_inputs(batch, before_BT, proximal_BT))
    denominator = corrector.denominator(batch.mask_BT, context)
    outputs: list[LossOutput] = []
    logps: list[Tensor] = []
    loss_value = 0.0
    for start, stop in micro_slices(batch.num_prompts, config.learner.micro_groups):
        rows_B = (batch.group_B >= start) & (batch.group_B < stop)
        micro = batch.select_groups(start, stop)
        logp_BT = policy.logp(micro, temperature=config.rollout.temperature)
        anchor_BT = logp_BT.detach() if logp_proximal_BT is None else logp_proximal_BT[rows_B]
        output = corrector(loss_inputs(micro, logp_BT, anchor_BT), context)
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
    metrics = diagnose(
        loss_inputs(batch, logp_learner_BT, None), _join(outputs), lag_BT=batch.lag_BT, miss_BT=batch.miss_BT
    )
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
        weight_BT=torch.cat([o.weight_BT for o in outputs]),
    )


def probe_groups(num_groups: int, fraction: float, version: int) -> tuple[int, int]:
    """Contiguous groups to probe: at least one, at another place for each version."""
    count = min(num_groups, max(1, round(fraction * num_groups)))
    start = (version * count) % (num_groups - count + 1)
    return start, start + count


def stale_probe(
    policy: Policy,
    forecaster: Forecaster,
    batch: TrainBatch,
    logp_learner_BT: Tensor,
    stamp: PolicyStamp,
    damping: float,
    config: LoopConfig,
) -> dict[str, float]:
    """Measures what policy distance the same tokens would have had under stale weights, and tells the gate.

    Call it before the optimizer steps: the forecaster must still hold the version that consumed the batch.

    Args:
        policy: the learner.
        forecaster: holds the displacements back to the dispatch.
        batch: the minibatch.
        logp_learner_BT: its log-probs under the learner before the step.
        stamp: of the policy that drew it.
        damping: of the plan that drew it.
        config: fraction of the groups to probe.

    Returns:
        `policy/kl_probe_nats`, `policy/kl_stale_nats` and so on; for trajectories that stale weights drew
        both are the same measurement and no forward pass is made.
    """
    if config.learner.probe_fraction == 0:
        return {}
    start_s = time.monotonic()
    start, stop = probe_groups(batch.num_prompts, config.learner.probe_fraction, forecaster.version)
    rows_B = (batch.group_B >= start) & (batch.group_B < stop)
    part = batch.select_groups(start, stop)
    learner_BT = logp_learner_BT[rows_B]
    stale_BT = part.logp_behaviour_BT
    if stamp.is_forecast:
        with forecaster.presented(forecaster.past_weights(forecaster.version - stamp.base_version)):
            stale_BT = evaluate_logp(policy, part, config)
        forecaster.probe(
            plan_damping=damping,
            logp_learner_BT=learner_BT,
            logp_forecast_BT=part.logp_behaviour_BT,
            logp_stale_BT=stale_BT,
            mask_BT=part.mask_BT,
        )
    mine = policy_distance(learner_BT, part.logp_behaviour_BT, part.mask_BT)
    stale = policy_distance(learner_BT, stale_BT, part.mask_BT)
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
