import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farl.forecast import ForecastConfig, PolicyEvidence, plan
from farl.forecast.auto import Memo, choose, score_rule
from farl.forecast.gate import may_send, weigh_probe
from farl.forecast.plan import ALL

from .paths import dense, follow, momentum_path, polynomial_path, settings, view_of

CONFIG = ForecastConfig()


def probe(evidence, learner, forecast, stale, *, version=10, damping=1.0, sent=True, config=CONFIG):
    rows = [torch.tensor([x]) for x in (learner, forecast, stale)]
    return weigh_probe(
        evidence, version=version, damping=damping, sent=sent, logp_learner_BT=rows[0], logp_forecast_BT=rows[1],
        logp_stale_BT=rows[2], mask_BT=torch.ones_like(rows[0], dtype=torch.bool), config=config,
    )  # fmt: skip


BAD = ([-1.0, -2.0], [-2.0, -1.0], [-1.1, -1.9])  # learner, forecast, stale: the forecast is far off
GOOD = ([-1.0, -2.0], [-1.02, -1.98], [-1.1, -1.9])


def test_a_score_equals_the_residuals_of_forecasts_really_made():
    path = momentum_path(20)
    config = settings(rule="least_squares", forgetting=0.8)
    state, scored = follow(path, config, ship_horizon=1)
    scored = [s for s in scored if s.plan.base_version > 0]  # before the first displacement there is nothing to score
    score = score_rule("least_squares", view_of(state), ALL, Memo())
    weights = [0.8 ** (20 - s.plan.target_version) for s in scored]
    expected = sum(w * s.residual**2 for w, s in zip(weights, scored, strict=True)) / sum(
        w * s.displacement**2 for w, s in zip(weights, scored, strict=True)
    )
    assert score.squared_ratio == pytest.approx(expected, rel=1e-3)
    assert score_rule("stale", view_of(state), ALL, Memo()).squared_ratio == pytest.approx(1.0)


def test_the_best_rule_of_the_bank_is_chosen():
    bank = {"bank": ("copy", "mean", "polynomial"), "order": 2, "lags": 3}
    drifting, _ = follow(polynomial_path(1, 20), settings(**bank))
    assert plan(drifting, 1).rule == "polynomial"
    steady, _ = follow(momentum_path(40, beta=0.95), settings(**{**bank, "bank": ("copy", "polynomial")}))
    assert plan(steady, 1).rule == "copy"


def test_white_noise_is_not_forecast():
    torch.manual_seed(0)
    path = torch.randn(30, 9).cumsum(0)
    state, _ = follow(path, settings(bank=("copy", "mean")))
    assert plan(state, 1).held == "no rule of the bank beat stale weights recently"
    assert torch.equal(dense(state, plan(state, 1)), path[-1])


def test_the_incumbent_stays_unless_clearly_beaten():
    config = settings(bank=("copy", "half", "mean", "least_squares"))
    state, _ = follow(momentum_path(30), config)
    views = {ALL: view_of(state)}
    best, scores = choose(views, bank=config.bank, incumbent=None, memo=Memo())
    others = [name for name in config.bank if name != best]
    gap = {n: 1 - scores[best] / scores[n] for n in others}
    assert any(g < config.hysteresis for g in gap.values()) or min(gap.values()) > config.hysteresis
    for name, advantage in gap.items():
        kept, _ = choose(views, bank=config.bank, incumbent=name, memo=Memo())
        assert kept == (name if advantage < config.hysteresis else best)


def test_the_factor_fitted_from_probes_by_hand():
    evidence = probe(PolicyEvidence(), [-1.0, -2.0], [-0.8, -1.8], [-1.6, -2.6])
    # drift (.6, .6), move (.8, .8): drift .72, cross .96, move 1.28, and the prior counts as one probe at factor 1
    assert evidence.factor == pytest.approx((0.72 + 0.96) / (0.72 + 1.28))
    short = probe(PolicyEvidence(), [-1.0], [-1.3], [-1.6])
    assert short.factor == pytest.approx((1 + 0.5) / (1 + 0.25)), "a rule that does not go far enough is lengthened"
    half = probe(PolicyEvidence(), [-1.0], [-1.2], [-1.6], damping=0.5)
    assert half.factor == pytest.approx((0.36 + 0.6 * 0.8) / (0.36 + 0.64)), "the undamped move is .8"
    s = half.factor
    assert half.predicted_kl_ratio == pytest.approx(1 - 2 * s * 0.48 / 0.36 + s * s * 0.64 / 0.36, rel=1e-4)


def test_perfect_forecasts_lead_to_no_damping_and_overshoot_to_the_right_factor():
    good = over = PolicyEvidence()
    for _ in range(80):
        good = probe(good, [-1.0, -2.0], [-1.0, -2.0], [-1.3, -1.9])
        over = probe(over, [-1.0, -2.0], [-0.7, -2.1], [-1.3, -1.9])
    assert good.factor == pytest.approx(1.0, abs=0.01)
    assert good.predicted_kl_ratio == pytest.approx(0.0, abs=1e-6)
    assert over.factor == pytest.approx(0.5, abs=0.05)


def closed_after(evidence, *, version=10, limit=40):
    for n in range(1, limit):
        evidence = probe(evidence, *BAD, version=version + n)
        if evidence.held:
            return evidence, n
    raise AssertionError("never closed")


