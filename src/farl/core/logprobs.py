"""Log-probs of sampled tokens and the distances between policies that they estimate.

Suffixes: B sequences, T completion positions, V vocabulary. Everything is float32 or better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farl.errors import ShapeError


def token_logp(logits_BTV: Tensor, ids_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-prob of each id under `softmax(logits / temperature)`.

        logp = logits[id] / temperature - logsumexp(logits / temperature)

    Args:
        logits_BTV: any float dtype; computed in float32.
        ids_BT: int64 token ids.
        temperature: positive divisor of the logits.

    Returns:
        float32 nats [B, T].

    Raises:
        ShapeError: if the leading shapes differ.
    """
    if logits_BTV.shape[:-1] != ids_BT.shape:
        raise ShapeError(
            f"logits {tuple(logits_BTV.shape)} do not fit ids {tuple(ids_BT.shape)}: need [B, T, V] and [B, T]"
        )
    logits_BTV = logits_BTV.float() / temperature
    chosen_BT = logits_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT - torch.logsumexp(logits_BTV, dim=-1)


@dataclass(frozen=True, kw_only=True)
class PolicyDistance:
    """How far the sampling policy is from the learner, estimated on sampled tokens.

    Attributes:
        kl_nats: mean over tokens of `r - 1 - log r`, `r = learner / sampler`: the low-variance, never
            negative estimate of KL(sampler || learner) for one token.
        ess_fraction: effective sample size of the sequence weights over the number of sequences,
            `(sum w)^2 / (B sum w^2)`, in (0, 1].
        weight_variance: mean over tokens of `(r - 1)^2`, the token-level variance of importance
            weights (chi-squared distance).
        num_tokens: tokens the means are over.
    """

    kl_nats: float
    ess_fraction: float
    weight_variance: float
    num_tokens: int


def policy_distance(logp_learner_BT: Tensor, logp_sampler_BT: Tensor, mask_BT: Tensor) -> PolicyDistance:
    """Estimates the distance of two policies on tokens drawn from (or very near) the sampler.

    Args:
        logp_learner_BT: nats under the learner; detached here.
        logp_sampler_BT: nats under the policy that is compared.
        mask_BT: bool, True on sampled tokens.

    Returns:
        The distances; all zero distance, ESS 1, for an empty mask.

    Source: Schulman, "Approximating KL divergence" (k3 estimator); Kish effective sample size.
    """
    log_ratio_BT = logp_learner_BT.detach().double() - logp_sampler_BT.detach().double()
    log_ratio_BT = torch.where(mask_BT, log_ratio_BT, 0.0)
    count = int(mask_BT.sum())
    if count == 0:
        return PolicyDistance(kl_nats=0.0, ess_fraction=1.0, weight_variance=0.0, num_tokens=0)
    excess_BT = torch.expm1(log_ratio_BT)
    log_weight_B = log_ratio_BT.sum(dim=1)[mask_BT.any(dim=1)]
    log_ess = 2 * torch.logsumexp(log_weight_B, 0) - torch.logsumexp(2 * log_weight_B, 0)
    return PolicyDistance(
        kl_nats=float((excess_BT - log_ratio_BT).sum() / count),
        ess_fraction=float(torch.exp(log_ess) / len(log_weight_B)),
        weight_variance=float(excess_BT.square().sum() / count),
        num_tokens=count,
    )
