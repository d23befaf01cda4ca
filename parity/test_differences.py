"""Where we differ on purpose: the difference is asserted, with the reason, so that it cannot change unnoticed."""

from dataclasses import replace

import pytest
import torch

import farl.correct
from farl.errors import ConfigError

from . import libraries as lib
from .test_parity import ours, random_batch, shared_batch, value_and_gradient


def kept_of(name, options, batch):
    from farl.correct import LossInputs
    from farl.correct.catalogue import create

    corrector = create(name, **options)
    inputs = LossInputs(
        logp_learner_BT=batch.learner,
        logp_behaviour_BT=batch.behaviour,
        logp_proximal_BT=batch.proximal,
        mask_BT=batch.mask,
        advantage_BT=batch.advantages,
    )
    return corrector(inputs).keep_BT


def test_rejection_in_verl_divides_by_kept_tokens_and_ours_by_all_of_them():
    """The same mask with another step size; ours is the majority's, `denominator="kept"` is verl's."""
    options = {"level": "token", "floor": 0.8, "cap": 1.2, "survivor": "one", "inverse": True}
    theirs = lib.verl(
        "vanilla", clip_ratio_c=1e9, correction={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.2"}
    )
    batch = random_batch(4)
    kept = kept_of("mis", options, batch)
    share = kept.sum() / batch.mask.sum()
    assert 0.2 < share < 0.95
    their_gradient = value_and_gradient(theirs, batch)[1]
    assert torch.allclose(value_and_gradient(ours("mis", options), batch)[1], their_gradient * share)


def test_verl_bounds_the_inverse_ratio_when_it_rejects_and_the_ratio_when_it_weights():
    """ "0.5_5.0" keeps proximal / behaviour in [0.2, 2] as rollout_rs and in [0.5, 5] as a weight threshold."""
    ratio = torch.tensor([[0.25, 0.6, 1.0, 1.9, 3.0, 6.0]], dtype=torch.float64)
    behaviour = torch.full_like(ratio, -3.0)
    batch = replace(
        shared_batch(), behaviour=behaviour, proximal=behaviour + ratio.log(), learner=behaviour.clone().requires_grad_(),
        mask=torch.ones_like(ratio, dtype=torch.bool), advantage=torch.ones(1).double(),
        lag=torch.ones_like(ratio, dtype=torch.int64),
    )  # fmt: skip
    inverse = kept_of("mis", {"level": "token", "floor": 0.5, "cap": 5.0, "inverse": True}, batch)
    assert inverse.tolist() == [[True, True, True, True, False, False]]
    assert kept_of("icepop", {}, batch).tolist() == [[False, True, True, True, True, False]]
    theirs = lib.verl("vanilla", correction={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5.0"})
    assert (value_and_gradient(theirs, batch)[1] != 0).tolist() == (
        value_and_gradient(ours("mis", {"level": "token", "floor": 0.5, "cap": 5.0, "inverse": True}), batch)[1] != 0
    ).tolist()


def test_a_fully_masked_batch_is_nan_in_verl_and_zero_here():
    batch = replace(shared_batch(), mask=torch.zeros(2, 3, dtype=torch.bool))
    assert torch.isnan(lib.verl("vanilla")(batch))
    assert farl.correct.ppo(batch.learner, batch.behaviour, batch.advantage, batch.mask) == 0


def test_one_lost_sampler_log_prob_spoils_a_clipped_weight_in_openrlhf_and_costs_us_one_token():
    """OpenRLHF's mask drops the token as we do, its clip lets the NaN through; TRL takes the ratio as 1."""
    batch = random_batch(1)
    behaviour = batch.behaviour.clone()
    behaviour[0, 0] = float("nan")
    spoiled = replace(batch, behaviour=behaviour)
    assert torch.isnan(lib.openrlhf(is_correction_level="token", is_correction_mode="clip")(spoiled))
    assert not torch.isnan(lib.openrlhf(is_correction_level="token")(spoiled))
    gradient = value_and_gradient(ours("icepop", {}), spoiled)[1]
    clean = value_and_gradient(ours("icepop", {}), batch)[1]
    assert gradient[0, 0] == 0
    assert torch.equal(gradient[1:], clean[1:])


def test_m2po_keeps_one_bad_token_in_areal_and_none_here():
    """A second moment above the threshold is above it, also for the last token."""
    batch = shared_batch()
    far = replace(batch, behaviour=batch.proximal - 3.0)
    assert lib.areal_m2po_mask(far, 0.04).sum() == 1
    assert kept_of("m2po", {"statistic": "proximal"}, far).sum() == 0


def test_gmpo_counts_empty_sequences_in_verl_and_not_here():
    batch = shared_batch()
    mask = batch.mask.clone()
    mask[1] = False
    empty = replace(batch, mask=mask)
    theirs = lib.verl("geo_mean", anchor="behaviour", clip_ratio=0.4, clip_ratio_low=0.4, clip_ratio_high=0.4)
    assert torch.allclose(value_and_gradient(ours("gmpo", {}), empty)[1], 2 * value_and_gradient(theirs, empty)[1])


def test_dual_clip_is_always_on_in_verl_and_an_option_here():
    batch = random_batch(5)
    far = replace(batch, behaviour=batch.learner.detach() - 2.0)
    verl, ppo = (value_and_gradient(f, far)[1] for f in (lib.verl("vanilla", anchor="behaviour"), ours("ppo", {})))
    negative = batch.mask & (batch.advantages < 0)
    assert not verl[negative].any()
    assert ppo[negative].all()


def test_an_absolute_cap_below_one_as_in_trl_is_refused():
    """TRL's cispo without epsilon_high caps every weight at 0.2; a cap below the on-policy ratio is a mistake."""
    batch = shared_batch()
    value = value_and_gradient(lib.trl("cispo", anchor="behaviour", epsilon_high=0.2), batch)[1]
    assert torch.allclose(value[batch.mask].abs(), torch.full((5,), 0.2 / 5).double())
    with pytest.raises(ConfigError, match="clip_high=0.2: must be 1.0 or more"):
        ours("cispo", {"bounds": "absolute", "clip_low": 0.0, "clip_high": 0.2})(batch)
