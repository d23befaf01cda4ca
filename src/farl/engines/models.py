"""Which model is trained: the setting, without the framework that loads it."""

from __future__ import annotations

from dataclasses import dataclass

from farl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained.

    Attributes:
        source: "smollm2-135m" (converted once from its PyPI package), "tiny-digits" (a small transformer built
            and warmed up here), or any folder or hub name that transformers loads.
        cache_dir: where converted and warmed-up models are kept.
        system: system prompt; None leaves it to the chat template, "" leaves it out.
        hidden: width of "tiny-digits".
        layers: layers of "tiny-digits".
        heads: attention heads of "tiny-digits".
        warm_start_steps: supervised steps of "tiny-digits" before RL.
        warm_start_lr: their learning rate.
    """

    source: str = "smollm2-135m"
    cache_dir: str = ".cache/farl"
    system: str | None = None
    hidden: int = 96
    layers: int = 3
    heads: int = 4
    warm_start_steps: int = 300
    warm_start_lr: float = 1e-3

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("model.source='': name a model, for example 'smollm2-135m' or a folder")
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be 1 or more")
        if self.hidden % self.heads:
            raise ConfigError(f"model.hidden={self.hidden}: must be a multiple of model.heads={self.heads}")
