"""The gate in its loop: plans, probes and observations as a run makes them, whatever the learner does."""

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from farl.forecast import PolicyEvidence, init, observe, plan, record
from farl.forecast.gate import weigh_probe
from farl.forecast.plan import ALL
from farl.forecast.planning import evidence_of

from .paths import follow, leaves_of, polynomial_path, settings

SIZE, REGIME = 24, 40
REGIMES = st.lists(st.one_of(st.floats(-1.5, 1.5), st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=5)


def displacements(seed, regimes, noise):
    """Displacements of norm sqrt(SIZE) that keep a share of the last one, another share in each regime."""
    generator = torch.Generator().manual_seed(seed)
    moved = torch.randn(SIZE, generator=generator)
    for share in regimes:
        for _ in range(REGIME):
            moved = share * moved + noise * torch.randn(SIZE, generator=generator)
            moved = moved * (SIZE**0.5 / moved.norm().clamp(min=1e-9))
            yield moved


@examples(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), regimes=REGIMES, noise=st.floats(0.01, 1.0), horizon=st.sampled_from([1, 3]))
def test_whatever_the_displacements_the_score_is_within_the_stated_bound_of_stale(seed, regimes, noise, horizon):
    """Without a probe: at most 2 % of stale's squared error, and three of the largest for each change of regime.

    A regime that turns costs what it takes to see it; nothing can foresee the turn itself.
    """
    config = settings(max_horizon=horizon)
    weights = torch.zeros(SIZE)
    state = init([("w", weights)], config)
    sent = stale = largest = 0.0
    for moved in displacements(seed, regimes, noise):
        state = record(state, plan(state, horizon))
        weights = weights + moved
        state, seen = observe(state, [("w", weights)])
        for score in seen.scored:
            sent, stale = sent + score.residual**2, stale + score.displacement**2
            largest = max(largest, score.residual**2, score.displacement**2)
    assert sent <= 1.02 * stale + 3 * largest * len(regimes)


@examples(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), regimes=REGIMES, noise=st.floats(0.0, 1.0), tail=st.floats(-1.0, 1.0))
def test_whatever_the_policy_makes_of_it_plans_and_probes_cost_little(seed, regimes, noise, tail):
    """The weights go steadily on, so that parameters always say "send"; what the policy makes of a forecast changes.

    Log-probs move by `share m` where the forecast moves them by m, with noise; KL is its square over two. At most 2 %
    of stale and eight of the largest probes for each change of regime, through `plan`, its shadow and `weigh_probe`.
    """
    generator = torch.Generator().manual_seed(seed)
    config = settings(bank=("copy",))
    state = init(leaves_of(torch.zeros(9)), config)
    sent = stale = largest = 0.0
    weights, direction = torch.zeros(9), torch.randn(9, generator=generator)
    for share in regimes:
        for _ in range(REGIME):
            forecast = plan(state, 1)
            state = record(state, forecast)
            weights = weights + direction
            state, _ = observe(state, leaves_of(weights))
            move = 0.05 * torch.randn(1, 64, generator=generator)
            drift = share * move + (noise * 0.05 + tail * 0.01) * torch.randn(1, 64, generator=generator)
            factor = forecast.damping if forecast.moves else 0.0
            now = float((drift - factor * move).square().mean()) / 2
            sent, stale = sent + now, stale + float(drift.square().mean()) / 2
            largest = max(largest, now, float(drift.square().mean()) / 2)
            if not (forecast.moves or forecast.shadow):
                continue
            moved = move * factor if forecast.moves else move
            evidence = weigh_probe(
                evidence_of(state, forecast.key), version=state.version, logp_learner_BT=drift,
                logp_forecast_BT=moved, logp_stale_BT=torch.zeros(1, 64), mask_BT=torch.ones(1, 64, dtype=torch.bool),
                damping=factor if forecast.moves else 1.0, sent=forecast.moves, config=config,
            )  # fmt: skip
            state = replace(state, evidence={forecast.key: evidence})
    assert sent <= 1.02 * stale + 8 * largest * len(regimes)


def drive(state, share, steps, *, weights, direction):
    """Goes on in one direction while the policy moves by `share` of every forecast; returns state, weights, plans."""
    plans = []
    for _ in range(steps):
        forecast = plan(state, 1)
        plans.append(forecast)
        state = record(state, forecast)
        weights = weights + direction
        state, _ = observe(state, leaves_of(weights))
        move = 0.05 * torch.randn(1, 64, generator=torch.Generator().manual_seed(state.version))
        factor = forecast.damping if forecast.moves else 1.0
        if forecast.moves or forecast.shadow:
            evidence = weigh_probe(
                evidence_of(state, 1), version=state.version, logp_learner_BT=share * move,
                logp_forecast_BT=factor * move, logp_stale_BT=torch.zeros(1, 64),
                mask_BT=torch.ones(1, 64, dtype=torch.bool), damping=factor, sent=forecast.moves, config=state.config,
            )  # fmt: skip
            state = replace(state, evidence={1: evidence})
    return state, weights, plans


def test_the_gate_closes_where_the_policy_objects_and_opens_again_by_itself():
    """A forecast that is exact in the weights and wrong in the policy is held; when it is right again, sent again."""
    direction = torch.ones(9)
    state, weights, first = drive(
        init(leaves_of(torch.zeros(9)), settings(bank=("copy",))), -1.0, 30, weights=torch.zeros(9), direction=direction
    )
    closed = next(i for i, p in enumerate(first) if "policy-space evidence" in p.held)
    assert closed <= 8
    assert all(p.held and p.shadow == {ALL: (1.0,)} for p in first[closed:])
    state, _, second = drive(state, 1.0, 60, weights=weights, direction=direction)
    opened = next(i for i, p in enumerate(second) if p.moves)
    assert opened <= 40
    assert all(p.moves for p in second[opened:])


