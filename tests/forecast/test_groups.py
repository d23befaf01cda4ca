import pytest
import torch

from farl.forecast import ForecastPlan, init, observe, plan
from farl.forecast.groups import group_of
from farl.forecast.plan import ALL

from .paths import follow, momentum_path, settings


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model.embed_tokens.weight", "embedding", "outside"),
        ("lm_head.weight", "embedding", "outside"),
        ("transformer.wte.weight", "embedding", "outside"),
        ("model.layers.11.self_attn.q_proj.weight", "attention", "layer 11"),
        ("model.layers.11.self_attn.q_norm.weight", "norm", "layer 11"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp", "layer 0"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "mlp", "layer 3"),
        ("model.layers.0.input_layernorm.weight", "norm", "layer 0"),
        ("transformer.h.4.ln_1.weight", "norm", "layer 4"),
        ("model.norm.weight", "norm", "outside"),
        ("score.bias", "other", "outside"),
    ],
)
def test_groups_by_name(name, kind, layer):
    assert group_of(name, "kind") == kind
    assert group_of(name, "layer") == layer
    assert group_of(name, "all") == ALL


def test_each_group_gets_the_coefficients_it_would_get_alone():
    one, other = momentum_path(30, size=40, beta=0.9), momentum_path(30, size=60, seed=1, beta=0.3)
    config = settings(rule="least_squares_off", lags=2, grouping="layer")
    names = ("m.layers.0.w", "m.layers.1.w")
    state = init(list(zip(names, (one[0], other[0]), strict=True)), config)
    for a, b in zip(one[1:], other[1:], strict=True):
        state, _ = observe(state, list(zip(names, (a, b), strict=True)))
    together = plan(state, 1)
    assert set(together.terms) == {"layer 0", "layer 1"}
    for path, group in ((one, "layer 0"), (other, "layer 1")):
        alone = init([("w", path[0])], settings(rule="least_squares_off", lags=2))
        for point in path[1:]:
            alone, _ = observe(alone, [("w", point)])
        assert together.terms[group] == pytest.approx(plan(alone, 1).terms[ALL], rel=1e-4)
    assert together.coefficients == together.terms["layer 0"] + together.terms["layer 1"]
    assert ForecastPlan.from_json(together.to_json()) == together


def test_groups_that_agree_give_the_global_forecast_and_auto_scores_them_together():
    path = momentum_path(30, size=64)
    whole, _ = follow(path, settings())
    config = settings(grouping="layer")
    state = init([("x.0.a", path[0, :32]), ("x.1.b", path[0, 32:])], config)
    for point in path[1:]:
        state, _ = observe(state, [("x.0.a", point[:32]), ("x.1.b", point[32:])])
    split, joint = plan(state, 1), plan(whole, 1)
    assert split.rule == joint.rule
    assert split.scores["stale"] == pytest.approx(1.0)
    for terms in split.terms.values():
        assert terms == pytest.approx(joint.terms[ALL], abs=0.25)
    total = state.grams["layer 0"].inner(30, 29) + state.grams["layer 1"].inner(30, 29)
    assert total == pytest.approx(whole.gram.inner(30, 29), rel=1e-4)
    assert torch.isfinite(torch.tensor(split.coefficients)).all()
