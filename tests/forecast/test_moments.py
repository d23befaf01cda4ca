"""What the optimizer's state says, against really running the optimizer."""

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn

import farl
from farl.errors import ConfigError
from farl.forecast.moments import last_displacement, read_moments, run_ahead

from .paths import make_learner, train

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.95)),
    "adam_l2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3, eps=1e-3),
    "adamw_beta1_0": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.9)),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd_dampened": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.8, dampening=0.3),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_l2": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


def trained(name, steps=5, seed=0):
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.randn(40))
    optimizer = OPTIMIZERS[name]([parameter])
    before = parameter.detach().clone()
    for _ in range(steps):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(40) + 0.5
        optimizer.step()
    return parameter, optimizer, parameter.detach() - before


def moments_of(optimizer, parameter):
    return read_moments(optimizer, optimizer.param_groups[0], parameter)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_last_displacement_is_read_back_from_the_state_alone(name, steps):
    parameter, optimizer, moved = trained(name, steps)
    moments = moments_of(optimizer, parameter)
    assert moments.tells_displacement == (name not in ("sgd", "sgd_nesterov", "sgd_l2"))
    if moments.tells_displacement:
        read = last_displacement(moments, parameter.detach(), slice(None))
        assert torch.allclose(read, moved, atol=3e-7)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("assumed", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_running_ahead_equals_really_running_the_optimizer(name, steps, assumed, horizon):
    """The optimizer itself is given the assumed gradients; rates change on the way."""
    parameter, optimizer, _ = trained(name, steps)
    moments = moments_of(optimizer, parameter)
    rates = [1e-2 / (1 + i) for i in range(horizon)]
    ahead = run_ahead(moments, parameter.detach(), slice(None), shares=(1.0,) * horizon, assumed=assumed, lrs=rates)
    if moments.kind == "adam":
        drift = moments.first_N / (1 - moments.beta1**moments.step)
    elif moments.first_N is None:
        drift = torch.zeros(40)
    else:
        drift = moments.first_N * (1 - moments.beta1) / (1 - moments.dampening)
    gradient, start = assumed * drift.clone(), parameter.detach().clone()
    for lr in rates:
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(ahead, parameter.detach() - start, atol=1e-6)


def test_a_fractional_horizon_goes_part_of_the_last_step():
    parameter, optimizer, _ = trained("adamw")
    moments, weights = moments_of(optimizer, parameter), parameter.detach()

    def ahead(*shares):
        return run_ahead(moments, weights, slice(None), shares=shares, assumed=0.0, lrs=(1e-2,) * len(shares))

    assert torch.allclose(ahead(1.0, 0.25), 0.75 * ahead(1.0) + 0.25 * ahead(1.0, 1.0), atol=1e-7)


@pytest.mark.parametrize("horizon", [1, 3])
def test_the_rule_moments_keeps_no_history_and_forecasts(horizon):
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw_foreach"], rule="moments", max_horizon=3)
    ratios = train(model, optimizer, forecaster, 40, horizon=horizon)
    assert sum(ratios[10:]) / len(ratios[10:]) < 0.7
    assert forecaster.config.history_bytes_per_parameter == 0
    assert all(ring.values_CN.numel() == 0 for ring in forecaster.state.rings.values())
    assert not forecaster.state.previous
    assert forecaster.streams_live_weights


def test_the_rule_moments_sends_what_the_optimizer_would_reach_with_zero_gradients():
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adam"], rule="moments")
    train(model, optimizer, forecaster, 5)
    sent = {name: w.clone() for name, w in forecaster.weights()}
    twin, twin_optimizer = copy.deepcopy(model), None
    twin_optimizer = OPTIMIZERS["adam"](twin.parameters())
    twin_optimizer.load_state_dict(optimizer.state_dict())
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    twin_optimizer.step()
    for name, p in twin.named_parameters():
        assert torch.allclose(sent[name], p, atol=1e-7)


def test_the_rule_moments_can_go_back_one_update_and_no_more():
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw"], rule="moments")
    train(model, optimizer, forecaster, 4)
    plan = forecaster.plan()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, forecaster, 1)
    assert forecaster.can_probe(plan)
    for name, weight in forecaster.probe_weights(plan):
        assert torch.allclose(weight, before[name], atol=1e-6)
    train(model, optimizer, forecaster, 1)
    assert not forecaster.can_probe(plan)


def test_the_rule_moments_holds_where_running_ahead_does_not_pay_and_opens_again():
    """Gradients that turn round at every step: momentum points the wrong way; then they stand still."""
    parameter = nn.Parameter(torch.zeros(32))
    optimizer = torch.optim.Adam([parameter], lr=1e-2, betas=(0.3, 0.9))
    forecaster = farl.Forecaster([("w", parameter)], optimizer, rule="moments", forgetting=0.8)
    held = []
    for step in range(60):
        held.append(bool(forecaster.plan().held))
        list(forecaster.weights())
        parameter.grad = torch.ones(32) * (1.0 if step >= 30 else (-1.0) ** step)
        optimizer.step()
        forecaster.observe()
    assert all(held[5:30])
    assert not any(held[45:])


