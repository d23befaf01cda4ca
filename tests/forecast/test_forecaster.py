import copy
import json
import re

import pytest
import torch
from torch import nn

import farl
from farl.errors import ConfigError, StateError

from .paths import make_learner, train


def make(seed=0, lr=1e-3, **settings):
    return make_learner(lambda p: torch.optim.AdamW(p, lr=lr), seed=seed, **settings)


def test_three_lines_in_a_training_loop_forecast_better_than_stale():
    ratios = train(*make(), 60)
    assert len(ratios) == 60
    assert ratios[0] == 1.0, "nothing is known at version 0: stale"
    assert sum(ratios[20:]) / 40 < 0.6


@pytest.mark.parametrize("rule", ["copy", "least_squares", "auto"])
def test_error_ratio_is_the_real_one(rule):
    model, optimizer, forecaster = make(rule=rule, history_dtype="float32")
    train(model, optimizer, forecaster, 12)
    forecast = {n: w.clone() for n, w in forecaster.weights()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, forecaster, 1, first=12, ship=False)
    after = {n: p.detach() for n, p in model.named_parameters()}
    residual = sum(float((after[n] - forecast[n]).square().sum()) for n in forecast) ** 0.5
    moved = sum(float((after[n] - before[n]).square().sum()) for n in forecast) ** 0.5
    assert forecaster.last_observation.scored[-1].error_ratio == pytest.approx(residual / moved, rel=1e-4)


def test_a_resumed_forecaster_continues_to_the_bit():
    """Trap 6: history, Gram scalars and pending scores come back."""
    settings = {"rule": "auto", "max_horizon": 3}
    model, optimizer, forecaster = make(**settings)
    train(model, optimizer, forecaster, 9, horizon=3)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = copy.deepcopy(optimizer.state_dict())
    saved = forecaster.state_dict()
    record = json.loads(json.dumps(saved["record"]))
    expected = train(model, optimizer, forecaster, 9, first=9, horizon=3)
    other, other_optimizer, resumed = make(seed=1, **settings)
    with torch.no_grad():
        for n, p in other.named_parameters():
            p.copy_(weights[n])
    other_optimizer.load_state_dict(moments)
    resumed.load_state_dict({"tensors": saved["tensors"], "record": record})
    assert resumed.version == 9
    assert [p.base_version for p in resumed.state.pending] == [7, 8]
    assert train(other, other_optimizer, resumed, 9, first=9, horizon=3) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_exact_round_trip_of_the_whole_trajectory():
    def run(split):
        model, optimizer, forecaster = make(rule="auto")
        ratios = train(model, optimizer, forecaster, split)
        if split < 14:
            saved = {"tensors": forecaster.state_dict()["tensors"], "record": forecaster.state_dict()["record"]}
            saved["record"] = json.loads(json.dumps(saved["record"]))
            forecaster = farl.Forecaster(model.named_parameters(), optimizer, rule="auto")
            forecaster.load_state_dict(saved)
            ratios += train(model, optimizer, forecaster, 14 - split, first=split)
        return ratios, [w.clone() for _, w in forecaster.weights()]

    plain, interrupted = run(14), run(6)
    assert plain[0] == interrupted[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], interrupted[1], strict=True))


def test_a_state_of_other_weights_or_another_config_is_refused():
    model, optimizer, forecaster = make(lags=3)
    train(model, optimizer, forecaster, 4)
    saved = forecaster.state_dict()
    _, _, other = make(seed=1, lags=3)
    with pytest.raises(StateError, match="load the model first"):
        other.load_state_dict(saved)
    shorter = farl.Forecaster(model.named_parameters(), optimizer, lags=2)
    with pytest.raises(StateError, match="resume with the config it was saved with"):
        shorter.load_state_dict(saved)


def test_skipped_updates_make_no_version():
    """Trap 7."""
    model, optimizer, forecaster = make()
    train(model, optimizer, forecaster, 3)
    assert forecaster.observe(allow_skip=True) is None
    assert forecaster.version == 3
    with pytest.raises(StateError, match="made 0 steps since the last call, exactly 1"):
        forecaster.observe()
    optimizer.step()
    optimizer.step()
    with pytest.raises(StateError, match="made 2 steps"):
        forecaster.observe()


