"""Correctors under torch.compile: one graph, the same numbers, and no new compilation for a new batch."""

import shutil

import pytest
import torch

from farl.correct import CORRECTORS
from farl.correct.catalogue import create
from farl.testing import example_inputs

ADAPTIVE = [("m2po", {}), ("bapo", {"target": 1.5}), ("vcpo", {}), ("tis", {"normalise": True})]


def value_and_gradient(call, corrector, inputs):
    context = corrector.prepare(inputs)
    output = call(inputs, context)
    loss = corrector.aggregate(output, inputs.mask_BT, corrector.denominator(inputs.mask_BT, context))
    return loss.detach(), torch.autograd.grad(loss, inputs.logp_learner_BT)[0]


def check(corrector, backend, batches):
    torch._dynamo.reset()
    compiled = torch.compile(corrector, backend=backend, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for seed in range(batches):
            inputs = example_inputs(seed, dtype=torch.float32)
            expected = value_and_gradient(corrector, corrector, inputs)
            got = value_and_gradient(compiled, corrector, inputs)
            for a, b in zip(got, expected, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CORRECTORS)
def test_one_graph_with_the_same_numbers(name):
    check(create(name), "aot_eager", 3)


@pytest.mark.parametrize(("name", "options"), ADAPTIVE)
def test_batch_statistics_do_not_compile_again(name, options):
    check(create(name, **options), "aot_eager", 6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch 2.13's own backend
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor backend needs a C++ compiler")
@pytest.mark.parametrize("name", ["ppo", "gmpo"])
def test_generated_code_has_the_same_numbers(name):
    check(create(name), "inductor", 2)
