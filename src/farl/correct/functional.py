"""Each corrector as one plain function with a scalar result, for training loops that are not ours.

    loss = farl.correct.icepop(logp_learner, logp_behaviour, advantage, mask, logp_proximal=old, cap=5.0)

All share one signature: nats [B, T], bool mask [B, T], what else the corrector needs by name, then its options.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from farl.correct.base import LossInputs
from farl.correct.catalogue import CORRECTORS, create
from farl.errors import ConfigError


class LossFunction(Protocol):
    """A corrector as a function.

    Args:
        logp_learner: nats [B, T] of the sampled tokens under the learner; the gradient flows through it alone.
        logp_behaviour: nats [B, T] reported by the sampler.
        advantage: [B, T], or [B] for one value a sequence.
        mask: bool [B, T], True on tokens that are trained on.
        logp_proximal: nats [B, T] under the anchor of the trust region.
        reward: [B].
        group: int64 [B], prompt of each sequence; any ids.
        lag: int64 [B, T] versions.
        gradient_norm: [B], of each trajectory's log-prob.
        logp_sources: nats [B, T, K] under each behaviour policy of the batch.
        log_share: [B, K], log of each policy's share of the batch.
        options: those of the factory of the same name.

    Returns:
        The loss to be minimised, a scalar, of the whole batch. What is no part of a loss, the step scale of `vcpo`,
        takes `create(name, ...)` and its `prepare` and `step_scale`.

    Raises:
        ConfigError: for something the corrector needs and did not get, or an option that cannot work.
        ShapeError: for tensors that do not fit each other.
    """

    def __call__(
        self,
        logp_learner: Tensor,
        logp_behaviour: Tensor,
        advantage: Tensor,
        mask: Tensor,
        *,
        logp_proximal: Tensor | None = None,
        reward: Tensor | None = None,
        group: Tensor | None = None,
        lag: Tensor | None = None,
        gradient_norm: Tensor | None = None,
        logp_sources: Tensor | None = None,
        log_share: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The loss, with its graph."""


def _function(name: str) -> LossFunction:
    def loss(
        logp_learner: Tensor,
        logp_behaviour: Tensor,
        advantage: Tensor,
        mask: Tensor,
        *,
        logp_proximal: Tensor | None = None,
        reward: Tensor | None = None,
        group: Tensor | None = None,
        lag: Tensor | None = None,
        gradient_norm: Tensor | None = None,
        logp_sources: Tensor | None = None,
        log_share: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        corrector = create(name, **options)
        if "step_scale" in options:
            raise ConfigError(
                f"step_scale={options['step_scale']!r}: no part of a loss; scale the learning rate by "
                f"corrector.step_scale(corrector.prepare(inputs)) of farl.correct.create({name!r}, ...)"
            )
        if group is not None:
            group = torch.unique(group, return_inverse=True)[1]
        if advantage.ndim == 1:
            advantage = advantage.unsqueeze(1).expand_as(logp_learner)
        inputs = LossInputs(
            logp_learner_BT=logp_learner,
            logp_behaviour_BT=logp_behaviour,
            mask_BT=mask,
            advantage_BT=advantage,
            logp_proximal_BT=logp_proximal,
            reward_B=reward,
            group_B=group,
            lag_BT=lag,
            gradient_norm_B=gradient_norm,
            logp_sources_BTK=logp_sources,
            log_share_BK=log_share,
        )
        return corrector.loss(inputs)

    loss.__name__ = loss.__qualname__ = name
    loss.__doc__ = CORRECTORS[name].__doc__
    return loss


none = _function("none")
ppo = _function("ppo")
dual_clip_ppo = _function("dual_clip_ppo")
dapo = _function("dapo")
decoupled_ppo = _function("decoupled_ppo")
a3po = _function("a3po")
tis = _function("tis")
mis = _function("mis")
icepop = _function("icepop")
cispo = _function("cispo")
gspo = _function("gspo")
gmpo = _function("gmpo")
sapo = _function("sapo")
m2po = _function("m2po")
dppo = _function("dppo")
topr = _function("topr")
vcpo = _function("vcpo")
vespo = _function("vespo")
bapo = _function("bapo")
aspo = _function("aspo")
opsm = _function("opsm")
opmd = _function("opmd")
dro = _function("dro")
glm5 = _function("glm5")
matched_replay = _function("matched_replay")
