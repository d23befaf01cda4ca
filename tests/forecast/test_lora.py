"""LoRA learners: factors are forecast by default, and merge into what an engine without LoRA loads."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import farl
from farl.errors import ConfigError
from farl.forecast.lora import find_adapters, merge, plain_name

from .paths import train


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 32)
        self.down = nn.Linear(32, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def adapted(**changes):
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"], **changes})
    return get_peft_model(Net(), config)


def test_factors_are_forecast_and_frozen_weights_cost_nothing():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer)
    assert all("lora_" in name for name in forecaster.state.rings)
    assert len(forecaster.state.rings) == 4
    ratios = train(model, optimizer, forecaster, 40)
    assert sum(ratios[10:]) / 30 < 0.7


def test_a_merged_forecast_acts_as_the_adapted_model_with_forecast_factors():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer)
    train(model, optimizer, forecaster, 10)
    plan = forecaster.plan()
    plain = Net()
    merged = dict(merge(find_adapters(model), forecaster.weights(plan=plan)))
    assert set(merged) == {n for n, _ in plain.named_parameters()}
    plain.load_state_dict(merged)
    x = torch.randn(5, 6)
    with forecaster.presented(forecaster.weights(plan=plan)), torch.no_grad():
        assert torch.allclose(plain(x), model(x), atol=1e-5)
    assert not torch.allclose(plain(x), model(x), atol=1e-5), "and not as the model of dispatch time"


def test_merging_equals_what_peft_merges():
    model = adapted(use_rslora=True)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    merged = dict(merge(find_adapters(model), ((n, p.detach().clone()) for n, p in model.named_parameters())))
    theirs = model.merge_and_unload()
    for name, p in theirs.named_parameters():
        assert torch.allclose(merged[name], p, atol=1e-6), name


def test_models_without_adapters_or_with_others_are_refused():
    with pytest.raises(ConfigError, match="no active LoRA adapter"):
        find_adapters(Net())
    with pytest.raises(ConfigError, match="embedding or DoRA adapter"):
        find_adapters(adapted(use_dora=True))


def test_forecast_products_yield_merged_weights_and_the_probe_sees_them():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    forecaster = farl.Forecaster(
        model.named_parameters(), optimizer, lora_products=model, rule="copy", lags=2, history_dtype="float32"
    )
    train(model, optimizer, forecaster, 6)
    adapters = find_adapters(model)
    names = dict(model.named_parameters())
    now = dict(merge(adapters, ((n, p.detach()) for n, p in names.items())))
    plan = forecaster.plan()
    sent = {plain_name(n): w.clone() for n, w in forecaster.weights(plan=plan)}
    assert set(sent) == set(now)
    into = {n: torch.empty_like(names[n]) for n, _ in forecaster.weights(plan=plan)}
    for name, weight in forecaster.weights(plan=plan, into=into):
        assert weight.data_ptr() == into[name].data_ptr()
        assert torch.equal(weight, sent[plain_name(name)])
    before = {n: w.clone() for n, w in now.items()}
    train(model, optimizer, forecaster, 1, first=6)
    after = dict(merge(adapters, ((n, p.detach()) for n, p in names.items())))
    stale = Net()
    stale.load_state_dict(before)
    x = torch.randn(5, 6)
    with forecaster.presented(forecaster.probe_weights(plan)), torch.no_grad():
        assert torch.allclose(model(x), stale(x), atol=1e-5)
    follow_up = {plain_name(n): w for n, w in forecaster.weights(plan=forecaster.plan())}
    for name in ("up.weight", "down.weight"):
        expected = after[name] + (after[name] - before[name])
        assert torch.allclose(follow_up[name], expected, atol=1e-5)


def test_products_need_history():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ConfigError, match="the optimizer knows factors, not their products"):
        farl.Forecaster(model.named_parameters(), optimizer, lora_products=model, rule="moments")


def test_a_convolution_or_a_bias_in_an_adapter_is_refused():
    with pytest.raises(ConfigError, match="is a convolution or has a bias in its adapter"):
        find_adapters(adapted(lora_bias=True))


def test_products_beside_a_weight_that_is_trained_itself_are_refused():
    model = adapted()
    model.base_model.model.up.base_layer.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ConfigError, match=r"up.base_layer.weight' is trained itself beside its adapter"):
        farl.Forecaster(model.named_parameters(), optimizer, lora_products=model)


def test_products_of_another_model_are_refused():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    inner = model.base_model.model  # the same parameters by other names
    with pytest.raises(ConfigError, match="no parameter is named 'base_model.model.up.base_layer.weight'; pass"):
        farl.Forecaster(inner.named_parameters(), optimizer, lora_products=model)


def test_layers_stored_the_other_way_round_merge_too():
    """GPT-2's Conv1D keeps [I, O]; peft marks it fan_in_fan_out."""
    from transformers.pytorch_utils import Conv1D

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = Conv1D(8, 6)

        def forward(self, x):
            return self.up(x)

    torch.manual_seed(0)
    model = get_peft_model(Other(), LoraConfig(r=2, target_modules=["up"], fan_in_fan_out=True))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    merged = dict(merge(find_adapters(model), ((n, p.detach().clone()) for n, p in model.named_parameters())))
    theirs = model.merge_and_unload()
    assert torch.allclose(merged["up.weight"], theirs.up.weight, atol=1e-6)
