"""Which leaves are followed: tied, idle, replaced and new ones; what optimizers tell of each."""

import pytest
import torch
from torch import nn

import farl
from farl.errors import ConfigError, StateError

from .paths import make_learner, train
from .test_moments import OPTIMIZERS


class Tied(nn.Module):
    """Two names for one weight, as language models have for embedding and head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 5, bias=False)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.embed(x))))


def step(model, optimizer, i=0):
    optimizer.zero_grad()
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(i))
    (model(x) - x.sin()).square().mean().backward()
    optimizer.step()


def test_both_names_of_a_tied_weight_are_sent_where_both_are_given():
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    both = list(model.named_parameters(remove_duplicate=False))
    forecaster = farl.Forecaster(both, optimizer, rule="copy")
    assert list(forecaster.state.rings) == ["embed.weight", "middle.weight", "middle.bias"]
    for i in range(4):
        step(model, optimizer, i)
        forecaster.observe()
    exact = {n: p.detach().clone() for n, p in both}
    sent = {n: w.clone() for n, w in forecaster.weights()}
    assert list(sent) == [n for n, _ in both]
    assert torch.equal(sent["head.weight"], sent["embed.weight"])
    assert not torch.equal(sent["embed.weight"], exact["embed.weight"])
    x = torch.randn(3, 5)
    before = model(x)
    with forecaster.presented(forecaster.weights()):
        assert torch.equal(model.head.weight, sent["head.weight"])
        assert model.head.weight is model.embed.weight
    assert torch.equal(model(x), before), "exchanged twice and back twice"
    assert all(torch.equal(p, exact[n]) for n, p in both)


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
def test_leaves_that_the_optimizer_passed_over_did_not_move(name):
    """Its state still tells the step before; a leaf without a gradient made none."""
    torch.manual_seed(0)
    used, unused = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    optimizer = OPTIMIZERS[name]([used, unused])
    forecaster = farl.Forecaster([("used", used), ("unused", unused)], optimizer, rule="copy", source="optimizer")
    for i in range(4):
        used.grad = torch.randn(8) + 1
        unused.grad = torch.randn(8) + 1 if i < 2 else None
        optimizer.step()
        forecaster.observe()
    sent = dict(forecaster.weights())
    assert torch.equal(sent["unused"], unused.detach())
    assert not torch.equal(sent["used"], used.detach())
    assert forecaster.last_observation.displacement == pytest.approx(
        float((sent["used"] - used.detach()).norm()), rel=1e-2
    )


def test_gradients_cleared_before_observe_are_named_where_they_are_needed():
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    forecaster = farl.Forecaster([("w", parameter)], optimizer, rule="copy", source="optimizer")
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateError, match=r"no gradient is left to tell which weights SGD moved; .* before zero_grad"):
        forecaster.observe()


def grown(**settings):
    """A learner whose optimizer owns its first layer alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer, **settings)
    train(model, optimizer, forecaster, 6)
    return model, optimizer, forecaster


def test_a_parameter_the_forecaster_was_not_told_of_is_named():
    model, optimizer, forecaster = grown()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(StateError, match=r"parameter of shape \(3, 16\) that the forecaster does not follow; call"):
        train(model, optimizer, forecaster, 1, first=6)


def test_parameters_that_came_later_are_followed_from_a_new_history():
    model, optimizer, forecaster = grown(rule="copy")
    assert list(forecaster.state.rings) == ["0.weight", "0.bias"]
    optimizer.add_param_group({"params": list(model[2].parameters())})
    forecaster.add(model.named_parameters())
    assert list(forecaster.state.rings) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert forecaster.version == 6
    assert forecaster.plan().held == "no displacement observed yet"
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, forecaster, 1, first=6)
    assert forecaster.version == 7
    for name, weight in forecaster.weights():
        now = dict(model.named_parameters())[name].detach()
        assert torch.allclose(weight, 2 * now - before[name], atol=1e-4), name


def test_adding_what_is_known_keeps_the_history():
    model, optimizer, forecaster = grown(rule="copy")
    state = forecaster.state
    forecaster.add(model.named_parameters())
    assert forecaster.state is state
    assert len(train(model, optimizer, forecaster, 2, first=6)) == 2


def test_a_replaced_parameter_is_followed_in_place_of_the_old():
    model, optimizer, forecaster = grown(rule="copy")
    fresh = nn.Parameter(torch.zeros(24, 6))  # a vocabulary that grew
    bias = nn.Parameter(torch.zeros(24))
    model[0].weight, model[0].bias = fresh, bias
    optimizer.param_groups[0]["params"] = [fresh, bias]
    forecaster.add(model.named_parameters())
    assert forecaster.state.sizes["0.weight"] == 24 * 6
    assert forecaster.plan().held == "no displacement observed yet"
    for _ in range(2):
        fresh.grad, bias.grad = torch.ones_like(fresh), torch.ones_like(bias)
        optimizer.step()
        forecaster.observe()
    assert forecaster.plan().moves


def test_a_state_saved_after_growing_fits_a_forecaster_made_anew():
    model, optimizer, forecaster = grown()
    optimizer.add_param_group({"params": list(model[2].parameters())})
    forecaster.add(model.named_parameters())
    train(model, optimizer, forecaster, 5, first=6)
    saved = forecaster.state_dict()
    resumed = farl.Forecaster(model.named_parameters(), optimizer)
    resumed.load_state_dict(saved)
    assert resumed.plan() == forecaster.plan()


def test_shapes_that_change_under_one_name_are_named():
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw"], rule="copy")
    train(model, optimizer, forecaster, 3)
    model[2].bias.data = torch.zeros(5)
    optimizer.step = lambda: None
    with pytest.raises(farl.errors.FarlError, match="leaf '2.bias': 5 entries, 3 at init"):
        forecaster.observe(allow_skip=True)


def test_no_trained_parameter_is_an_error():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigError, match="owns none of the named parameters"):
        farl.Forecaster(model.named_parameters(), optimizer)
