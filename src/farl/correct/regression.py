"""Correctors that regress the policy on its advantage, with a pull towards the policy that drew the data."""

from __future__ import annotations

from typing import Literal

from farl.correct import check
from farl.correct.base import Corrector
from farl.correct.clipping import Anchor, anchored
from farl.correct.reduce import Reduction
from farl.correct.surrogate import mirror_descent, policy_gradient, pulled


def opmd(
    *,
    tau: float = 0.1,
    form: Literal["squared", "token"] = "squared",
    anchor: Anchor = "behaviour",
    reduction: Reduction | None = None,
    horizon: int | None = None,
) -> Corrector:
    """Policy mirror descent (Kimi k1.5): squared regression of each response's advantage on its log-ratio.

    The advantage is reward minus group mean; leave it undivided (`learner.advantage = "group_mean"`) for the published
    form. `form="token"` is ROLL's, -A lp + tau / 2 (lp - lp_anchor)^2 for each token. tau is ROLL's; Kimi's is not
    published. The squared form is a sum over tokens and a mean over sequences.

    Source: arXiv 2501.12599 eq. 3, 2602.05933; ROLL _compute_kimi15_loss.
    """
    check.positive(tau=tau)
    check.one_of("form", form, ("squared", "token"))
    policy, needs = anchored(anchor)
    squared = form == "squared"
    default: Reduction = "sequence_mean_token_sum" if squared else "token_mean"
    return Corrector(
        name="opmd",
        needs=needs,
        surrogate=mirror_descent(policy, tau) if squared else pulled(policy_gradient("score"), policy, tau / 2),
        reduction=reduction or default,
        horizon=horizon,
        on_policy_scale=2 * tau if squared else 1.0,
    )


def dro(
    *,
    beta: float = 0.05,
    anchor: Anchor = "behaviour",
    reduction: Reduction = "token_mean",
    horizon: int | None = None,
) -> Corrector:
    """Direct reward optimisation: score function with a quadratic pull, -A lp + beta / 2 (lp - lp_anchor)^2.

    verl has no default for beta and refuses to run without; 0.05 is the example of the tinker documentation.

    Source: arXiv 2405.19107; verl 0.9.1 compute_policy_loss_dro.
    """
    check.positive(beta=beta)
    policy, needs = anchored(anchor)
    return Corrector(
        name="dro",
        needs=needs,
        surrogate=pulled(policy_gradient("score"), policy, beta / 2),
        reduction=reduction,
        horizon=horizon,
    )
