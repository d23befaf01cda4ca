import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farl.core.logprobs import policy_distance, token_logp
from farl.errors import ShapeError


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_token_logp_equals_torch_distributions(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, 7, generator=generator)
    ids = torch.randint(7, (2, 3), generator=generator)
    expected = torch.distributions.Categorical(logits=logits / temperature).log_prob(ids)
    assert torch.allclose(token_logp(logits, ids, temperature=temperature), expected, atol=1e-6)
    assert token_logp(logits.bfloat16(), ids).dtype == torch.float32


def test_token_logp_refuses_other_shapes():
    with pytest.raises(ShapeError, match=r"logits \(1, 2, 5\) do not fit ids \(1, 3\)"):
        token_logp(torch.zeros(1, 2, 5), torch.zeros(1, 3, dtype=torch.int64))


def test_policy_distance_by_hand():
    learner = torch.tensor([[0.4, 0.9], [0.5, 7.0]]).log()
    sampler = torch.tensor([[0.5, 0.6], [0.25, 1.0]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    learner[1, 1] = math.nan
    distance = policy_distance(learner, sampler, mask)
    ratios = [0.8, 1.5, 2.0]
    assert distance.num_tokens == 3
    assert distance.kl_nats == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3, rel=1e-6)
    assert distance.weight_variance == pytest.approx((0.04 + 0.25 + 1.0) / 3, rel=1e-6)
    assert distance.ess_fraction == pytest.approx((1.2 + 2.0) ** 2 / (2 * (1.44 + 4.0)), rel=1e-6)


def test_equal_policies_and_empty_masks_have_no_distance():
    logp = torch.randn(3, 4)
    same = policy_distance(logp, logp, torch.ones(3, 4, dtype=torch.bool))
    none = policy_distance(logp, logp + 1, torch.zeros(3, 4, dtype=torch.bool))
    for distance in (same, none):
        assert (distance.kl_nats, distance.weight_variance) == (0.0, 0.0)
        assert distance.ess_fraction == pytest.approx(1.0)


def test_kl_estimate_agrees_with_the_true_kl_on_many_samples():
    torch.manual_seed(0)
    sampler, learner = torch.randn(8).log_softmax(0), torch.randn(8).log_softmax(0)
    ids = torch.multinomial(sampler.exp(), 200_000, replacement=True)
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    estimate = policy_distance(learner[ids][None], sampler[ids][None], mask)
    true = float((sampler.exp() * (sampler - learner)).sum())
    assert estimate.kl_nats == pytest.approx(true, rel=0.02)
