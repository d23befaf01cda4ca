import math
from dataclasses import replace

import pytest
import torch

from farl.forecast import ForecastConfig, PolicyEvidence, plan
from farl.forecast.auto import Memo, choose, score_rule
from farl.forecast.gate import weigh_probe

from .paths import dense, follow, momentum_path, polynomial_path

CONFIG = ForecastConfig()


def probe(evidence, learner, forecast, stale, *, version=10, factor=1.0, config=CONFIG):
    rows = [torch.tensor([x]) for x in (learner, forecast, stale)]
    return weigh_probe(
        evidence, version=version, factor=factor, logp_learner_BT=rows[0], logp_forecast_BT=rows[1],
        logp_stale_BT=rows[2], mask_BT=torch.ones_like(rows[0], dtype=torch.bool), config=config,
    )  # fmt: skip


def test_a_score_equals_the_residuals_of_forecasts_really_made():
    path = momentum_path(20)
    config = ForecastConfig(rule="least_squares", forgetting=0.8)
    state, scored = follow(path, config, ship_horizon=1)
    scored = [s for s in scored if s.plan.base_version > 0]  # before the first displacement there is nothing to score
    score = score_rule("least_squares", state.gram, state.version, 1, config, Memo())
    weights = [0.8 ** (20 - s.plan.target_version) for s in scored]
    expected = sum(w * s.residual**2 for w, s in zip(weights, scored, strict=True)) / sum(
        w * s.displacement**2 for w, s in zip(weights, scored, strict=True)
    )
    assert score.squared_ratio == pytest.approx(expected, rel=1e-3)
    assert score_rule("stale", state.gram, state.version, 1, config, Memo()).squared_ratio == pytest.approx(1.0)


def test_the_best_rule_of_the_bank_is_chosen():
    config = ForecastConfig(bank=("copy", "mean", "polynomial"), order=2, lags=3)
    drifting, _ = follow(polynomial_path(1, 20), config)
    assert plan(drifting, 1).rule == "polynomial"
    steady, _ = follow(momentum_path(40, beta=0.95), ForecastConfig(bank=("copy", "polynomial"), order=2, lags=3))
    assert plan(steady, 1).rule == "copy"


def test_white_noise_is_not_forecast():
    torch.manual_seed(0)
    path = torch.randn(30, 9).cumsum(0)
    state, _ = follow(path, ForecastConfig(bank=("copy", "mean")))
    assert plan(state, 1).held == "no rule of the bank beat stale weights recently"
    assert torch.equal(dense(state, plan(state, 1)), path[-1])


def test_the_incumbent_stays_unless_clearly_beaten():
    path = momentum_path(30)
    state, _ = follow(path, ForecastConfig())
    best, scores = choose(state.gram, 30, 1, CONFIG, incumbent=None, memo=Memo())
    others = [name for name in CONFIG.bank if name != best]
    gap = {n: 1 - scores[best].squared_ratio / scores[n].squared_ratio for n in others}
    for name, advantage in gap.items():
        kept, _ = choose(state.gram, 30, 1, CONFIG, incumbent=name, memo=Memo())
        assert kept == (name if advantage < CONFIG.hysteresis else best)


def test_before_any_probe_the_first_forecasts_are_damped():
    path = momentum_path(12)
    for length, damping in ((1, 0.5), (3, 0.5), (12, 1.0)):
        state, _ = follow(path[: length + 1], ForecastConfig(bank=("copy",)))
        assert plan(state, 1).damping == damping


def test_the_factor_fitted_from_probes_by_hand():
    evidence = probe(PolicyEvidence(), [-1.0, -2.0], [-1.2, -2.2], [-1.6, -2.6])
    # drift (.6, .6), move (.4, .4): the fit alone says 1.5; cross 2/3, energy 4/9, prior .9 toward .5
    assert evidence.factor == pytest.approx(min((0.9 * 0.5 + 2 / 3) / (0.9 + 4 / 9), 1.0))
    half = probe(PolicyEvidence(), [-1.0], [-1.2], [-1.6], factor=0.5)
    # the undamped move would have been .8
    assert half.factor == pytest.approx((0.45 + 0.6 * 0.8 / 0.36) / (0.9 + 0.64 / 0.36))


def test_perfect_forecasts_lead_to_no_damping_and_overshoot_to_the_right_factor():
    good = over = PolicyEvidence()
    for _ in range(60):
        good = probe(good, [-1.0, -2.0], [-1.0, -2.0], [-1.3, -1.9])
        over = probe(over, [-1.0, -2.0], [-0.7, -2.1], [-1.3, -1.9], config=ForecastConfig(min_damping=0.0))
    assert good.factor == pytest.approx(1.0, abs=0.01)
    assert over.kl_forecast == 0.0 or over.factor == pytest.approx(0.5, abs=0.05)


def test_forecasts_that_raise_the_kl_are_held_tried_again_and_held_longer():
    evidence = PolicyEvidence()
    for version in range(10, 13):
        evidence = probe(evidence, [-1.0, -2.0], [-2.0, -1.0], [-1.1, -1.9], version=version)
        if evidence.held_until:
            break
    assert evidence.failures == 1
    assert evidence.held_until == version + CONFIG.retry_updates
    assert evidence.num_probes == 0
    for _ in range(8):
        before = evidence.failures
        evidence = probe(evidence, [-1.0, -2.0], [-2.0, -1.0], [-1.1, -1.9], version=100)
        if evidence.failures > before:
            break
    assert evidence.held_until == 100 + 2 * CONFIG.retry_updates
    for _ in range(4):
        evidence = probe(evidence, [-1.0, -2.0], [-1.02, -1.98], [-1.1, -1.9], version=200)
    assert evidence.failures == 0


def test_a_hold_says_until_when_and_ends():
    state, _ = follow(momentum_path(12), ForecastConfig(bank=("copy",)))
    held = replace(state, evidence=PolicyEvidence(held_until=14))
    assert plan(held, 1).held == "policy-space evidence, until version 14"
    again = replace(state, evidence=PolicyEvidence(held_until=12, failures=1, prior_factor=0.25))
    assert plan(again, 1).damping == 0.25, "starts again carefully"


def test_probes_without_tokens_or_drift_bring_no_evidence():
    evidence = PolicyEvidence()
    assert probe(evidence, [-1.0], [-1.5], [-1.0]) is evidence
    nothing = weigh_probe(
        evidence, version=1, factor=1.0, logp_learner_BT=torch.tensor([[math.nan]]),
        logp_forecast_BT=torch.tensor([[0.0]]), logp_stale_BT=torch.tensor([[0.0]]),
        mask_BT=torch.tensor([[False]]), config=CONFIG,
    )  # fmt: skip
    assert nothing is evidence
