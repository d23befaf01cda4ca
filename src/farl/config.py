"""One recipe: a TOML file, checked whole into one tree of frozen dataclasses before anything is loaded.

The sections live beside what they configure; this module puts the tree together, reads TOML and overrides,
and turns every mistake into one `ConfigError` that names its path.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from farl.engines.models import ModelConfig
from farl.errors import ConfigError, unknown_name
from farl.runtime.config import LoopConfig
from farl.tasks import TaskConfig

_NOT_IN_HASH = (
    "launch", "wire_folder", "max_restarts", "heartbeat_timeout_s", "progress_timeout_s", "startup_timeout_s",
)  # fmt: skip
_SHORT = re.compile(r"^--corrector(?=$|=)")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """A whole run.

    Attributes:
        name: names the run folder.
        model: what is trained.
        task: what it is trained on.
    """

    name: str = "farl"
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)


def recipe_names() -> list[str]:
    """Names of the recipes that ship with FARL."""
    return sorted(
        p.name.removesuffix(".toml") for p in resources.files("farl.recipes").iterdir() if p.name.endswith(".toml")
    )


def load_recipe(name_or_path: str) -> TrainConfig:
    """Reads a shipped recipe by name, or a TOML file by path.

    Raises:
        ConfigError: if it does not exist, is not TOML, or holds anything that cannot work.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ConfigError(f"recipe={name_or_path!r}: no such file; shipped recipes: {', '.join(recipe_names())}")
        text = path.read_text()
    else:
        if name_or_path not in recipe_names():
            raise unknown_name("recipe", name_or_path, recipe_names())
        text = (resources.files("farl.recipes") / f"{name_or_path}.toml").read_text()
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe={name_or_path!r}: not valid TOML: {error}") from error
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> TrainConfig:
    """Checks a plain tree of values and builds the config.

    Raises:
        ConfigError: for an unknown key (with its path), a value of the wrong type or one that cannot work.
    """
    import pydantic

    data = _without_keyword(data)
    _refuse_unknown(data, TrainConfig, "")
    try:
        return pydantic.TypeAdapter(TrainConfig).validate_python(dict(data))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(x) for x in first["loc"])
        where = f"{path}={first['input']!r}: " if path and not isinstance(first["input"], dict) else ""
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}{message}") from error


def _without_keyword(data: Mapping[str, Any]) -> dict[str, Any]:
    """`import` is `import_from` in Python, where it is a keyword; `corrector = "ppo"` is short for its name."""
    plain = dict(data)
    if isinstance(plain.get("corrector"), str):
        plain["corrector"] = {"name": plain["corrector"]}
    for section in ("task", "corrector"):
        value = plain.get(section)
        if isinstance(value, Mapping) and "import" in value:
            plain[section] = {"import_from" if k == "import" else k: v for k, v in value.items()}
    return plain


def _refuse_unknown(data: Mapping[str, Any], kind: type, path: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            raise unknown_name("key", f"{path}{key}", [f"{path}{k}" for k in hints])
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            _refuse_unknown(value, typing.cast(type, hints[key]), f"{path}{key}.")


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The tree as plain JSON types; `parse_config` inverts it."""
    return typing.cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(config))))


def config_hash(config: TrainConfig) -> str:
    """Identity of everything that decides a run's numbers; launcher, records and time-outs do not."""
    data = to_json(config)
    data.pop("name")
    data.pop("record")
    for key in _NOT_IN_HASH:
        data["pipeline"].pop(key)
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()


def apply_overrides(config: TrainConfig, arguments: list[str]) -> TrainConfig:
    """Applies dotted overrides such as `--forecast.rule stale`.

    Raises:
        ConfigError: if the result cannot work.
        SystemExit: with status 2 for arguments that are not settings or cannot work, after saying so.
    """
    import tyro

    if not arguments:
        return config
    arguments = [_SHORT.sub("--corrector.name", a) for a in arguments]
    changed = tyro.cli(TrainConfig, default=config, args=arguments, prog="farl train RECIPE")
    return parse_config(to_json(changed))
