import math
import re
from pathlib import Path

import pytest
import torch

import farl.correct
from farl.correct import CORRECTORS, CorrectorConfig, make_corrector
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
    sources = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", sources, flags=re.MULTILINE)) == table


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
        ({"name": "tis", "cap": 0.0}, "cap=0.0: must be above 0"),
        ({"name": "tis", "base": "policy_gradient", "clip_low": 0.1}, "does not clip"),
        ({"name": "decoupled_ppo", "cap_action": "drop"}, "cap_action='drop': must be one of mask, clamp"),
        ({"name": "none", "reduction": "mean"}, "corrector.reduction='mean'"),
        ({"name": "none", "horizon": 0}, "horizon=0: must be 1 token or more"),
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
