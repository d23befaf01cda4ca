import json

import pytest

from farl.config import apply_overrides, config_hash, load_recipe, parse_config, recipe_names, to_json
from farl.errors import ConfigError
from farl.forecast import FORECASTERS


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_load_and_survive_json(name):
    config = load_recipe(name)
    assert config.name == name
    assert parse_config(json.loads(json.dumps(to_json(config)))) == config
    assert config_hash(parse_config(to_json(config))) == config_hash(config)


def test_the_shipped_recipes():
    assert recipe_names() == ["smollm2-arithmetic", "tiny-addition"]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"pipline": {}}, "key='pipline': no such key; .* Did you mean 'pipeline'"),
        ({"forecast": {"ruel": "copy"}}, "key='forecast.ruel': no such key; .* Did you mean 'forecast.rule'"),
        ({"pipeline": {"lag": -1}}, "pipeline.lag=-1: must be 0 or more"),
        ({"pipeline": {"lag": "one"}}, "pipeline.lag='one'"),
        ({"corrector": {"name": "ppoo"}}, "Did you mean 'ppo'"),
        ({"corrector": {"name": "none", "cap": 2}}, "corrector.cap=2.0: none has no such option"),
        (
            {"rollout": {"prompts_per_batch": 3}, "pipeline": {"lag": 2, "updates_per_batch": 2}},
            "must be a multiple of",
        ),
        ({"corrector": {"name": "ppo", "anchor": "proximal"}}, "the proximal policy is the learner itself"),
        ({"model": {"source": "tiny-digits", "hidden": 30}}, "must be a multiple of model.heads"),
        ({"task": {"import": "x"}}, "must read 'package.module:factory'"),
        ({"seed": -1}, "seed=-1"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name='lion'"),
    ],
)
def test_whatever_cannot_work_is_named_before_anything_is_loaded(tree, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(tree)


def test_import_is_a_key_of_the_task():
    assert parse_config({"task": {"import": "a.b:c"}}).task.import_from == "a.b:c"


def test_recipes_are_found_by_name_or_path(tmp_path):
    with pytest.raises(
        ConfigError, match="recipe='tiny-adition': no such recipe; known: .*Did you mean 'tiny-addition'"
    ):
        load_recipe("tiny-adition")
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[pipeline]\nlag = 4\n')
    assert load_recipe(str(path)).pipeline.lag == 4
    path.write_text("name = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_recipe(str(path))


def test_overrides(capsys):
    config = load_recipe("tiny-addition")
    changed = apply_overrides(config, ["--forecast.rule", "copy", "--pipeline.lag", "3", "--optimizer.lr=1e-3"])
    assert (changed.forecast.rule, changed.pipeline.lag, changed.optimizer.lr) == ("copy", 3, 1e-3)
    assert changed.rollout == config.rollout
    assert apply_overrides(config, []) is config
    with pytest.raises(SystemExit) as stop:
        apply_overrides(config, ["--pipeline.lag", "3", "--pipeline.updates-per-batch", "2"])
    assert stop.value.code == 2
    assert "pipeline.lag=3: must be a multiple" in capsys.readouterr().err


def test_what_does_not_change_numbers_is_not_in_the_hash():
    config = load_recipe("tiny-addition")
    same = apply_overrides(config, ["--pipeline.launch", "inline", "--record.keep-checkpoints", "5"])
    other = apply_overrides(config, ["--optimizer.lr", "1e-3"])
    assert config_hash(same) == config_hash(config) != config_hash(other)


def test_the_forecast_history_fits_the_pipeline():
    config = parse_config({"pipeline": {"lag": 6, "updates_per_batch": 3}, "rollout": {"prompts_per_batch": 6}})
    assert config.forecast_for_pipeline.max_horizon == 8
    assert set(FORECASTERS) >= {*config.forecast.bank, config.forecast.rule}