@pytest.mark.parametrize("source", ["weights", "optimizer"])
def test_displacements_from_the_optimizer_forecast_as_those_from_the_weights(source):
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw"], rule="least_squares", source=source)
    ratios = train(model, optimizer, forecaster, 20)
    assert bool(forecaster.state.previous) == (source == "weights")
    reference = train(*make_learner(OPTIMIZERS["adamw"], rule="least_squares", source="weights"), 20)
    assert ratios == pytest.approx(reference, rel=1e-4)
    twin = make_learner(OPTIMIZERS["adamw"], rule="least_squares", source="weights")
    train(*twin, 20)
    for (name, mine), (_, its) in zip(forecaster.weights(), twin[2].weights(), strict=True):
        assert torch.allclose(mine, its, atol=1e-6), name
    assert forecaster.config.history_bytes_per_parameter == 2 * 4 + (4 if source == "weights" else 0)


@pytest.mark.parametrize("settings", [{"rule": "moments"}, {"source": "optimizer"}])
def test_an_optimizer_without_closed_form_falls_back_to_history_and_says_so(settings, caplog):
    with caplog.at_level(logging.WARNING):
        model, optimizer, forecaster = make_learner(lambda p: torch.optim.Adagrad(p, lr=1e-2), **settings)
    assert "Adagrad has no closed form here" in caplog.text
    assert (forecaster.config.rule, forecaster.config.source) == ("auto", "weights")
    assert len(train(model, optimizer, forecaster, 5)) == 5


def test_muon_beside_adamw_is_followed_from_history(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    pair = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
    with caplog.at_level(logging.WARNING):
        forecaster = farl.Forecaster(model.named_parameters(), pair, rule="moments")
    assert "Muon has no closed form here" in caplog.text
    for step in range(12):
        list(forecaster.weights())
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        for optimizer in pair:
            optimizer.zero_grad()
        (model(x) - x[:, :3].sin()).square().mean().backward()
        for optimizer in pair:
            optimizer.step()
        seen = forecaster.observe()
    assert seen.scored[-1].error_ratio < 1
    pair[0].step()
    with pytest.raises(farl.errors.StateError, match="made 1 and 0 steps"):
        forecaster.observe()


@pytest.mark.parametrize("settings", [{"rule": "moments"}, {"source": "optimizer"}])
def test_amsgrad_is_refused_where_the_closed_form_is_asked_for(settings):
    def amsgrad(parameters):
        return torch.optim.AdamW(parameters, amsgrad=True)

    with pytest.raises(ConfigError, match="amsgrad=True divides by a running maximum"):
        make_learner(amsgrad, **settings)
    train(*make_learner(amsgrad), 3)


@examples(max_examples=30, deadline=None)
@given(beta1=st.floats(0, 0.99), steps=st.integers(1, 30), seed=st.integers(0, 99))
def test_with_the_second_moment_at_rest_the_momentum_rule_is_running_ahead(beta1, steps, seed):
    """`momentum` takes the second moment to stand still; with eps large beside it, it does not matter at all."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.Adam([parameter], lr=1e-2, betas=(beta1, 0.5), eps=1e6)
    for _ in range(steps):
        parameter.grad = torch.randn(20)
        optimizer.step()
    moments = moments_of(optimizer, parameter)
    moved = last_displacement(moments, parameter.detach(), slice(None))
    ahead = run_ahead(moments, parameter.detach(), slice(None), shares=(1.0, 0.5), assumed=0.0, lrs=(1e-2, 1e-2))
    factor = farl.forecast.rules.momentum_factor(beta1, steps, (1.0, 0.5))
    assert torch.allclose(ahead, factor * moved, rtol=1e-3, atol=1e-12)


def test_every_group_goes_on_at_its_own_rate():
    """The common rate of a plan scales each leaf's last one."""
    torch.manual_seed(0)
    slow, fast = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.AdamW([{"params": [slow], "lr": 1e-3}, {"params": [fast], "lr": 1e-1}], weight_decay=0.0)
    forecaster = farl.Forecaster(
        [("slow", slow), ("fast", fast)], optimizer, rule="moments", max_horizon=2,
        lr_schedule=lambda version: 1e-3 * 0.5**version,
    )  # fmt: skip
    for p in (slow, fast):
        p.grad = torch.randn(6)
    optimizer.step()
    forecaster.observe()
    sent = {n: w.clone() for n, w in forecaster.weights(horizon=2)}
    for i in (1, 2):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        for p in (slow, fast):
            p.grad = torch.zeros(6)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**i
    assert torch.allclose(sent["slow"], slow.detach(), atol=1e-7)
    assert torch.allclose(sent["fast"], fast.detach(), atol=1e-6)


def test_the_rule_moments_is_damped_by_probes_and_never_to_nothing_unless_held():
    """Without coefficients there is no shadow, so it must send a little to learn anything."""
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw"], rule="moments", min_damping=0.2)
    train(model, optimizer, forecaster, 4)
    held = []
    for step in range(4, 30):
        plan = forecaster.plan()
        held.append(plan.held)
        if not plan.held:
            assert plan.damping >= 0.2
        forecaster.ship(plan)
        train(model, optimizer, forecaster, 1, first=step, ship=False)
        if not forecaster.can_probe(plan):
            continue
        stale = torch.randn(1, 64, generator=torch.Generator().manual_seed(step))
        drift = 0.1 * torch.randn(1, 64, generator=torch.Generator().manual_seed(100 + step))
        forecaster.probe(  # the policy moves the other way
            plan, logp_learner_BT=stale + drift, logp_behaviour_BT=stale - plan.damping * drift, logp_probe_BT=stale,
            mask_BT=torch.ones(1, 64, dtype=torch.bool),
        )  # fmt: skip
    assert not held[0]
    assert any("policy-space evidence" in reason for reason in held)
    assert sum(not reason for reason in held) <= 12, "trials, rarer each time"
