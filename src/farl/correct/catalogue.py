"""The named correctors: each a factory from its options to a composed `Corrector`.

Adding one is a factory in its family file and a row in `CORRECTORS`, a golden entry, and a row in `docs/sources.md` and
`docs/correctors.md`. Defaults are those of the authors. An option that a corrector lacks is refused, not ignored.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from farl.correct import check
from farl.correct.base import Corrector
from farl.correct.clipping import a3po, aspo, bapo, dapo, decoupled_ppo, dual_clip_ppo, gmpo, gspo, ppo, sapo
from farl.correct.masking import dppo, glm5, icepop, m2po, mis, opsm
from farl.correct.options import CorrectorConfig
from farl.correct.reduce import REDUCTIONS
from farl.correct.regression import dro, opmd
from farl.correct.weighting import cispo, matched_replay, none, tis, topr, vcpo, vespo
from farl.errors import ConfigError, unknown_name

CorrectorFactory = Callable[..., Corrector]

CORRECTORS: Mapping[str, CorrectorFactory] = {
    "none": none,
    "ppo": ppo,
    "dual_clip_ppo": dual_clip_ppo,
    "dapo": dapo,
    "decoupled_ppo": decoupled_ppo,
    "a3po": a3po,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "m2po": m2po,
    "dppo": dppo,
    "topr": topr,
    "vcpo": vcpo,
    "vespo": vespo,
    "bapo": bapo,
    "aspo": aspo,
    "opsm": opsm,
    "opmd": opmd,
    "dro": dro,
    "glm5": glm5,
    "matched_replay": matched_replay,
}

_NOT_OPTIONS = ("name", "import_from", "options")


def make_corrector(config: CorrectorConfig) -> Corrector:
    """Builds the corrector a config names.

    Raises:
        ConfigError: for an unknown name, an option the corrector does not have, or a value that cannot work.
    """
    options = {
        f.name: v for f in fields(config) if f.name not in _NOT_OPTIONS and (v := getattr(config, f.name)) is not None
    }
    if config.import_from:
        if options:
            raise ConfigError(f"corrector.{next(iter(options))}: an imported corrector takes [corrector.options] only")
        return _imported(config.import_from, config.options)
    if config.options:
        raise ConfigError("corrector.options: only with corrector.import; catalogue options stand in [corrector]")
    return create(config.name, **options)


def create(name: str, **options: Any) -> Corrector:
    """Builds a corrector of the catalogue from its own options.

    Raises:
        ConfigError: for an unknown name, an option the corrector does not have, or a value that cannot work.
    """
    if name not in CORRECTORS:
        raise unknown_name("corrector.name", name, CORRECTORS)
    known = inspect.signature(CORRECTORS[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise ConfigError(f"corrector.{option}={value!r}: {name} has no such option; it has {', '.join(known)}")
    if options.get("reduction") is not None and options["reduction"] not in REDUCTIONS:
        raise unknown_name("corrector.reduction", str(options["reduction"]), REDUCTIONS)
    check.one_of("denominator", str(options.get("denominator", "original")), ("original", "kept"))
    if options.get("horizon") is not None and options["horizon"] < 1:
        raise ConfigError(f"corrector.horizon={options['horizon']}: must be 1 token or more")
    if options.get("base") == "policy_gradient" and options.keys() & {"clip_low", "clip_high"}:
        raise ConfigError("corrector.clip_low, clip_high: base='policy_gradient' does not clip; leave them out")
    corrector = CORRECTORS[name](**options)
    if options.get("horizon") is not None and corrector.reduction != "sequence_mean_token_sum_norm":
        raise ConfigError(
            f"corrector.horizon={options['horizon']}: only with reduction='sequence_mean_token_sum_norm', "
            f"not {corrector.reduction!r}; leave it out"
        )
    return corrector


def defaults_of(name: str) -> dict[str, Any]:
    """The options of a corrector with their defaults."""
    return {p.name: p.default for p in inspect.signature(CORRECTORS[name]).parameters.values()}


def source_of(name: str) -> str:
    """Papers and code a corrector follows, from its docstring."""
    text = inspect.getdoc(CORRECTORS[name]) or ""
    return " ".join(text.partition("Source:")[2].split()).removesuffix(".")


def _imported(path: str, options: Mapping[str, Any]) -> Corrector:
    module_name, colon, factory_name = path.partition(":")
    if not colon:
        raise ConfigError(f"corrector.import={path!r}: must read 'package.module:factory'")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"corrector.import={path!r}: {error}; is the module on the Python path?") from error
    try:
        corrector = factory(**options)
    except TypeError as error:
        raise ConfigError(f"corrector.import={path!r}: {error}") from error
    if not isinstance(corrector, Corrector):
        raise ConfigError(f"corrector.import={path!r}: gave a {type(corrector).__name__}, must be a Corrector")
    return corrector
