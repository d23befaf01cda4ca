"""A tiny random causal model with the transformers calling convention, and batches of its own samples."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from farl.core.protocols import SampleRequest, SamplingParams
from farl.core.types import Group, PolicyStamp, Rollout
from farl.engines.transformers_engine import TransformersSampler
from farl.runtime.batch import make_batch

EOS, PAD, VOCAB = 1, 0, 24
STAMP = PolicyStamp(base_version=0, target_version=0)


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=EOS, pad_token_id=PAD,
        bos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tiny_sampler(model, stamp=STAMP):
    sampler = TransformersSampler(model, eos_ids=frozenset({EOS}), pad_id=PAD, max_positions=64)
    if stamp:
        sampler.load([(n, p.detach().clone()) for n, p in model.named_parameters()], stamp)
    return sampler


REQUESTS = [
    SampleRequest(prompt_ids=(5, 6, 7), num_members=4, seed=11),
    SampleRequest(prompt_ids=(9, 8, 7, 6, 5, 4, 3), num_members=3, seed=12),
    SampleRequest(prompt_ids=(2,), num_members=4, seed=13),
]
PARAMS = SamplingParams(max_new_tokens=9, temperature=1.3)


def sampled_batch(model):
    drawn = tiny_sampler(model).sample(REQUESTS, PARAMS)
    groups = [
        Group(
            group_id=i, prompt_ids=request.prompt_ids,
            rollouts=tuple(
                Rollout(
                    ids=c.ids, logp_behaviour=c.logp_behaviour, finished=c.finished, reward=0.0, text="", stamp=STAMP
                )
                for c in members
            ),
        )
        for i, (request, members) in enumerate(zip(REQUESTS, drawn, strict=True))
    ]  # fmt: skip
    return make_batch(groups, torch.randn(11), version=0, pad_id=PAD)
