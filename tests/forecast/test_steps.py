"""Steps of optimizers are counted at the step itself, with the rates they were made at."""

import gc

import pytest
import torch
from torch import nn

import farl
from farl.errors import StateError

from .paths import make_learner, train


def stepped(parameter, optimizer):
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def one(lr=0.1, **changes):
    parameter = nn.Parameter(torch.zeros(8))
    return parameter, torch.optim.SGD([parameter], lr=lr, **changes)


def test_the_rate_of_a_step_is_the_one_it_was_made_at():
    """A scheduler that steps before `observe` must not lend the next rate to this update."""
    parameter, optimizer = one(lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    forecaster = farl.Forecaster([("w", parameter)], optimizer, rule="copy", history_dtype="float32")
    for _ in range(3):
        stepped(parameter, optimizer)
        schedule.step()
        forecaster.observe()
    assert forecaster.state.lrs == {1: 0.1, 2: 0.05, 3: 0.025}
    # the last displacement is -.025; no schedule was given, so the next rate is taken to be the last
    assert forecaster.plan().coefficients == (1.0,)


def test_a_known_schedule_scales_the_forecast_to_the_rates_that_come():
    parameter, optimizer = one(lr=0.1)
    forecaster = farl.Forecaster(
        [("w", parameter)], optimizer, rule="copy", history_dtype="float32", max_horizon=2,
        lr_schedule=lambda version: 0.1 * 0.5**version,
    )  # fmt: skip
    stepped(parameter, optimizer)
    forecaster.observe()
    # made at .1; the coming updates 1 and 2 are at .05 and .025
    (weight,) = (w for _, w in forecaster.weights(horizon=2))
    assert torch.allclose(weight, torch.full((8,), -0.1 - 0.05 - 0.025))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_loss_scaler_skipped_do_not_count(fused):
    """A plain optimizer is not called; a fused one is, and skips by itself."""
    parameter, optimizer = one(fused=fused)
    forecaster = farl.Forecaster([("w", parameter)], optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * parameter.sum() + parameter.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(forecaster.observe(allow_skip=True))
    assert [s is None for s in seen] == [False, True, False]
    assert forecaster.version == 2


def test_hooks_go_with_the_forecaster():
    parameter, optimizer = one()
    for _ in range(3):
        farl.Forecaster([("w", parameter)], optimizer)
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Subclass(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_counts_once():
    """torch runs the hooks of both, once each class has been made by itself."""
    one()
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = Subclass([parameter], lr=0.1)
    runs = []
    optimizer.register_step_post_hook(lambda *_: runs.append(1))
    forecaster = farl.Forecaster([("w", parameter)], optimizer)
    stepped(parameter, optimizer)
    assert len(runs) == 2
    assert forecaster.observe().version == 1


def test_a_step_that_failed_and_was_made_again_counts_once():
    parameter, optimizer = one()
    forecaster = farl.Forecaster([("w", parameter)], optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    stepped(parameter, optimizer)
    assert forecaster.observe().version == 1


def test_one_of_several_optimizers_may_skip_where_that_is_allowed():
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    pair = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.1)]
    forecaster = farl.Forecaster([("a", first), ("b", second)], pair, rule="copy")
    stepped(first, pair[0])
    with pytest.raises(StateError, match="made 1 and 0 steps"):
        forecaster.observe()
    assert forecaster.observe(allow_skip=True).displacement == pytest.approx(0.2)
    assert forecaster.version == 1
    assert forecaster.observe(allow_skip=True) is None


def test_an_optimizer_that_was_replaced_is_noticed():
    model, optimizer, forecaster = make_learner(lambda p: torch.optim.AdamW(p, lr=1e-2))
    train(model, optimizer, forecaster, 3)
    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other.step()
    with pytest.raises(StateError, match=r"made 0 steps .* after replacing the optimizer make a new Forecaster"):
        forecaster.observe()
    with pytest.raises(StateError, match="the weights changed, but the optimizer that is followed has not stepped"):
        forecaster.observe(allow_skip=True)


def test_a_group_at_rate_zero_does_not_hide_the_others():
    still, moving = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([{"params": [still], "lr": 0.0}, {"params": [moving], "lr": 0.4}])
    forecaster = farl.Forecaster([("a", still), ("b", moving)], optimizer, rule="copy", history_dtype="float32")
    for _ in range(2):
        still.grad, moving.grad = torch.ones(2), torch.ones(6)
        optimizer.step()
        forecaster.observe()
    assert forecaster.state.lrs[2] == pytest.approx(0.4 * 6 / 8), "mean over followed weights"
    assert torch.allclose(dict(forecaster.weights())["b"], torch.full((6,), -1.2))
