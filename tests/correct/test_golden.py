import math
import re
from pathlib import Path

import pytest
import torch

import farl.correct
from farl.correct import CORRECTORS, CorrectorConfig, make_corrector
from farl.correct.catalogue import defaults_of
from farl.correct.reduce import REDUCTIONS

from .cases import GOLDEN, golden_inputs, gradient

CASES = [pytest.param(case, id=f"{case['corrector']}-{i}") for i, case in enumerate(GOLDEN["cases"])]


@pytest.mark.parametrize("case", CASES)
def test_values_of_every_reduction(case):
    checked = 0
    for reduction in REDUCTIONS:
        if reduction not in case:
            continue
        extra = {"horizon": GOLDEN["inputs"]["horizon"]} if reduction.endswith("norm") else {}
        corrector = make_corrector(
            CorrectorConfig(name=case["corrector"], reduction=reduction, **extra, **case["options"])
        )
        value = corrector.loss(golden_inputs(case["behaviour"], case)).item()
        assert value == pytest.approx(case[reduction], abs=case.get("tolerance", 2e-6))
        checked += 1
    assert checked


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_token_losses(case):
    config = CorrectorConfig(name=case["corrector"], reduction=case["gradient_of"], **case["options"])
    corrector = make_corrector(config)
    inputs = golden_inputs(case["behaviour"], case)
    expected = torch.tensor(case["gradient"], dtype=torch.float64)
    tolerance = case.get("tolerance", 2e-6)
    assert torch.allclose(gradient(corrector, inputs), expected, atol=tolerance, rtol=0)
    output = corrector(inputs)
    for got_row, expected_row in zip(output.token_loss_BT.tolist(), case.get("token_loss", []), strict=False):
        for got, value in zip(got_row, expected_row, strict=True):
            assert got == pytest.approx(0.0 if value is None else value, abs=tolerance)
    if case.get("keep"):
        assert output.keep_BT.int().tolist() == case["keep"]
    if "step_scale" in case:
        assert corrector.step_scale(corrector.prepare(inputs)) == pytest.approx(case["step_scale"], abs=tolerance)


def test_sequence_mean_token_sum_by_hand():
    corrector = make_corrector(CorrectorConfig(name="none", reduction="sequence_mean_token_sum"))
    assert corrector.loss(golden_inputs()).item() == pytest.approx((-3 + 2) / 2)


def test_the_denominator_may_count_kept_tokens_only():
    """The real divergence between verl (kept) and AReaL, TRL, slime (original): same mask, other step size."""
    inputs = golden_inputs("behaviour_x")
    kept = make_corrector(CorrectorConfig(name="decoupled_ppo", denominator="kept"))
    original = make_corrector(CorrectorConfig(name="decoupled_ppo"))
    assert kept.loss(inputs).item() == pytest.approx(original.loss(inputs).item() * 5 / 4)


