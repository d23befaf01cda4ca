"""Laws that every corrector of the table obeys; an entry without them cannot exist."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farl.correct import CORRECTORS, CorrectorConfig, LossInputs, Need, diagnose, make_corrector
from farl.correct.reduce import REDUCTIONS
from farl.errors import ConfigError, ShapeError

from .cases import gradient, random_inputs, scalar

VARIANTS = {
    "none": [{}, {"form": "score"}],
    "ppo": [{}, {"anchor": "proximal", "dual_clip": 3.0}, {"clip_low": 0.0, "clip_high": 0.0}],
    "dapo": [{}],
    "decoupled_ppo": [
        {},
        {"cap": 1.1},
        {"cap": 1.1, "cap_action": "clamp", "level": "sequence"},
        {"denominator": "kept"},
    ],
    "tis": [{}, {"base": "policy_gradient", "cap": 1.05}, {"level": "sequence"}],
}
ALL = [pytest.param(n, o, id=f"{n}-{i}") for n, variants in VARIANTS.items() for i, o in enumerate(variants)]
law = pytest.mark.parametrize(("name", "options"), ALL)


def make(name, options, **more):
    return make_corrector(CorrectorConfig(name=name, **options, **more))


def test_every_corrector_has_variants():
    assert set(VARIANTS) == set(CORRECTORS)


@law
def test_padding_never_matters_whatever_it_holds(name, options):
    corrector, inputs = make(name, options), random_inputs()
    value, grad = scalar(corrector, inputs), gradient(corrector, inputs)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {
            f.name: torch.where(inputs.mask_BT, v.detach(), torch.full_like(v, garbage))
            for f in fields(LossInputs)
            if (v := getattr(inputs, f.name)) is not None and v.is_floating_point() and f.name.endswith("_BT")
        }
        other = replace(inputs, **dirty)
        other.logp_learner_BT.requires_grad_()
        assert torch.equal(scalar(corrector, other), value)
        assert torch.equal(gradient(corrector, other), grad)
        assert (grad[~inputs.mask_BT] == 0).all()


@law
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name, options):
    corrector, inputs = make(name, options), random_inputs(on_policy=True)
    expected = -inputs.advantage_BT * inputs.mask_BT / inputs.mask_BT.sum()
    assert torch.allclose(gradient(corrector, inputs), expected, atol=1e-12)


@law
def test_zero_advantage_has_zero_gradient(name, options):
    inputs = random_inputs()
    inputs = replace(inputs, advantage_BT=torch.zeros_like(inputs.advantage_BT))
    assert not gradient(make(name, options), inputs).any()


@law
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_add_up_to_the_batch(name, options, reduction):
    corrector, inputs = make(name, options, reduction=reduction), random_inputs()
    context = corrector.prepare(inputs)
    denominator = corrector.denominator(inputs.mask_BT, context)
    whole = scalar(corrector, inputs)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = LossInputs(**{
            f.name: v[rows] if (v := getattr(inputs, f.name)) is not None else None for f in fields(LossInputs)
        })  # fmt: skip
        total += corrector.aggregate(corrector(part, context), part.mask_BT, denominator)
    assert torch.allclose(total, whole, atol=1e-12)


@law
def test_order_of_sequences_changes_nothing_but_order(name, options):
    corrector, inputs = make(name, options), random_inputs()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = LossInputs(**{
        f.name: v[order] if (v := getattr(inputs, f.name)) is not None else None for f in fields(LossInputs)
    })  # fmt: skip
    assert torch.equal(corrector(moved).token_loss_BT, corrector(inputs).token_loss_BT[order])


@law
def test_dropped_and_clipped_tokens_have_no_gradient(name, options):
    corrector, inputs = make(name, options), random_inputs(spread=1.5)
    output, grad = corrector(inputs), gradient(corrector, inputs)
    assert not grad[inputs.mask_BT & ~output.keep_BT].any()
    assert not grad[output.clipped_BT].any()
    live = output.keep_BT & ~output.clipped_BT
    denominator = corrector.denominator(inputs.mask_BT, corrector.prepare(inputs))
    expected = -inputs.advantage_BT * output.weight_BT / denominator
    assert torch.allclose(grad[live], expected[live], atol=1e-12), "weight_BT is what multiplies A grad logp"


@law
def test_finite_at_extreme_ratios(name, options):
    for sign in (1.0, -1.0):
        inputs = random_inputs(dtype=torch.float32)
        inputs = replace(inputs, logp_behaviour_BT=inputs.logp_behaviour_BT + sign * 300)
        corrector = make(name, options)
        assert torch.isfinite(scalar(corrector, inputs))
        assert torch.isfinite(gradient(corrector, inputs)).all()


@law
def test_no_gradient_to_the_other_policies_and_inputs_stay_as_they_were(name, options):
    inputs = random_inputs()
    others = [inputs.logp_behaviour_BT.requires_grad_(), inputs.logp_proximal_BT.requires_grad_()]
    copies = [x.detach().clone() for x in (*others, inputs.logp_learner_BT, inputs.advantage_BT)]
    loss = scalar(make(name, options), inputs)
    assert torch.autograd.grad(loss, others, allow_unused=True, retain_graph=True) == (None, None)
    for x, copy in zip((*others, inputs.logp_learner_BT, inputs.advantage_BT), copies, strict=True):
        assert torch.equal(x, copy)


@law
def test_half_precision_inputs_are_computed_in_float32(name, options):
    inputs = random_inputs(dtype=torch.float32)
    halves = {
        f.name: v.detach().bfloat16() if v is not None and v.is_floating_point() else v
        for f in fields(LossInputs)
        for v in [getattr(inputs, f.name)]
    }
    assert make(name, options)(LossInputs(**halves)).token_loss_BT.dtype == torch.float32


@law
def test_an_empty_mask_has_loss_zero(name, options):
    inputs = random_inputs()
    inputs = replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    corrector = make(name, options)
    assert scalar(corrector, inputs).item() == 0.0
    metrics = diagnose(inputs, corrector(inputs), lag_BT=inputs.lag_BT, miss_BT=inputs.lag_BT)
    assert all(math.isfinite(v) for v in metrics.values())


@law
def test_what_is_needed_and_missing_is_named(name, options):
    corrector, inputs = make(name, options), random_inputs()
    if Need.PROXIMAL in corrector.needs:
        with pytest.raises(ConfigError, match="logp_proximal_BT=None: this corrector needs proximal log-probs"):
            corrector(replace(inputs, logp_proximal_BT=None))
    else:
        corrector(replace(inputs, logp_proximal_BT=None))


def slow_ppo(inputs, low, high, dual):
    """Token by token, as the paper writes it."""
    total, count = 0.0, 0
    for b in range(inputs.mask_BT.shape[0]):
        for t in range(inputs.mask_BT.shape[1]):
            if inputs.mask_BT[b, t]:
                r = math.exp(inputs.logp_learner_BT[b, t].item() - inputs.logp_behaviour_BT[b, t].item())
                a = inputs.advantage_BT[b, t].item()
                loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
                total += min(loss, -dual * a) if a < 0 else loss
                count += 1
    return total / count


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 3), st.floats(1.01, 5), st.floats(0.01, 2))
def test_ppo_equals_its_slow_twin(seed, low, high, dual, spread):
    inputs = random_inputs(seed, spread=spread)
    corrector = make("ppo", {"clip_low": low, "clip_high": high, "dual_clip": dual})
    assert scalar(corrector, inputs).item() == pytest.approx(slow_ppo(inputs, low, high, dual), rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 4))
def test_tis_and_decoupled_ppo_agree_where_no_cap_bites_and_clamping_is_truncation(seed, cap):
    inputs = random_inputs(seed)
    clamp = make("decoupled_ppo", {"cap": cap, "cap_action": "clamp"})
    truncate = make("tis", {"cap": cap})
    assert torch.allclose(clamp(inputs).token_loss_BT, truncate(inputs).token_loss_BT)


def test_tensors_that_do_not_fit_are_named():
    inputs = random_inputs()
    corrector = make("none", {})
    with pytest.raises(ShapeError, match=r"advantage_BT: shape \(6, 4\), must be \(6, 5\)"):
        corrector(replace(inputs, advantage_BT=inputs.advantage_BT[:, :4]))
    with pytest.raises(ShapeError, match=r"reward_B: shape \(5,\), must be \(6,\)"):
        corrector(replace(inputs, reward_B=inputs.reward_B[:5]))
    with pytest.raises(ShapeError, match="must be bool; use mask != 0"):
        corrector(replace(inputs, mask_BT=inputs.mask_BT.float()))


def test_diagnostics_by_hand():
    behaviour = torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log()
    learner = torch.tensor([[0.5, 0.8], [0.5, 0.5]]).log()
    inputs = LossInputs(
        logp_learner_BT=learner, logp_behaviour_BT=behaviour, logp_proximal_BT=learner,
        mask_BT=torch.tensor([[True, True], [True, False]]), advantage_BT=torch.ones(2, 2),
    )  # fmt: skip
    lag = torch.tensor([[1, 1], [3, 3]])
    metrics = diagnose(inputs, make("ppo", {})(inputs), lag_BT=lag, miss_BT=lag - 1)
    assert metrics["correct/clip_fraction"] == pytest.approx(2 / 3)  # 1.6 and 2.0 are above 1.2
    assert metrics["correct/weight_max"] == pytest.approx(2.0)
    assert metrics["correct/weight_mean"] == pytest.approx((1 + 1.6 + 2) / 3)
    assert metrics["policy/weight_variance"] == pytest.approx((0 + 0.36 + 1) / 3, rel=1e-5)
    assert metrics["lag/mean_versions"] == pytest.approx(5 / 3)
    assert metrics["lag/max_versions"] == 3
    assert metrics["miss/mean_versions"] == pytest.approx(2 / 3)
    assert metrics["policy/kl_nats_lag_3"] == pytest.approx(1 - math.log(2), rel=1e-5)
    assert metrics["correct/clip_fraction_lag_1"] == pytest.approx(0.5)
    masked = diagnose(inputs, make("decoupled_ppo", {"cap": 1.5})(inputs))
    assert masked["correct/mask_fraction"] == pytest.approx(2 / 3)
