import math
from dataclasses import replace

import pytest
import torch

from farl.core.logprobs import token_logp
from farl.core.protocols import SampleRequest, SamplingParams
from farl.engines.transformers_engine import CausalPolicy, draw
from farl.errors import TaskError, WireError

from .tiny import EOS, PARAMS, REQUESTS, STAMP, sampled_batch, tiny_model, tiny_sampler


def plain_logp(model, batch, temperature):
    """The slow twin: every sequence whole, prompt and all, without any cache."""
    rows = []
    for b in range(batch.num_sequences):
        p = int(batch.group_B[b])
        prompt = batch.prompt_ids_PL[p][batch.prompt_mask_PL[p]]
        completion = batch.completion_ids_BT[b][batch.mask_BT[b]]
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        row = token_logp(logits[len(prompt) - 1 : -1][None], completion[None], temperature=temperature)[0]
        rows.append(torch.nn.functional.pad(row, (0, batch.completion_ids_BT.shape[1] - len(completion))))
    return torch.stack(rows)


def test_shared_prompts_give_the_plain_log_probs_and_gradients():
    model = tiny_model()
    batch = sampled_batch(model)
    fast = CausalPolicy(model).logp(batch, temperature=1.3)
    slow = plain_logp(model, batch, 1.3)
    assert torch.allclose(fast[batch.mask_BT], slow[batch.mask_BT], atol=1e-5)
    assert torch.isfinite(fast).all()
    weight = torch.randn(fast.shape) * batch.mask_BT
    for mine, plain in zip(
        torch.autograd.grad((fast * weight).sum(), list(model.parameters())),
        torch.autograd.grad((slow * weight).sum(), list(model.parameters())),
        strict=True,
    ):
        assert torch.allclose(mine, plain, atol=1e-4, rtol=1e-4)


def test_the_sampler_reports_the_log_probs_of_what_it_drew():
    """Trap 2: learner and sampler agree when they hold the same weights."""
    model = tiny_model()
    batch = sampled_batch(model)
    logp = CausalPolicy(model).logp(batch, temperature=PARAMS.temperature)
    assert torch.allclose(logp[batch.mask_BT], batch.logp_behaviour_BT[batch.mask_BT], atol=1e-5)


def test_micro_batches_of_groups_give_the_same_log_probs():
    model = tiny_model()
    batch, policy = sampled_batch(model), CausalPolicy(tiny_model())
    whole = policy.logp(batch, temperature=1.0)
    parts = torch.cat([policy.logp(batch.select_groups(i, i + 1), temperature=1.0) for i in range(3)])
    assert torch.allclose(whole[batch.mask_BT], parts[batch.mask_BT], atol=1e-5)


def test_one_token_completions():
    model = tiny_model()
    batch = sampled_batch(model)
    short = replace(
        batch, completion_ids_BT=batch.completion_ids_BT[:, :1], mask_BT=batch.mask_BT[:, :1],
        logp_behaviour_BT=batch.logp_behaviour_BT[:, :1],
    )  # fmt: skip
    policy = CausalPolicy(model)
    assert torch.allclose(policy.logp(short, temperature=1.0), policy.logp(batch, temperature=1.0)[:, :1], atol=1e-5)


def test_draws_do_not_depend_on_neighbours_and_repeat():
    sampler = tiny_sampler(tiny_model())
    together = sampler.sample(REQUESTS, PARAMS)
    assert sampler.sample(REQUESTS, PARAMS) == together
    for request, members in zip(REQUESTS, together, strict=True):
        (alone,) = sampler.sample([request], PARAMS)
        assert [c.ids for c in alone] == [c.ids for c in members]
        for a, b in zip(alone, members, strict=True):
            assert a.logp_behaviour == pytest.approx(b.logp_behaviour, abs=1e-5)


def test_completions_end_at_the_end_token_or_the_limit():
    ticks = []
    drawn = tiny_sampler(tiny_model()).sample(REQUESTS, PARAMS, lambda: ticks.append(1))
    for members, request in zip(drawn, REQUESTS, strict=True):
        assert len(members) == request.num_members
        for c in members:
            assert len(c.ids) == len(c.logp_behaviour) <= PARAMS.max_new_tokens
            assert c.finished == (c.ids[-1] == EOS)
            assert EOS not in c.ids[:-1]
            assert c.finished or len(c.ids) == PARAMS.max_new_tokens
    assert 0 < len(ticks) <= PARAMS.max_new_tokens
    lengths = {len(c.ids) for members in drawn for c in members}
    assert len(lengths) > 2, "the batch was compacted on the way"


def test_greedy_equals_transformers_generate():
    model = tiny_model()
    requests = [replace(r, num_members=1) for r in REQUESTS]
    drawn = tiny_sampler(model).sample(requests, SamplingParams(max_new_tokens=9, temperature=0.0))
    for request, (completion,) in zip(requests, drawn, strict=True):
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert list(completion.ids) == expected[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.5, 0.9)])
def test_draws_follow_the_distribution_whose_log_probs_are_reported(temperature, top_p):
    """Trap 9: temperature and nucleus are in the log-prob."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(12)
    probs = torch.softmax(logits / temperature, 0)
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        kept, mass = [], 0.0
        for p, i in zip(ordered.tolist(), order.tolist(), strict=True):
            if mass < top_p:
                kept.append(i)
                mass += p
        truncated = torch.zeros_like(probs)
        truncated[kept] = probs[kept]
        probs = truncated / truncated.sum()
    count = 40_000
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p)
    ids, logp = draw(logits.expand(count, 12), torch.rand(count, dtype=torch.float64), params)
    assert torch.allclose(logp, probs.log()[ids], atol=1e-5)
    frequency = torch.bincount(ids, minlength=12) / count
    deviation = (probs * (1 - probs) / count).sqrt()
    assert ((frequency - probs).abs() <= 4.5 * deviation + 1e-9).all()


def test_draw_at_the_edges_of_the_unit_interval_stays_in_the_support():
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf]]).expand(2, 4)
    params = SamplingParams(max_new_tokens=1)
    ids, logp = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), params)
    assert ids.tolist() == [1, 2]
    assert torch.isfinite(logp).all()


def test_prompts_that_do_not_fit_are_refused_with_the_numbers():
    sampler = tiny_sampler(tiny_model())
    with pytest.raises(TaskError, match=r"prompt of 60 tokens: with rollout.max_new_tokens=9 .* context of 64"):
        sampler.sample([SampleRequest(prompt_ids=(3,) * 60, num_members=1, seed=0)], PARAMS)
    with pytest.raises(TaskError, match="prompt of 0 tokens"):
        sampler.sample([SampleRequest(prompt_ids=(), num_members=1, seed=0)], PARAMS)


def test_loading_takes_every_leaf_or_holds_nothing():
    model, other = tiny_model(), tiny_model(1)
    sampler = tiny_sampler(model, None)
    assert sampler.stamp is None
    leaves = dict(other.named_parameters())
    sampler.load(leaves.items(), STAMP)
    assert sampler.stamp == STAMP
    assert torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight), "tied"
    name = next(iter(leaves))
    for wrong in (list(leaves.items())[1:], [*leaves.items(), ("x", torch.zeros(1))], [(name, torch.zeros(2))]):
        with pytest.raises(WireError):
            sampler.load(wrong, STAMP)
        assert sampler.stamp is None, "nothing can be sampled from a mixture"