def test_a_factor_of_nothing_is_a_hold_with_a_shadow():
    """Evidence that leaves less than `min_damping` holds openly, and what is held back goes on being probed."""
    state, _ = follow(polynomial_path(0, 12), settings(bank=("copy",)))
    spent = PolicyEvidence(drift=10.0, cross=-9.0, move=10.0, weight=5.0, gain=1.0, num_probes=1)
    assert spent.factor == 0.0
    held = plan(replace(state, evidence={1: spent}), 1)
    assert held.held == "policy-space evidence, which leaves nothing of the forecast"
    assert held.shadow == {ALL: (1.0,)}
    assert not held.moves


def test_a_trial_goes_on_until_enough_of_it_was_probed():
    evidence = PolicyEvidence(held=True, retry_at=50, failures=1, closed_at=42)
    state, _ = follow(polynomial_path(0, 50), settings(bank=("copy",)))
    for n in range(2):
        state = replace(state, evidence={1: evidence})
        assert plan(state, 1).moves, f"after {n} probes of the trial"
        evidence = weigh_probe(
            evidence, version=51 + n, logp_learner_BT=torch.tensor([[-1.0, -2.0]]),
            logp_forecast_BT=torch.tensor([[-1.02, -1.98]]), logp_stale_BT=torch.tensor([[-1.1, -1.9]]),
            mask_BT=torch.ones(1, 2, dtype=torch.bool), damping=1.0, sent=True, config=state.config,
        )  # fmt: skip
        assert (evidence.num_trials, evidence.held) == (n + 1, True)


def test_log_probs_that_are_not_finite_are_left_out_of_the_evidence():
    """A sampler that lost a token's log-prob, or a forecast that gives it none."""

    def weigh(lost):
        rows = [
            torch.tensor([[-1.0, -2.0, -0.5]]),
            torch.tensor([[-1.1, -2.2, -0.4]]),
            torch.tensor([[-1.3, -2.1, -0.7]]),
        ]
        for row, value in zip(rows, lost, strict=True):
            if value is not None:
                row[0, 2] = value
        keep = torch.tensor([[True, True, lost == (None, None, None)]])
        arguments = dict(zip(("logp_learner_BT", "logp_forecast_BT", "logp_stale_BT"), rows, strict=True))
        known = {"version": 3, "damping": 1.0, "sent": True, "config": settings()}
        whole = weigh_probe(PolicyEvidence(), mask_BT=torch.ones(1, 3, dtype=torch.bool), **arguments, **known)
        masked = weigh_probe(PolicyEvidence(), mask_BT=keep, **arguments, **known)
        return whole, masked

    for i in range(3):
        for value in (math.nan, -math.inf):
            lost = tuple(value if j == i else None for j in range(3))
            whole, masked = weigh(lost)
            assert whole == masked
            assert math.isfinite(whole.factor)
            assert whole.num_probes == 1


def test_held_for_its_scores_it_is_sent_again_only_when_clearly_better():
    """The record that closed on parameter errors opens below `1 - hysteresis`, not at the line itself."""
    state, _ = follow(polynomial_path(0, 12), settings(bank=("copy",)))
    for squared, incumbent, moves in (
        (0.99, "copy", True),
        (0.99, "stale", False),
        (0.94, "stale", True),
        (1.01, "copy", False),
    ):
        tried = replace(state, would_be={1: (squared, 1.0)}, incumbents={1: incumbent})
        forecast = plan(tried, 1)
        assert forecast.moves == moves, (squared, incumbent)
        assert moves or "its parameter error was above that of stale weights" in forecast.held
    paid = PolicyEvidence(gain=1.0, squared_gain=0.5, num_probes=5, drift=1.0, cross=1.0, move=1.0, weight=1.0)
    assert plan(replace(state, would_be={1: (1.5, 1.0)}, evidence={1: paid}), 1).moves, "the policy does not object"
    costly = replace(paid, gain=-1.0)
    assert not plan(replace(state, would_be={1: (1.5, 1.0)}, evidence={1: costly}), 1).moves


def test_where_no_rule_beats_stale_the_best_is_probed_and_sent_once_the_policy_likes_it():
    """Parameters that turn round and round, and a policy that nevertheless moves as the forecast says."""
    weights = torch.zeros(9)
    state = init(leaves_of(weights), settings(bank=("copy", "half")))
    for step in range(20):
        weights = weights + (-1.0) ** step
        state, _ = observe(state, leaves_of(weights))
    held = plan(state, 1)
    assert held.held == "no rule of the bank beat stale weights recently"
    assert held.shadow == {ALL: (0.5,)}, "half costs least of the two"
    evidence = PolicyEvidence()
    probed = 0
    while not plan(replace(state, evidence={1: evidence}), 1).moves:
        move = 0.05 * torch.randn(1, 64, generator=torch.Generator().manual_seed(probed))
        evidence = weigh_probe(
            evidence, version=21 + probed, logp_learner_BT=move, logp_forecast_BT=move,
            logp_stale_BT=torch.zeros(1, 64), mask_BT=torch.ones(1, 64, dtype=torch.bool), damping=1.0, sent=False,
            config=state.config,
        )  # fmt: skip
        probed += 1
    assert 3 <= probed <= 5
    sent = plan(replace(state, evidence={1: evidence}), 1)
    assert sent.rule == "half"
    assert sent.coefficients == (0.5 * evidence.factor,)