def test_table_golden_file_sources_page_and_public_functions_name_the_same_set():
    table = set(CORRECTORS)
    assert {case["corrector"] for case in GOLDEN["cases"]} == table
    assert {name for name in table if callable(getattr(farl.correct, name, None))} == table
    for page in ("sources.md", "correctors.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == table, page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "pppo"}, "corrector.name='pppo': no such corrector.name; known: .* Did you mean 'ppo'"),
        ({"name": "none", "clip_low": 0.2}, "corrector.clip_low=0.2: none has no such option; it has form"),
        ({"name": "ppo", "cap": 2.0}, "corrector.cap=2.0: ppo has no such option"),
        ({"name": "ppo", "clip_low": 1.5}, r"clip_low=1.5: must be in \[0, 1\]"),
        ({"name": "ppo", "clip_high": -0.1}, "clip_high=-0.1: must be 0 or more"),
        ({"name": "ppo", "dual_clip": 1.0}, "dual_clip=1.0: must be above 1"),
        ({"name": "ppo", "anchor": "old"}, "anchor='old': must be one of behaviour, proximal"),
        ({"name": "tis", "cap": 0.0}, "cap=0.0: must be 1 or more"),
        ({"name": "tis", "base": "policy_gradient", "clip_low": 0.1}, "does not clip"),
        ({"name": "decoupled_ppo", "cap_action": "drop"}, "cap_action='drop': must be one of mask, clamp"),
        ({"name": "none", "reduction": "mean"}, "corrector.reduction='mean'"),
        ({"name": "none", "horizon": 0}, "horizon=0: must be 1 token or more"),
        ({"name": "none", "horizon": 9}, "horizon=9: only with reduction='sequence_mean_token_sum_norm'"),
        ({"name": "ppo", "ratio_cap": 0.9}, "ratio_cap=0.9: must be 1"),
        ({"name": "decoupled_ppo", "cap": -1.0}, "cap=-1.0: must be 1 or more"),
        ({"name": "tis", "floor": -0.1}, r"floor=-0.1: must be in \[0, 1\]"),
        ({"name": "icepop", "floor": 6.0}, r"floor=6.0: must be in \[0, 1\]"),
        ({"name": "icepop", "cap": math.nan}, "cap=nan: must be 1 or more"),
        ({"name": "cispo", "bounds": "absolute", "clip_high": 0.5}, "clip_high=0.5: must be 1.0 or more"),
        ({"name": "gmpo", "log_cap": 0.0}, "log_cap=0.0: must be above 0"),
        ({"name": "sapo", "tau_positive": -1.0}, "tau_positive=-1.0: must be above 0"),
        ({"name": "m2po", "threshold": 0.0}, "threshold=0.0: must be above 0"),
        ({"name": "dppo", "gap_low": -0.2}, "gap_low=-0.2: must be above 0"),
        ({"name": "dppo", "ratio_cap": 3.0}, "ratio_cap=3.0: only with form='score'"),
        ({"name": "dppo", "form": "score", "kl_penalty": 0.1}, "kl_penalty=0.1: only with form='ratio'"),
        ({"name": "bapo", "lower_stop": 0.5}, "lower_stop=0.5: must be corrector.lower_start=0.6 or more"),
        ({"name": "bapo", "upper_start": 0.9}, "upper_start=0.9: must be 1.0 or more"),
        ({"name": "bapo", "bound_step": 0.0}, "bound_step=0.0: must be above 0"),
        ({"name": "aspo", "weight_cap": 0.5}, "weight_cap=0.5: must be above 1"),
        ({"name": "opsm", "delta": -0.1}, "delta=-0.1: must be 0 or more"),
        ({"name": "vcpo", "step_scale": "log"}, "step_scale='log': must be one of sqrt, linear, off"),
        ({"name": "vcpo", "base_ess_fraction": 0.0}, "base_ess_fraction=0.0: must be above 0"),
        (
            {"name": "vcpo", "baseline": "given", "divide_by_std": True},
            "divide_by_std=True: only with baseline='optimal'",
        ),
        ({"name": "mis", "cap": 0.5}, "cap=0.5: must be 1 or more"),
        (
            {"name": "vcpo", "step_scale": "off", "base_ess_fraction": 0.3},
            "base_ess_fraction=0.3: only with step_scale=",
        ),
        ({"name": "cispo", "bounds": "absolute", "clip_low": 2.0}, "clip_low=2.0: must be 1 or less"),
        ({"name": "ppo", "ratio_cap": 1.1}, r"ratio_cap=1.1: must be 1 \+ clip_high = 1.2 or more"),
        ({"name": "dppo", "kl_penalty": math.inf}, "kl_penalty=inf: must be 0 or more and finite"),
        ({"name": "dppo", "denominator": "kept"}, "denominator=kept: only with form='score' or kl_penalty=0"),
        ({"name": "bapo", "upper_stop": math.inf}, "upper_stop=inf: must be above 0 and finite"),
        ({"name": "bapo", "lower_stop": 1.1}, "lower_stop=1.1: must be 1 or less"),
        ({"name": "vespo", "decay_negative": 0.0}, "decay_negative=0.0: must be above 0"),
        ({"name": "opmd", "tau": 0.0}, "tau=0.0: must be above 0"),
        ({"name": "dro", "beta": math.inf}, "beta=inf: must be above 0 and finite"),
        ({"name": "topr", "split": "score"}, "split='score': must be one of reward, advantage"),
        ({"name": "gspo", "form": "squared"}, "form='squared': must be one of token, direct"),
        ({"name": "matched_replay", "heuristic": "power"}, "heuristic='power': must be one of balance, own"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    from farl.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        CorrectorConfig(**options)


@pytest.mark.parametrize("case", CASES)
def test_plain_functions_equal_the_catalogue(case):
    i = golden_inputs(case["behaviour"], case)
    function = getattr(farl.correct, case["corrector"])
    loss = function(
        i.logp_learner_BT,
        i.logp_behaviour_BT,
        i.advantage_BT[:, 0],
        i.mask_BT,
        logp_proximal=i.logp_proximal_BT,
        reward=i.reward_B,
        group=i.group_B,
        lag=i.lag_BT,
        gradient_norm=i.gradient_norm_B,
        logp_sources=i.logp_sources_BTK,
        log_share=i.log_share_BK,
        reduction=case["gradient_of"],
        **case["options"],
    )
    assert loss.item() == pytest.approx(case[case["gradient_of"]], abs=case.get("tolerance", 2e-6))


def test_every_reduction_is_known():
    assert len(REDUCTIONS) == 4
    for reduction in REDUCTIONS:
        corrector = make_corrector(CorrectorConfig(name="ppo", reduction=reduction))
        assert math.isfinite(corrector.loss(golden_inputs()).item())


def test_defaults_are_the_numbers_of_the_authors():
    """Literal, from shared/correctors.md and the sources named there, so that none can drift unseen."""
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    expected = {
        "none": {}, "ppo": clip, "dual_clip_ppo": {**clip, "dual_clip": 3.0},
        "dapo": {"clip_low": 0.2, "clip_high": 0.28},
        "decoupled_ppo": {**clip, "cap": 5.0}, "a3po": {**clip, "cap": 5.0}, "tis": {**clip, "cap": 2.0},
        "mis": {**clip, "cap": 3.0}, "icepop": {**clip, "floor": 0.5, "cap": 5.0}, "cispo": {},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4}, "gmpo": {"log_cap": 0.4},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05}, "m2po": {"threshold": 0.04}, "dppo": {}, "topr": {},
        "vcpo": {"cap": 8.0, "base_ess_fraction": 1.0},
        "vespo": {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0},
        "bapo": {
            "target": 1.0, "lower_start": 0.6, "lower_stop": 0.8, "upper_start": 1.2, "upper_stop": 2.0,
            "bound_step": 0.05, "dual_clip": 3.0,
        },
        "aspo": {**clip, "weight_cap": 3.0}, "opsm": {**clip, "delta": 0.5}, "opmd": {"tau": 0.1},
        "dro": {"beta": 0.05}, "glm5": clip, "matched_replay": {"cap": 2.0},
    }  # fmt: skip
    got = {name: {k: v for k, v in defaults_of(name).items() if isinstance(v, float)} for name in CORRECTORS}
    assert got == expected
