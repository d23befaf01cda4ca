"""What the policy says about the forecasts: a damping factor fitted on log-probs, and the hold; one record a horizon.

Parameter error is not policy error: a forecast can remove most of the parameter residual and still raise
the KL. At consumption the learner, the sampler (forecast) and the stale probe give three log-probs of the
same tokens. To first order the log-prob of weights a fraction s along the forecast is `stale + s m`, so
the best fraction is a one-dimensional least-squares fit in the Fisher metric. While forecasts are held the probe
looks at the one that would have been sent, so that opening again costs no risk. Pure functions of
`PolicyEvidence`; the probe's forward pass is made by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farl.core.logprobs import policy_distance
from farl.forecast.config import ForecastConfig

_SAFE_PROBES = 3
"""Probes before the KL comparison may hold or open; fewer are noise."""
_SURE = 2.0
"""Standard deviations by which forecasts must have cost KL before the gate closes; opening takes one."""
_PRIOR_PROBES = 1.0
"""Weight of the prior factor 1, in probes."""
_MAX_FACTOR = 2.0
_MAX_DOUBLINGS = 4


_FRESH: Mapping[str, Any] = {"gain": 0.0, "squared_gain": 0.0, "kl_stale": 0.0, "num_probes": 0, "num_trials": 0}
"""What is counted since the gate last opened or closed."""


@dataclass(frozen=True, kw_only=True)
class PolicyEvidence:
    """Discounted policy-space evidence about the forecasts of one horizon.

    With `d = logp_learner - logp_stale` and `m` the same difference for the undamped forecast over the probed tokens.

    Attributes:
        drift: `sum lambda^age <d, d>`.
        cross: `sum lambda^age <d, m>`.
        move: `sum lambda^age <m, m>`.
        weight: `sum lambda^age`, the discounted number of probes.
        gain: discounted sum of KL that stale weights had or would have had minus that of the forecasts, sent or not,
            nats, since the gate last opened or closed.
        squared_gain: the same sum of its squares, with the discount squared: the variance of `gain`.
        kl_stale: discounted KL of stale weights over the same probes, nats.
        num_probes: probes since the gate last opened or closed.
        num_trials: how many of them were of forecasts sent on trial while the gate was closed.
        held: whether forecasts are held.
        retry_at: version at which a held gate opens on trial if no shadow was ever probed.
        closed_at: version at which the gate last closed.
        failures: closings in a row without forecasts that paid in between.
    """

    drift: float = 0.0
    cross: float = 0.0
    move: float = 0.0
    weight: float = 0.0
    gain: float = 0.0
    squared_gain: float = 0.0
    kl_stale: float = 0.0
    num_probes: int = 0
    num_trials: int = 0
    held: bool = False
    retry_at: int = 0
    closed_at: int = 0
    failures: int = 0

    @property
    def factor(self) -> float:
        """Factor on the forecast, from 0 to `_MAX_FACTOR`, that the evidence supports; 1 before any."""
        if not self.drift + self.move > 0:
            return 1.0
        prior = _PRIOR_PROBES * self.drift / self.weight
        return min(max((prior + self.cross) / (prior + self.move), 0.0), _MAX_FACTOR)

    @property
    def pays(self) -> bool:
        """Whether forecasts clearly lowered the KL, or would have, since the gate last opened or closed."""
        return self.num_probes >= _SAFE_PROBES and self.gain > math.sqrt(self.squared_gain)

    @property
    def predicted_kl_ratio(self) -> float | None:
        """KL over stale's at the present factor, to second order; None without evidence."""
        if not self.drift > 0:
            return None
        s = self.factor
        return max(1 - 2 * s * self.cross / self.drift + s * s * self.move / self.drift, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `PolicyEvidence(**data)` inverts it exactly."""
        return asdict(self)


def weigh_probe(
    evidence: PolicyEvidence,
    *,
    version: int,
    logp_learner_BT: Tensor,
    logp_forecast_BT: Tensor,
    logp_stale_BT: Tensor,
    mask_BT: Tensor,
    damping: float,
    sent: bool,
    config: ForecastConfig,
) -> PolicyEvidence:
    """Takes in one probe, and decides about holding.

    Args:
        evidence: what was known.
        version: learner version at consumption.
        logp_learner_BT: nats of the sampled tokens under the learner.
        logp_forecast_BT: nats under the forecast that was sent, or under the shadow of a held one.
        logp_stale_BT: nats under the weights of dispatch time.
        mask_BT: bool, True on sampled tokens; those without a finite log-prob under all three are left out.
        damping: factor the forecast has in it, above 0; 1 for a shadow.
        sent: False for a shadow.
        config: forgetting, `min_damping`, `retry_updates`, hysteresis.

    Returns:
        The new evidence.
    """
    for logp_BT in (logp_learner_BT, logp_forecast_BT, logp_stale_BT):
        mask_BT = mask_BT & torch.isfinite(logp_BT)
    stale_BT = logp_stale_BT.detach().double().masked_fill(~mask_BT, 0.0)
    drift_BT = torch.where(mask_BT, logp_learner_BT.detach().double() - stale_BT, 0.0)
    move_BT = torch.where(mask_BT, logp_forecast_BT.detach().double() - stale_BT, 0.0) / damping
    drift_energy, move_energy = float(drift_BT.square().sum()), float(move_BT.square().sum())
    if not drift_energy + move_energy > 0:
        return evidence
    keep = config.forgetting
    factor = damping if sent else evidence.factor
    learner_BT = stale_BT + drift_BT
    forecast = policy_distance(learner_BT, stale_BT + factor * move_BT, mask_BT)
    stale = policy_distance(learner_BT, stale_BT, mask_BT)
    evidence = replace(
        evidence,
        drift=keep * evidence.drift + drift_energy,
        cross=keep * evidence.cross + float((drift_BT * move_BT).sum()),
        move=keep * evidence.move + move_energy,
        weight=keep * evidence.weight + 1,
    )
    if sent and evidence.held and version <= evidence.retry_at:
        return evidence  # sent before the gate closed: that KL has been counted
    gain = stale.kl_nats - forecast.kl_nats
    evidence = replace(
        evidence,
        gain=keep * evidence.gain + gain,
        squared_gain=keep**2 * evidence.squared_gain + gain**2,
        kl_stale=keep * evidence.kl_stale + stale.kl_nats,
        num_probes=evidence.num_probes + 1,
        num_trials=evidence.num_trials + (evidence.held and sent),
    )
    if evidence.held:
        return _opened(evidence, version, sent, config)
    return _closed(evidence, version, config)


def _closed(evidence: PolicyEvidence, version: int, config: ForecastConfig) -> PolicyEvidence:
    """An open gate closes when forecasts clearly cost KL, or when nothing of them would be left."""
    if evidence.num_probes < _SAFE_PROBES:
        return evidence
    costs = evidence.gain < -_SURE * math.sqrt(evidence.squared_gain)
    if costs or evidence.factor < config.min_damping:
        return _pause(evidence, version, config)
    settled = evidence.num_probes >= 2 * config.retry_updates and evidence.gain > 0
    return replace(evidence, failures=0) if settled else evidence


def _opened(evidence: PolicyEvidence, version: int, sent: bool, config: ForecastConfig) -> PolicyEvidence:
    """A held gate opens when the forecasts it held back, or sent on trial, clearly would have paid."""
    wanted = _SAFE_PROBES * 2 ** min(max(evidence.failures - 1, 0), _MAX_DOUBLINGS)
    if evidence.num_probes < (_SAFE_PROBES if sent else wanted):
        return evidence
    pays = evidence.pays and evidence.gain > config.hysteresis * evidence.kl_stale
    if pays and evidence.factor >= 2 * config.min_damping:
        return replace(evidence, held=False, **_FRESH)
    return _pause(evidence, version, config) if sent else evidence


def _pause(evidence: PolicyEvidence, version: int, config: ForecastConfig) -> PolicyEvidence:
    updates = config.retry_updates * 2 ** min(evidence.failures, _MAX_DOUBLINGS)
    return replace(
        evidence,
        held=True,
        retry_at=version + updates,
        closed_at=version,
        failures=evidence.failures + 1,
        **_FRESH,
    )


def start_afresh(evidence: PolicyEvidence) -> PolicyEvidence:
    """The same fit with an open gate that has yet to see a probe: what another horizon starts from."""
    return replace(evidence, held=False, **_FRESH)


def may_send(evidence: PolicyEvidence, version: int) -> bool:
    """Whether forecasts are sent.

    A gate that no shadow was ever probed for opens on trial once its pause is over, until enough of what it sent was
    probed to decide.
    """
    return not evidence.held or (version >= evidence.retry_at and evidence.num_probes == evidence.num_trials)
