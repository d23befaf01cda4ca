"""Each corrector as one plain function with a scalar result, for training loops that are not ours.

All take nats [B, T] and a bool mask [B, T]; the gradient flows through `logp_learner` alone. Options are those of the
factory of the same name in `catalogue`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from farl.correct import catalogue
from farl.correct.base import Corrector, LossInputs


def none(logp_learner: Tensor, advantage: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Plain policy gradient; see `catalogue.none`."""
    return _loss(catalogue.none(**options), logp_learner, logp_learner, None, advantage, mask)


def ppo(logp_learner: Tensor, logp_anchor: Tensor, advantage: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """PPO clip of learner / anchor, the anchor being the behaviour or the proximal policy; see `catalogue.ppo`."""
    return _loss(catalogue.ppo(**options), logp_learner, logp_anchor, logp_anchor, advantage, mask)


def dapo(logp_learner: Tensor, logp_anchor: Tensor, advantage: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """DAPO's clip-higher; see `catalogue.dapo`."""
    return _loss(catalogue.dapo(**options), logp_learner, logp_anchor, logp_anchor, advantage, mask)


def decoupled_ppo(
    logp_learner: Tensor,
    logp_behaviour: Tensor,
    logp_proximal: Tensor,
    advantage: Tensor,
    mask: Tensor,
    **options: Any,
) -> Tensor:
    """Decoupled PPO; see `catalogue.decoupled_ppo`."""
    corrector = catalogue.decoupled_ppo(**options)
    return _loss(corrector, logp_learner, logp_behaviour, logp_proximal, advantage, mask)


def tis(
    logp_learner: Tensor,
    logp_behaviour: Tensor,
    logp_proximal: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    **options: Any,
) -> Tensor:
    """Truncated importance sampling; `logp_proximal` may be None with `base="policy_gradient"`. See `catalogue.tis`."""
    return _loss(catalogue.tis(**options), logp_learner, logp_behaviour, logp_proximal, advantage, mask)


def _loss(
    corrector: Corrector,
    logp_learner: Tensor,
    logp_behaviour: Tensor,
    logp_proximal: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
) -> Tensor:
    inputs = LossInputs(
        logp_learner_BT=logp_learner,
        logp_behaviour_BT=logp_behaviour,
        logp_proximal_BT=logp_proximal,
        advantage_BT=advantage,
        mask_BT=mask,
    )
    context = corrector.prepare(inputs)
    return corrector.aggregate(corrector(inputs, context), mask, corrector.denominator(mask, context))
