"""A saved forecaster: what fits it, and what is told of what does not."""

import copy
import json

import pytest
import torch

import farl
from farl.errors import StateError
from farl.forecast.saving import fingerprint

from .paths import make_learner, train
from .test_moments import OPTIMIZERS


def saved_learner(steps=5, **settings):
    model, optimizer, forecaster = make_learner(OPTIMIZERS["adamw"], **settings)
    train(model, optimizer, forecaster, steps)
    return model, optimizer, forecaster


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"lags": 2}, r"lags=2: the state was saved with lags=4; resume with the config it was saved with"),
        ({"history_dtype": "float32"}, r"history_dtype='float32': the state was saved with history_dtype='bfloat16'"),
        ({"metric": "euclidean"}, r"metric='euclidean': the state was saved with metric='sharp'"),
        ({"grouping": "layer"}, r"grouping='layer': the state was saved with grouping='all'"),
        ({"source": "optimizer"}, r"source='optimizer': the state was saved with source='weights'"),
        ({"rule": "moments"}, r"closed_form=True: the state was saved with closed_form=False"),
    ],
)
def test_a_setting_that_differs_is_named(own, message):
    model, optimizer, forecaster = saved_learner()
    other = farl.Forecaster(model.named_parameters(), optimizer, **own)
    with pytest.raises(StateError, match=message):
        other.load_state_dict(forecaster.state_dict())


def test_settings_that_shape_nothing_may_change():
    model, optimizer, forecaster = saved_learner()
    other = farl.Forecaster(model.named_parameters(), optimizer, rule="copy", ridge=0.1, window=20)
    other.load_state_dict(forecaster.state_dict())
    assert other.plan().rule == "copy"


def test_the_state_of_another_model_is_refused_before_anything_is_lost():
    _, _, forecaster = saved_learner()
    torch.manual_seed(0)
    other = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    mine = farl.Forecaster(other.named_parameters(), optimizer)
    before = mine.state
    with pytest.raises(StateError, match="the saved state is of another model"):
        mine.load_state_dict(forecaster.state_dict())
    assert mine.state is before


@pytest.mark.parametrize("saved", [{}, {"record": {}}, {"record": {"version": 3}}, {"record": 3, "tensors": {}}])
def test_a_dict_that_is_no_state_is_named(saved):
    _, _, forecaster = saved_learner(1)
    with pytest.raises(StateError, match=r"no forecaster's state; give what state_dict\(\) returned"):
        forecaster.load_state_dict(saved)


def test_a_state_between_step_and_observe_would_lose_a_displacement():
    _, optimizer, forecaster = saved_learner()
    optimizer.step()
    with pytest.raises(StateError, match=r"stepped since the last observe\(\); call observe\(\) first"):
        forecaster.state_dict()
    forecaster.observe()
    assert forecaster.state_dict()["record"]["version"] == 6


@pytest.mark.parametrize("settings", [{"rule": "moments"}, {"source": "optimizer"}, {"history_dtype": "int8"}])
def test_every_kind_of_state_continues_to_the_bit(settings):
    model, optimizer, forecaster = saved_learner(7, **settings)
    saved = forecaster.state_dict()
    saved = {"tensors": copy.deepcopy(saved["tensors"]), "record": json.loads(json.dumps(saved["record"]))}
    twin = copy.deepcopy(model)
    twin_optimizer = OPTIMIZERS["adamw"](twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = farl.Forecaster(twin.named_parameters(), twin_optimizer, **settings)
    resumed.load_state_dict(saved)
    assert train(twin, twin_optimizer, resumed, 6, first=7) == train(model, optimizer, forecaster, 6, first=7)
    assert resumed.plan() == forecaster.plan()


def test_a_fingerprint_sees_one_changed_weight_and_not_the_number_of_threads():
    leaves = [("a", torch.randn(40, 3)), ("b", torch.randn(7))]
    own = fingerprint(leaves)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert fingerprint(leaves) == own
    torch.set_num_threads(threads)
    leaves[1][1][3] += 1e-6
    assert fingerprint(leaves) != own
    assert fingerprint([("c", leaves[0][1]), leaves[1]]) != fingerprint(leaves)