def test_tied_parameters_move_once_and_frozen_ones_cost_nothing():
    """Trap 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    for p in model[3].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    forecaster = farl.Forecaster(model.named_parameters(), optimizer, rule="copy")
    assert list(forecaster.state.rings) == ["0.weight"]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        forecaster.observe()
    sent = dict(forecaster.weights())
    assert list(sent) == [n for n, _ in model.named_parameters()]
    assert torch.equal(sent["3.weight"], model[3].weight)
    assert not torch.equal(sent["0.weight"], model[0].weight)


def test_the_wire_dtype_is_the_last_cast():
    model, optimizer, forecaster = make(rule="copy")
    train(model, optimizer, forecaster, 3)
    plan = forecaster.plan()
    full = dict(forecaster.weights(plan=plan))
    for name, half in forecaster.weights(plan=plan, dtype=torch.bfloat16):
        assert torch.equal(half, full[name].bfloat16())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("rule", ["least_squares", "moments", "stale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_written_into_given_tensors(rule, dtype, kernels):
    model, optimizer, forecaster = make(rule=rule, kernels=kernels)
    train(model, optimizer, forecaster, 5)
    plan = forecaster.plan()
    expected = dict(forecaster.weights(plan=plan))
    into = {name: torch.full_like(p, torch.nan, dtype=dtype) for name, p in model.named_parameters()}
    del into[next(iter(into))]
    for name, weight in forecaster.weights(plan=plan, into=into):
        if name in into:
            assert weight.data_ptr() == into[name].data_ptr()
            assert torch.equal(into[name], expected[name].to(dtype)), name
        else:
            assert torch.equal(weight, expected[name])
            assert weight.dtype == torch.float32


def test_tied_frozen_and_integer_weights_are_written_into_theirs_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.tensor([3, 4]), requires_grad=False))
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    named = list(model.named_parameters(remove_duplicate=False))
    forecaster = farl.Forecaster(named, optimizer, rule="copy")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        forecaster.observe()
    plan = forecaster.plan()
    expected = {name: weight.clone() for name, weight in forecaster.weights(plan=plan)}
    into = {name: torch.zeros_like(p) for name, p in named}
    for name, weight in forecaster.weights(plan=plan, into=into):
        assert weight.data_ptr() == into[name].data_ptr(), name
    assert set(into) == set(expected) == {"count", "0.weight", "1.weight", "2.weight", "2.bias"}
    assert all(torch.equal(into[name], expected[name]) for name in into)


def test_tensors_that_do_not_fit_are_refused_before_anything_is_recorded():
    model, optimizer, forecaster = make(rule="copy")
    train(model, optimizer, forecaster, 3)
    name, weight = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)
    before = forecaster.state
    for target, remedy in (
        (torch.empty(3, 3), "give a contiguous tensor of"),
        (torch.empty(weight.shape[::-1]).T, "contiguous: False"),
        (torch.empty(weight.shape, device="meta"), "on meta"),
        (weight.detach(), "the learner's own weight"),
    ):
        with pytest.raises(StateError, match=re.escape(f"into[{name!r}]") + ".*" + remedy):
            forecaster.weights(into={name: target})
    with pytest.raises(StateError, match=r"into\['nobody'\]: no such weight"):
        forecaster.weights(into={"nobody": torch.empty(1)})
    with pytest.raises(StateError, match="into: given with gather=True"):
        forecaster.weights(into={name: torch.empty_like(weight)}, gather=True)
    assert forecaster.state is before
    flat = {name: torch.empty(weight.numel() + 1)}
    with pytest.raises(StateError, match="give a tensor like the leaf"):
        list(farl.forecast.stream(before, forecaster.plan(), into=flat))


def test_presented_weights_leave_the_learner_untouched_to_the_bit():
    """Trap 4: other weights are seen inside the block, the exact ones after, whatever happens."""
    model, optimizer, forecaster = make()
    train(model, optimizer, forecaster, 5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    versions = {n: p.data_ptr() for n, p in model.named_parameters()}

    def fail_inside():
        with forecaster.presented(forecaster.past_weights(2)):
            assert not torch.equal(model[0].weight, before["0.weight"])
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n])
        assert p.data_ptr() == versions[n]


def test_half_precision_masters_are_warned_about():
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="about 99 % of an update is lost in rounding"):
        farl.Forecaster(model.named_parameters(), optimizer)


def test_wrong_arguments_are_named():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'lag'"):
        farl.Forecaster(model.named_parameters(), optimizer, lag=3)
    with pytest.raises(ConfigError, match="give config or keywords, not both"):
        farl.Forecaster(model.named_parameters(), optimizer, config=farl.ForecastConfig(), lags=3)
    with pytest.raises(ConfigError, match="owns none of the named parameters"):
        farl.Forecaster(nn.Linear(2, 2).named_parameters(), optimizer)


def test_holds_are_counted_by_reason():
    _, _, forecaster = make(rule="copy")
    list(forecaster.weights())
    assert forecaster.num_holds == {"no displacement observed yet": 1}
    assert forecaster.last_plan.held