def test_forecasts_that_raise_the_kl_are_held_soon_and_longer_each_time():
    evidence, probes = closed_after(PolicyEvidence())
    assert probes <= 6
    assert evidence.retry_at == 10 + probes + CONFIG.retry_updates
    assert not may_send(evidence, 11)
    assert may_send(evidence, evidence.retry_at), "no shadow was ever probed: on trial"
    again, _ = closed_after(replace(evidence, held=False), version=100)
    assert again.retry_at - again.closed_at == 2 * CONFIG.retry_updates
    assert again.failures == 2


def test_a_held_gate_opens_by_what_it_held_back_and_asks_for_more_after_each_failure():
    for failures, wanted in ((1, 3), (2, 6), (3, 12)):
        evidence = PolicyEvidence(
            held=True, failures=failures, retry_at=10**6, drift=1e-9, cross=1e-9, move=1e-9, weight=1
        )
        for n in range(1, 40):
            evidence = probe(evidence, *GOOD, sent=False, version=20 + n)
            if not evidence.held:
                break
        assert n == wanted
    evidence = PolicyEvidence(held=True, failures=1, retry_at=10**6)
    for n in range(40):
        evidence = probe(evidence, *BAD, sent=False, version=20 + n)
    assert evidence.held
    assert not may_send(evidence, 10**6), "shadows were probed and did not pay: no trial"


def test_what_was_sent_before_the_gate_closed_does_not_count_again():
    closed = PolicyEvidence(held=True, retry_at=30)
    late = probe(closed, *GOOD, version=12)
    assert (late.num_probes, late.held) == (0, True)
    assert late.drift > 0, "the factor learns from it"


@pytest.mark.parametrize("sent", [True, False])
def test_probes_without_tokens_or_drift_bring_no_evidence(sent):
    evidence = PolicyEvidence()
    assert probe(evidence, [-1.0], [-1.0], [-1.0], sent=sent) is evidence
    nothing = weigh_probe(
        evidence, version=1, damping=1.0, sent=sent, logp_learner_BT=torch.tensor([[math.nan]]),
        logp_forecast_BT=torch.tensor([[0.0]]), logp_stale_BT=torch.tensor([[0.0]]),
        mask_BT=torch.tensor([[False]]), config=CONFIG,
    )  # fmt: skip
    assert nothing is evidence


def test_a_hold_keeps_the_forecast_as_a_shadow_for_its_horizon_alone():
    state, _ = follow(polynomial_path(0, 12), settings(bank=("copy",), max_horizon=2))
    held = replace(state, evidence={1: PolicyEvidence(held=True, retry_at=99, closed_at=7)})
    assert plan(held, 1).held == "policy-space evidence, since version 7"
    assert plan(held, 1).shadow == {ALL: (1.0,)}
    assert not plan(held, 1).moves
    assert plan(held, 2).moves, "another horizon has its own gate"
    assert plan(replace(state, evidence={1: PolicyEvidence(held=True, retry_at=12)}), 1).moves, "on trial"


def test_a_horizon_without_evidence_starts_from_the_factor_of_the_nearest():
    state, _ = follow(polynomial_path(0, 12), settings(bank=("copy",), max_horizon=4))
    known = PolicyEvidence(drift=1.0, cross=0.0, move=2.0, weight=4.0)
    state = replace(state, evidence={1: PolicyEvidence(), 3: known})
    assert plan(state, 3).damping == pytest.approx(known.factor)
    assert plan(state, 2.5).damping == pytest.approx(known.factor)
    assert plan(state, 1).damping == 1.0


@examples(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    regimes=st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=6),
    noise=st.floats(0.0, 1.0),
)
def test_whatever_the_policy_does_the_gate_costs_little(seed, regimes, noise):
    """The learner's log-probs move by `a m + noise` for a forecast that moves them by m, with a changing every 40
    updates.

    Cost counts in units of one probe's stale KL. Each closing can cost what it took to be sure, and closings get
    rarer; so the excess over stale is at most 2 % of stale and a few probes for each change of regime.
    """
    generator = torch.Generator().manual_seed(seed)
    evidence, cost_sent, cost_stale, largest = PolicyEvidence(), 0.0, 0.0, 0.0
    for version in range(40 * len(regimes)):
        move = 0.05 * torch.randn(1, 64, generator=generator)
        drift = regimes[version // 40] * move + noise * 0.05 * torch.randn(1, 64, generator=generator)
        sent = may_send(evidence, version)
        factor = evidence.factor
        cost_stale += float(drift.square().mean()) / 2
        now = float((drift - factor * move * sent).square().mean()) / 2
        cost_sent += now
        largest = max(largest, now)
        stale = torch.zeros(1, 64)
        evidence = weigh_probe(
            evidence, version=version, damping=factor if sent and factor > 0 else 1.0, sent=sent, logp_learner_BT=drift,
            logp_forecast_BT=stale + move * (factor if sent and factor > 0 else 1.0), logp_stale_BT=stale,
            mask_BT=torch.ones(1, 64, dtype=torch.bool), config=CONFIG,
        )  # fmt: skip
    assert cost_sent <= 1.02 * cost_stale + 8 * largest * len(regimes)
