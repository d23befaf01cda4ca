"""Laws that every corrector of the table obeys; an entry without them cannot exist."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farl.correct
from farl.correct import CORRECTORS, CorrectorConfig, LossInputs, Treatment, diagnose, make_corrector
from farl.correct.adapt import balanced_bounds, optimal_baseline
from farl.correct.catalogue import create, defaults_of, source_of
from farl.correct.reduce import REDUCTIONS
from farl.errors import ConfigError, ConformanceError, ShapeError
from farl.testing import LAWS, check_corrector
from farl.testing import example_inputs as random_inputs

from . import reference

VARIANTS = {
    "none": [{}, {"form": "score"}],
    "ppo": [{}, {"anchor": "proximal", "dual_clip": 3.0}, {"clip_low": 0.0, "clip_high": 0.0}, {"ratio_cap": 1.3}],
    "dual_clip_ppo": [{}, {"dual_clip": 1.1}],
    "dapo": [{}, {"anchor": "proximal"}],
    "decoupled_ppo": [
        {},
        {"cap": 1.1},
        {"cap": 1.1, "cap_action": "clamp", "level": "sequence"},
        {"cap": 1.1, "level": "geometric"},
        {"denominator": "kept", "cap": 1.1},
    ],
    "a3po": [{}, {"cap": 1.05}, {"lag_zero": "learner", "cap_action": "clamp"}],
    "tis": [
        {},
        {"base": "policy_gradient", "cap": 1.05},
        {"level": "sequence"},
        {"floor": 0.8, "cap": 1.1},
        {"normalise": True, "cap": 1.1},
        {"normalise": True, "level": "sequence"},
    ],
    "mis": [
        {},
        {"level": "token", "floor": 0.8, "cap": 1.2},
        {"level": "geometric", "floor": 0.9, "cap": 1.1, "survivor": "token"},
        {"level": "token", "floor": 0.9, "cap": 1.2, "survivor": "one", "inverse": True, "denominator": "kept"},
        {"base": "policy_gradient", "cap": 1.2, "denominator": "kept"},
    ],
    "icepop": [{}, {"floor": 0.9, "cap": 1.1}, {"base": "policy_gradient", "floor": 0.9, "cap": 1.1}],
    "cispo": [{}, {"clip_low": 0.1, "clip_high": 0.2}, {"bounds": "absolute", "clip_low": 0.5, "clip_high": 1.1}],
    "gspo": [{}, {"clip_low": 0.1, "clip_high": 0.1}, {"form": "direct", "clip_low": 0.1, "clip_high": 0.1}],
    "gmpo": [{}, {"log_cap": 0.05}, {"anchor": "proximal"}],
    "sapo": [{}, {"tau_positive": 3.0, "tau_negative": 0.5}],
    "m2po": [
        {},
        {"threshold": 0.01, "statistic": "proximal"},
        {"clip_low": 0.1, "clip_high": 0.1, "denominator": "kept"},
    ],
    "dppo": [
        {},
        {"gap_low": 0.02, "gap_high": 0.02, "kl_penalty": 0.0},
        {"form": "score", "ratio_cap": 1.1, "gap_low": 0.02, "gap_high": 0.02},
        {"divergence": "kl", "gap_low": 0.002, "gap_high": 0.002},
    ],
    "topr": [{}, {"level": "token"}, {"split": "advantage", "zero_is_positive": True}],
    "vcpo": [{}, {"baseline": "given", "step_scale": "linear"}, {"divide_by_std": True, "cap": 1.1}],
    "vespo": [{}, {"power_positive": 1.0, "anchor": "proximal"}],
    "bapo": [{}, {"target": 2.0}, {"target": 0.1}, {"dual_clip": None, "anchor": "proximal"}],
    "aspo": [{}, {"weight_cap": 1.05}, {"clip_low": 0.05, "clip_high": 0.05}],
    "opsm": [{}, {"delta": 0.05}, {"anchor": "proximal", "delta": 0.0, "denominator": "kept"}],
    "opmd": [{}, {"form": "token", "tau": 1.0}, {"tau": 1.0}],
    "dro": [{}, {"beta": 1.0, "anchor": "proximal"}],
    "glm5": [{}, {"clip_low": 0.05, "clip_high": 0.05, "denominator": "kept"}],
    "matched_replay": [{}, {"heuristic": "own"}, {"level": "sequence", "cap": 1.1}],
}
ALL = [pytest.param(n, o, id=f"{n}-{i}") for n, variants in VARIANTS.items() for i, o in enumerate(variants)]
law = pytest.mark.parametrize(("name", "options"), ALL)


def make(name, options, **more):
    return make_corrector(CorrectorConfig(name=name, **options, **more))


def test_every_corrector_has_variants():
    assert set(VARIANTS) == set(CORRECTORS)


@pytest.mark.parametrize("law_name", LAWS)
@law
def test_law(name, options, law_name):
    corrector = make(name, options)
    if reason := dict(corrector.exempt).get(law_name):
        assert len(reason) > 10
    else:
        LAWS[law_name](corrector)


@law
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_and_on_policy_gradient_in_every_reduction(name, options, reduction):
    corrector = make(name, options, reduction=reduction)
    LAWS["micro_batches"](corrector)
    if "on_policy" not in dict(corrector.exempt):
        LAWS["on_policy"](corrector)


@law
def test_the_metrics_of_an_empty_batch_are_finite(name, options):
    inputs = random_inputs()
    inputs = replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    metrics = diagnose(inputs, make(name, options)(inputs), lag_BT=inputs.lag_BT, miss_BT=inputs.lag_BT)
    assert all(math.isfinite(v) for v in metrics.values())


@law
def test_a_lost_log_prob_leaves_the_metrics_finite_and_counts_as_dropped(name, options):
    inputs = random_inputs()
    behaviour = inputs.logp_behaviour_BT.clone()
    behaviour[0, 0] = math.nan
    inputs = replace(inputs, logp_behaviour_BT=behaviour)
    metrics = diagnose(inputs, make(name, options)(inputs), lag_BT=inputs.lag_BT, miss_BT=inputs.lag_BT)
    assert all(math.isfinite(v) for v in metrics.values())
    if name != "none":
        assert metrics["correct/mask_fraction"] > 0


def test_exemptions_are_few():
    """One row replaces the advantage by its own, one never looks at the sampler; every other law holds everywhere."""
    exempt = {name: dict(create(name).exempt) for name in CORRECTORS}
    assert {n: sorted(e) for n, e in exempt.items() if e} == {
        "none": ["lost_log_probs"],
        "vcpo": ["on_policy", "weight"],
    }


@pytest.mark.parametrize("name", CORRECTORS)
def test_every_corrector_states_its_defaults_and_source(name):
    assert "reduction" in defaults_of(name)
    assert source_of(name)


def test_a_corrector_that_breaks_a_law_is_told_which():
    def shift_by_behaviour(inputs):
        return Treatment(inputs.logp_behaviour_BT.exp().requires_grad_(inputs.logp_behaviour_BT.requires_grad))

    sound = create("ppo")
    broken = replace(sound, name="mine", treatments=(shift_by_behaviour,))
    with pytest.raises(ConformanceError, match=r"'mine' breaks \d laws\n(.*\n)*.*on_policy: .*not the plain policy"):
        check_corrector(broken)
    not_detached = replace(
        sound,
        name="leaky",
        treatments=(lambda i: Treatment(torch.exp(i.logp_learner_BT - i.logp_learner_BT.detach())),),
    )
    with pytest.raises(ConformanceError, match="weight: weight_BT is not the factor"):
        check_corrector(not_detached)
    by_batch = replace(
        sound, name="local", treatments=(lambda i: Treatment(torch.full_like(i.advantage_BT, float(len(i.mask_BT)))),)
    )
    with pytest.raises(ConformanceError, match="micro_batches: micro-batches do not add up"):
        check_corrector(by_batch)
    with pytest.raises(ConfigError, match="exempt=.*'padddding'.*no such laws"):
        check_corrector(replace(sound, exempt=(("padddding", "a typing error, on purpose"),)))


def test_a_corrector_of_ones_own_is_checked_and_built_from_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "my_correctors.py").write_text(
        "from farl.correct import Corrector, Treatment\n"
        "from farl.correct.catalogue import create\n"
        "from dataclasses import replace\n"
        "def half_clip(clip=0.2):\n"
        "    return replace(create('ppo', clip_low=clip, clip_high=clip / 2), name='half_clip')\n"
        "def not_one():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    corrector = make_corrector(CorrectorConfig(import_from="my_correctors:half_clip", options={"clip": 0.1}))
    assert corrector.name == "half_clip"
    assert check_corrector(corrector) == tuple(LAWS)
    for bad, words in [
        ({"import_from": "my_correctors:not_one"}, "gave a int, must be a Corrector"),
        ({"import_from": "my_correctors:nothing"}, "has no attribute 'nothing'"),
        ({"import_from": "my_corrector"}, "must read 'package.module:factory'"),
        ({"import_from": "my_correctors:half_clip", "options": {"klip": 1}}, "unexpected keyword argument 'klip'"),
        ({"import_from": "my_correctors:half_clip", "cap": 2.0}, r"takes \[corrector.options\] only"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make_corrector(CorrectorConfig(**bad))
    with pytest.raises(ConfigError, match="only with corrector.import"):
        CorrectorConfig(name="ppo", options={"clip_low": 0.1})


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 3), st.floats(1.01, 5), st.floats(0.01, 2))
def test_ppo_equals_its_slow_twin(seed, low, high, dual, spread):
    inputs = random_inputs(seed, spread=spread)
    corrector = make("ppo", {"clip_low": low, "clip_high": high, "dual_clip": dual})
    expected = 0.0
    for b, positions in reference.sequences(inputs):
        for t in positions:
            lp, lm, _ = reference.logs(inputs, b, t)
            a = reference.advantage(inputs, b)
            expected += reference.ppo_term(a, math.exp(lp - lm), 1 - low, 1 + high, dual)
    expected /= reference.num_tokens(inputs)
    assert corrector.loss(inputs).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


TWINS = {
    "a3po": (reference.a3po, {}),
    "a3po capped": (lambda i: reference.a3po(i, cap=1.1), {"cap": 1.1}),
    "m2po": (reference.m2po, {}),
    "m2po wide": (lambda i: reference.m2po(i, 0.5), {"threshold": 0.5}),
    "bapo": (reference.bapo, {}),
    "bapo target 2": (lambda i: reference.bapo(i, 2.0), {"target": 2.0}),
    "topr": (reference.topr, {}),
    "vcpo": (reference.vcpo, {}),
    "vespo": (reference.vespo, {}),
    "aspo": (reference.aspo, {}),
    "opmd": (reference.opmd, {}),
    "glm5": (reference.glm5, {}),
    "matched_replay": (reference.matched_replay, {}),
    "matched_replay sequence": (reference.matched_replay_sequence, {"level": "sequence"}),
}


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.01, 1.5))
def test_correctors_equal_their_slow_twins(name, seed, spread):
    twin, options = TWINS[name]
    inputs = random_inputs(seed, spread=spread)
    inputs = replace(inputs, reward_B=inputs.reward_B - 0.5)  # rewards of both signs
    expected = twin(inputs)
    assert create(name.split()[0], **options).loss(inputs).item() == pytest.approx(expected, rel=1e-8, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.01, 1.5))
def test_the_step_of_vcpo_equals_its_slow_twin(seed, spread):
    inputs = random_inputs(seed, spread=spread)
    corrector = create("vcpo")
    scale = corrector.step_scale(corrector.prepare(inputs))
    assert scale == pytest.approx(reference.vcpo_step(inputs), rel=1e-9)
    assert 0 < scale <= 1


def test_the_optimal_baseline_has_the_least_variance():
    """Of X^2 g^2 (R - b)^2, what b minimises: moving it either way makes it larger."""
    inputs = random_inputs(3)
    weight, norm, reward = torch.tensor([3.0, 1.0, 0.5]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 0.5])
    group = torch.tensor([0, 0, 0])
    best = optimal_baseline(weight, norm, reward, group, 1)[0]

    def second_moment(b):
        return float(((weight * norm).double().square() * (reward.double() - b).square()).sum())

    assert second_moment(best) < second_moment(best + 0.01)
    assert second_moment(best) < second_moment(best - 0.01)
    none = optimal_baseline(torch.zeros(3), norm, reward, group, 1)
    assert float(none[0]) == pytest.approx(0.5), "the mean where no sample has weight"
    assert inputs.group_B is not None


def test_optimal_advantages_can_be_divided_by_the_deviation_of_the_group():
    inputs = random_inputs(3)
    inputs = replace(inputs, reward_B=torch.tensor([0.0, 1.0, 0.0, 4.0, 1.0, 1.5]).double())
    plain, divided = (create("vcpo", divide_by_std=on)(inputs).token_loss_BT for on in (False, True))
    deviation = torch.tensor([0.5, 0.5, 2.0, 2.0, 0.25, 0.25]).double()
    assert torch.allclose(divided, plain / deviation[:, None])


def test_optimal_advantages_are_of_whole_groups():
    """A member whose given advantage happens to be 0 learns too; a group that was left out does not."""
    inputs = random_inputs(3)
    advantage = torch.zeros_like(inputs.advantage_BT)
    advantage[0] = 1.0
    inputs = replace(inputs, advantage_BT=advantage, reward_B=torch.tensor([0.0, 0.5, 0.0, 4.0, 1.0, 1.5]).double())
    loss = create("vcpo")(inputs).token_loss_BT
    assert inputs.group_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert (loss[:2][inputs.mask_BT[:2]] != 0).all()
    assert (loss[2:] == 0).all()


def test_groups_count_from_zero_and_the_plain_function_takes_any_ids():
    inputs = random_inputs(3)
    for bad in (-1, 10**13):
        group = inputs.group_B.clone()
        group[0] = bad
        with pytest.raises(ShapeError, match="group_B: ids from .* must be from 0 and below B=6; use torch.unique"):
            create("vcpo").loss(replace(inputs, group_B=group))
    arguments = {
        "logp_learner": inputs.logp_learner_BT, "logp_behaviour": inputs.logp_behaviour_BT,
        "advantage": inputs.advantage_BT, "mask": inputs.mask_BT, "reward": inputs.reward_B,
        "gradient_norm": inputs.gradient_norm_B,
    }  # fmt: skip
    hashes = torch.tensor([2**40, 7, -5])[inputs.group_B]
    assert farl.correct.vcpo(**arguments, group=hashes) == farl.correct.vcpo(**arguments, group=inputs.group_B)
    with pytest.raises(ConfigError, match="step_scale='off': no part of a loss"):
        farl.correct.vcpo(**arguments, group=hashes, step_scale="off")
    with pytest.raises(ConfigError, match="step_scale='off': ppo has no such option"):
        farl.correct.ppo(**arguments, step_scale="off")


def test_absolute_bounds_of_cispo_begin_at_zero_as_in_trl():
    inputs = random_inputs(3, spread=1.5)
    absolute, offset = create("cispo", bounds="absolute"), create("cispo")
    assert torch.equal(absolute(inputs).token_loss_BT, offset(inputs).token_loss_BT)
    weight = create("cispo", bounds="absolute", clip_high=5.0)(inputs).weight_BT[inputs.mask_BT]
    assert 0 < float(weight.min()) < 1


def test_a_clipped_token_has_no_weight():
    inputs = random_inputs(3, spread=1.5)
    output = create("ppo")(inputs)
    assert output.clipped_BT.any()
    assert not output.weight_BT[output.clipped_BT].any()


def test_the_search_of_bapo_ends_at_the_ends_of_its_ranges():
    """Steps that do not divide the range are cut; all-negative tokens take the search to both ends."""
    ratio, advantage = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -2.0])
    bounds = balanced_bounds(ratio, advantage, target=1.0, lower=(0.6, 0.8), upper=(1.2, 2.0), step=0.3)
    assert bounds == (0.8, 2.0)
    bounds = balanced_bounds(ratio, -advantage, target=1.0, lower=(0.6, 0.8), upper=(1.2, 2.0), step=0.3)
    assert bounds == (0.6, 1.2), "no negatives: nothing moves"


def test_the_balance_heuristic_bounds_weights_by_the_share_of_a_near_policy():
    """Where one source is the learner itself no weight exceeds 1 / its share, however far the others are."""
    inputs = random_inputs(5, spread=3.0)
    sources = torch.stack([inputs.logp_learner_BT.detach(), inputs.logp_behaviour_BT - 50], dim=-1)
    inputs = replace(inputs, logp_sources_BTK=sources, log_share_BK=torch.tensor([0.25, 0.75]).log().expand(6, 2))
    output = create("matched_replay", cap=1e6)(inputs)
    assert float(output.weight_BT.max()) == pytest.approx(4.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1, 4))
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
    with pytest.raises(ShapeError, match=r"logp_behaviour_BT: dtype torch.int64, must be a floating type"):
        corrector(replace(inputs, logp_behaviour_BT=inputs.logp_behaviour_BT.long()))
    with pytest.raises(ShapeError, match=r"lag_BT: dtype torch.float32, must be an integer type"):
        corrector(replace(inputs, lag_BT=inputs.lag_BT.float()))
    with pytest.raises(ShapeError, match=r"log_share_BK: shape \(6, 3\), must be \(6, 2\)"):
        corrector(replace(inputs, log_share_BK=torch.zeros(6, 3)))
    with pytest.raises(ConfigError, match="logp_sources_BTK and log_share_BK: give both or neither"):
        corrector(replace(inputs, log_share_BK=None))
    with pytest.raises(ShapeError, match=r"logp_learner_BT: shape \(5,\), must be \[B, T\]"):
        corrector(replace(inputs, logp_learner_BT=inputs.logp_learner_BT[0]))


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
    assert metrics["correct/weight_max"] == pytest.approx(1.0), "clipped ones have no weight"
    assert metrics["correct/weight_mean"] == pytest.approx(1 / 3)
    assert metrics["policy/weight_variance"] == pytest.approx((0 + 0.36 + 1) / 3, rel=1e-5)
    assert metrics["lag/mean_versions"] == pytest.approx(5 / 3)
    assert metrics["lag/max_versions"] == 3
    assert metrics["miss/mean_versions"] == pytest.approx(2 / 3)
    assert metrics["policy/kl_nats_lag_3"] == pytest.approx(1 - math.log(2), rel=1e-5)
    assert metrics["correct/clip_fraction_lag_1"] == pytest.approx(0.5)
    masked = diagnose(inputs, make("decoupled_ppo", {"cap": 1.5})(inputs))
    assert masked["correct/mask_fraction"] == pytest.approx(2 / 3)
