"""Half-precision learners whose optimizer steps fp32 masters."""

import warnings

import pytest
import torch
from torch import nn

import farl
from farl.errors import ConfigError


def half_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()


def fp32_trajectory(steps, lr=1e-4):
    """The weights an fp32 learner would have: the same gradients, drawn beforehand."""
    model = half_model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer)
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            p.grad = gradient(step, i, p)
        optimizer.step()
        forecaster.observe()
    return dict(forecaster.weights())


def gradient(step, i, p):
    generator = torch.Generator().manual_seed(100 * step + i)
    return torch.randn(p.shape, generator=generator) + 1.0


@pytest.mark.parametrize("as_mapping", [True, False])
def test_masters_given_by_the_user_are_followed(as_mapping):
    """The usual mixed-precision pattern: the optimizer owns fp32 copies, the model is refreshed from them."""
    model = half_model()
    copies = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(copies.values(), lr=1e-4)
    masters = copies if as_mapping else (lambda name, parameter: copies[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecaster = farl.Forecaster(model.named_parameters(), optimizer, masters=masters)
    for step in range(6):
        for i, p in enumerate(copies.values()):
            p.grad = gradient(step, i, p)
        optimizer.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(copies[n])
        forecaster.observe()
    expected = fp32_trajectory(6)
    for name, weight in forecaster.weights():
        assert weight.dtype == torch.float32
        assert torch.allclose(weight, expected[name], atol=1e-7)


class MasterAdam(torch.optim.Optimizer):
    """Keeps masters in its state, as Transformer Engine's FusedAdam does."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master_param"] = p.detach().float().clone()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p]["master_param"]
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


def test_masters_in_the_optimizer_state_are_found():
    model = half_model()
    optimizer = MasterAdam(model.parameters(), lr=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecaster = farl.Forecaster(model.named_parameters(), optimizer, rule="copy", history_dtype="float32")
    start = {n: optimizer.state[p]["master_param"].clone() for n, p in model.named_parameters()}
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        forecaster.observe()
    for name, weight in forecaster.weights():
        assert torch.allclose(weight, start[name] - 3e-4, atol=1e-7), "two steps made, one forecast, none lost to bf16"


def test_a_half_precision_learner_is_warned_of_what_it_loses():
    model = half_model()
    with pytest.warns(UserWarning, match=r"4 trained parameters are half precision .* about 99 % of an update is lost"):
        farl.Forecaster(model.named_parameters(), torch.optim.AdamW(model.parameters()))


def test_autocast_needs_nothing_special():
    """torch's own mixed precision keeps the parameters in fp32."""
    model = half_model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer)
    for step in range(12):
        list(forecaster.weights())
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x).float() - x[:, :3].sin()).square().mean()
        loss.backward()
        optimizer.step()
        seen = forecaster.observe()
    assert seen.scored[-1].error_ratio < 0.7


def test_a_master_of_another_shape_is_named():
    model = half_model()
    copies = {n: nn.Parameter(torch.zeros(2)) for n, _ in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"masters: that of '0.weight' has shape \(2,\), the parameter \(16, 6\)"):
        farl.Forecaster(model.named_parameters(), torch.optim.AdamW(copies.values()), masters=copies)


class LazyMasterAdam(MasterAdam):
    """Makes its masters at the first step, and replaces them when a state is loaded."""

    def __init__(self, parameters, lr):
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "master_param" not in self.state[p]:
                    self.state[p]["master_param"] = p.detach().float().clone()
        super().step()


def stepped(model, optimizer):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_masters_made_at_the_first_step_are_followed_from_then_on():
    model = half_model()
    optimizer = LazyMasterAdam(model.parameters(), lr=1e-4)
    with pytest.warns(UserWarning, match="half precision"):
        forecaster = farl.Forecaster(model.named_parameters(), optimizer, rule="copy", history_dtype="float32")
    stepped(model, optimizer)
    first = forecaster.observe()
    assert (first.version, first.finite) == (1, True)
    assert forecaster.plan().held == "no displacement observed yet"
    stepped(model, optimizer)
    forecaster.observe()
    for name, weight in forecaster.weights():
        master = optimizer.state[model.get_parameter(name)]["master_param"]
        assert torch.allclose(weight, master - 1e-4, atol=1e-7), "the bf16 weight itself has not moved"


def test_masters_replaced_by_loading_are_looked_up_anew():
    model = half_model()
    optimizer = MasterAdam(model.parameters(), lr=1e-4)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer, rule="copy", history_dtype="float32")
    stepped(model, optimizer)
    forecaster.observe()
    for p in model.parameters():
        optimizer.state[p]["master_param"] = optimizer.state[p]["master_param"].clone()
    stepped(model, optimizer)
    assert forecaster.observe().displacement == pytest.approx(
        1e-4 * sum(p.numel() for p in model.parameters()) ** 0.5, rel=1e-4
    )
