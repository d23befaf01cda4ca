"""Ratios of policies: which two are compared, and over which unit.

A ratio names both ends, numerator first. Inputs are masked log-probs (0 outside the mask).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from farl.correct.base import LossInputs

Level = Literal["token", "sequence", "geometric"]
PolicyName = Literal["learner", "behaviour", "proximal"]
LogpFunction = Callable[[LossInputs], Tensor]
RatioFunction = Callable[[LossInputs], Tensor]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: any cap bites long before, and float32 squares of it are finite (verl 0.9.1 clamps the same)."""


def logp_of(policy: PolicyName) -> LogpFunction:
    """The log-probs of a policy, as a part that correctors are put together from."""

    def logp(inputs: LossInputs) -> Tensor:
        value_BT = {
            "learner": inputs.logp_learner_BT,
            "behaviour": inputs.logp_behaviour_BT,
            "proximal": inputs.logp_proximal_BT,
        }[policy]
        assert value_BT is not None
        return value_BT

    return logp


def approximate_proximal(lag_zero: Literal["behaviour", "learner"]) -> LogpFunction:
    """A-3PO's proximal policy: between behaviour and learner, nearer the learner the older the token.

        log prox = log mu + a (log pi - log mu),  a = (lag - 1) / lag       detached

    At lag 0 and 1, a = 0: the behaviour policy itself. `lag_zero="learner"` takes a = 1 at lag 0 instead, where the
    ratio to the proximal policy is 1 and nothing is clipped.

    Source: arXiv 2512.06547; areal 1.0.4 `compute_prox_logp_approximations` ("loglinear").
    """

    def logp(inputs: LossInputs) -> Tensor:
        assert inputs.lag_BT is not None
        behaviour_BT = inputs.logp_behaviour_BT
        lag_BT = inputs.lag_BT.to(behaviour_BT.dtype)
        share_BT = (lag_BT - 1).clamp(min=0) / lag_BT.clamp(min=1)
        if lag_zero == "learner":
            share_BT = torch.where(lag_BT < 1, 1.0, share_BT)
        return behaviour_BT + share_BT * (inputs.logp_learner_BT.detach() - behaviour_BT)

    return logp


def balance_mixture(level: Literal["token", "sequence"]) -> LogpFunction:
    """Log-density of the deterministic mixture of the K behaviour policies that a batch was drawn from.

        token      log sum_k share_k q_k(x_t | x_<t)
        sequence   log sum_k share_k prod_t q_k(x_t | x_<t), spread over the tokens so that they add up to it

    Source: the balance heuristic of Veach and Guibas, "Optimally combining sampling techniques for Monte Carlo
    rendering" (SIGGRAPH 1995), eq. 9; deterministic mixture (N3) of Elvira et al., arXiv 1511.03095.
    """

    def logp(inputs: LossInputs) -> Tensor:
        assert inputs.logp_sources_BTK is not None
        assert inputs.log_share_BK is not None
        log_share_BK = inputs.log_share_BK.to(inputs.logp_sources_BTK.dtype)
        if level == "token":
            mixed_BT = torch.logsumexp(inputs.logp_sources_BTK + log_share_BK.unsqueeze(1), dim=-1)
            return torch.where(inputs.mask_BT, mixed_BT, 0.0)
        total_B = torch.logsumexp(inputs.logp_sources_BTK.sum(dim=1) + log_share_BK, dim=-1)
        excess_B = total_B - inputs.logp_behaviour_BT.sum(dim=1)
        return inputs.logp_behaviour_BT + excess_B.unsqueeze(1) * inputs.mask_BT / lengths(inputs.mask_BT)

    return logp


def lengths(mask_BT: Tensor) -> Tensor:
    """Tokens of each sequence, at least 1; [B, 1]."""
    return mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def log_ratio(logp_numerator_BT: Tensor, logp_denominator_BT: Tensor) -> Tensor:
    """`clamp(log a - log b, -20, 20)`; differentiable in either argument that has a gradient."""
    return (logp_numerator_BT - logp_denominator_BT).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def ratio(logp_numerator_BT: Tensor, logp_denominator_BT: Tensor) -> Tensor:
    """Token ratio `exp(clamp(log a - log b, -20, 20))`; differentiable as `log_ratio` is."""
    return torch.exp(log_ratio(logp_numerator_BT, logp_denominator_BT))


def token_ratio(anchor: LogpFunction) -> RatioFunction:
    """Learner / anchor of each token, differentiable in the learner."""
    return lambda inputs: ratio(inputs.logp_learner_BT, anchor(inputs))


def geometric_ratio(anchor: LogpFunction, form: Literal["token", "direct"]) -> RatioFunction:
    """Geometric mean of learner / anchor over each sequence, the same for all its tokens.

        direct   s = exp(mean_t log r_t)                differentiable through every token
        token    s_t = sg(s) exp(lp_t - sg(lp_t))       differentiable through its own token

    With an advantage that is constant along the sequence both have the same gradient, if every token of the sequence
    has the same weight in the reduction.

    Source: GSPO, arXiv 2507.18071 eqs. 7 and 14; verl 0.9.1 `compute_policy_loss_gspo` (token form).
    """

    def value(inputs: LossInputs) -> Tensor:
        logp_BT = inputs.logp_learner_BT
        own_BT = logp_BT.detach() if form == "token" else logp_BT
        total_B1 = (own_BT - anchor(inputs)).sum(dim=1, keepdim=True)
        log_BT = (total_B1 / lengths(inputs.mask_BT)).expand_as(logp_BT)
        if form == "token":
            log_BT = log_BT + logp_BT - logp_BT.detach()
        return torch.exp(log_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    return value


def weight_of(logp_numerator_BT: Tensor, logp_denominator_BT: Tensor, mask_BT: Tensor, level: Level) -> Tensor:
    """The ratio, detached, for each token or as one number for its whole sequence; broadcasts to [B, T].

    token      x_t                                          [B, T]
    sequence   X = exp(sum_t log x_t)                       [B, 1]
    geometric  G = exp(sum_t log x_t / number of tokens)    [B, 1]
    """
    log_BT = logp_numerator_BT.detach() - logp_denominator_BT.detach()
    if level != "token":
        log_BT = log_BT.sum(dim=1, keepdim=True)
        if level == "geometric":
            log_BT = log_BT / lengths(mask_BT)
    return torch.exp(log_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
