import json

import pytest
import torch

from farl.engines.models import ModelConfig
from farl.engines.transformers_models import _digit_tokenizer, load_model, save_model
from farl.engines.warm_start import warm_start
from farl.errors import ConfigError

from .tiny import tiny_model


def pairs(noise):
    while True:
        yield "1+1=", "002"
        yield "2+1=", "003"


def tiny_config(tmp_path, **settings):
    return ModelConfig(
        source="tiny-digits", cache_dir=str(tmp_path), warm_start_steps=3, hidden=16, layers=1, **settings
    )


def test_a_made_model_is_made_once_and_loads_like_a_folder(tmp_path):
    config = tiny_config(tmp_path)
    model = load_model(config, warm_start_examples=pairs)
    assert sum(p.numel() for p in model.module.parameters()) < 2_000_000
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    before = (folder / "model.safetensors").stat().st_mtime_ns
    again = load_model(config, warm_start_examples=lambda noise: pytest.fail("made twice"))
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    for a, b in zip(model.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)
    other = load_model(tiny_config(tmp_path, init_seed=1), warm_start_examples=pairs)
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 2
    assert not torch.equal(next(other.module.parameters()), next(model.module.parameters()))
    from_folder = load_model(ModelConfig(source=str(folder)))
    assert from_folder.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert from_folder.max_positions == 128


def test_a_saved_model_is_the_model(tmp_path):
    model = load_model(tiny_config(tmp_path), warm_start_examples=pairs)
    with torch.no_grad():
        next(model.module.parameters()).add_(1.0)
    save_model(model, tmp_path / "out")
    save_model(model, tmp_path / "out")
    loaded = load_model(ModelConfig(source=str(tmp_path / "out")))
    for a, b in zip(model.module.parameters(), loaded.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert loaded.tokenizer.encode_prompt("12+3=") == model.tokenizer.encode_prompt("12+3=")


def test_digit_tokens():
    tokenizer = _digit_tokenizer()
    ids = tokenizer.encode("07+34=")
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "07+34="


def test_the_chat_form_is_used_when_there_is_one_and_wanted(tmp_path):
    model = load_model(tiny_config(tmp_path), warm_start_examples=pairs)
    bare = model.tokenizer.encode_prompt("1+2=")
    model.tokenizer.tokenizer.chat_template = (
        "{% for m in messages %}({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    folder = tmp_path / "chat"
    save_model(model, folder)
    chat = load_model(ModelConfig(source=str(folder))).tokenizer
    assert chat.decode(chat.encode_prompt("1+2")) == "(1+2)="
    assert chat.decode(chat.encode_prompt("1+2", system="9")) == "(9)(1+2)="
    assert load_model(ModelConfig(source=str(folder), chat=False)).tokenizer.encode_prompt("1+2=") == bare


@pytest.mark.parametrize("source", ["/no/such/folder", "nobody/nothing-at-all"])
def test_a_model_that_cannot_be_found_is_named(source, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"model.source='{source}'.*transformers cannot load it"):
        load_model(ModelConfig(source=source))


def test_a_damaged_model_folder_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_model(ModelConfig(source=str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": ""}, "name a model"),
        ({"hidden": 50, "heads": 4}, "model.hidden=50: must be a multiple of model.heads=4"),
        ({"layers": 0}, "model.layers=0: must be 1 or more"),
        ({"system": "be brief", "chat": False}, "no system prompt without chat=true"),
        ({"warm_start_noise": 1.0}, r"must be in \[0, 1\)"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**settings)


def test_warm_start_learns_answers_and_not_prompts():
    model = tiny_model()
    loss = warm_start(model, iter([([5, 6], [7, 1]), ([6, 5], [8, 1])] * 2000), num_steps=40, lr=1e-2, batch_size=16)
    assert loss < 0.1
    assert int(model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].argmax()) == 7
