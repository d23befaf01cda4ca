"""What the policy says about the forecasts: a damping factor fitted on log-probs, and the hold.

Parameter error is not policy error: a forecast can remove most of the parameter residual and still raise
the KL. At consumption the learner, the sampler (forecast) and the stale probe give three log-probs of the
same tokens. To first order the log-prob of weights a fraction s along the forecast is `stale + s m`, so
the best fraction is a one-dimensional least-squares fit in the Fisher metric. Pure functions of
`PolicyEvidence`; the probe's forward pass is made by the caller.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from farl.core.logprobs import policy_distance
from farl.forecast.config import ForecastConfig

_SAFE_PROBES = 3
"""Probes before the KL comparison may hold; fewer are noise."""
_MAX_DOUBLINGS = 4


@dataclass(frozen=True, kw_only=True)
class PolicyEvidence:
    """Discounted policy-space evidence about the forecasts shipped so far.

    With `d = logp_learner - logp_stale` and `m = (logp_forecast - logp_stale) / factor` over the probed
    tokens, `cross = sum lambda^age <d, m> / <d, d>` and `energy = sum lambda^age <m, m> / <d, d>`.

    Attributes:
        cross: see above.
        energy: see above.
        prior: remaining weight of the prior, which decays as evidence comes in.
        prior_factor: factor the prior pulls toward.
        kl_forecast: discounted KL of the forecasts, nats.
        kl_stale: discounted KL that stale weights would have had, nats.
        num_probes: probes since the last reset.
        held_until: no forecast is shipped before this version.
        failures: holds in a row without a forecast that paid.
    """

    cross: float = 0.0
    energy: float = 0.0
    prior: float = 1.0
    prior_factor: float = 0.5
    kl_forecast: float = 0.0
    kl_stale: float = 0.0
    num_probes: int = 0
    held_until: int = 0
    failures: int = 0

    @property
    def factor(self) -> float:
        """Damping factor in [0, 1] that the evidence supports."""
        fitted = (self.prior * self.prior_factor + self.cross) / (self.prior + self.energy)
        return min(max(fitted, 0.0), 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `PolicyEvidence(**data)` inverts it exactly."""
        return asdict(self)


def weigh_probe(
    evidence: PolicyEvidence,
    *,
    version: int,
    factor: float,
    logp_learner_BT: Tensor,
    logp_forecast_BT: Tensor,
    logp_stale_BT: Tensor,
    mask_BT: Tensor,
    config: ForecastConfig,
) -> PolicyEvidence:
    """Takes in one probe of trajectories that a forecast drew, and decides about holding.

    Args:
        evidence: what was known.
        version: learner version at consumption.
        factor: damping factor the forecast was shipped with, above 0.
        logp_learner_BT: nats of the sampled tokens under the learner.
        logp_forecast_BT: nats reported by the sampler.
        logp_stale_BT: nats under the weights of dispatch time.
        mask_BT: bool, True on sampled tokens.
        config: forgetting, `min_damping`, `retry_updates`.

    Returns:
        The new evidence. Held for `retry_updates * 2^failures` updates, evidence forgotten, when the fitted
        factor is below `min_damping` or the forecasts' KL exceeds that of stale weights.
    """
    drift_BT = (logp_learner_BT.detach().double() - logp_stale_BT.double()) * mask_BT
    move_BT = (logp_forecast_BT.double() - logp_stale_BT.double()) * mask_BT / factor
    drift_energy = float(drift_BT.square().sum())
    if not drift_energy > 0:
        return evidence
    keep = config.forgetting
    forecast = policy_distance(logp_learner_BT, logp_forecast_BT, mask_BT)
    stale = policy_distance(logp_learner_BT, logp_stale_BT, mask_BT)
    evidence = replace(
        evidence,
        cross=keep * evidence.cross + float((drift_BT * move_BT).sum()) / drift_energy,
        energy=keep * evidence.energy + float(move_BT.square().sum()) / drift_energy,
        prior=keep * evidence.prior,
        kl_forecast=keep * evidence.kl_forecast + forecast.kl_nats,
        kl_stale=keep * evidence.kl_stale + stale.kl_nats,
        num_probes=evidence.num_probes + 1,
    )
    worse = evidence.num_probes >= _SAFE_PROBES and evidence.kl_forecast > evidence.kl_stale
    if worse or evidence.factor < config.min_damping:
        pause = config.retry_updates * 2 ** min(evidence.failures, _MAX_DOUBLINGS)
        return PolicyEvidence(
            prior_factor=config.cold_damping / 2, held_until=version + pause, failures=evidence.failures + 1
        )
    if evidence.num_probes >= _SAFE_PROBES:
        return replace(evidence, failures=0)
    return evidence
