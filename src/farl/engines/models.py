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
        chat: whether questions go through the chat template; False continues the bare text.
        system: system prompt; None leaves it to the chat template, "" leaves it out.
        hidden: width of "tiny-digits".
        layers: layers of "tiny-digits".
        heads: attention heads of "tiny-digits".
        warm_start_steps: supervised steps of "tiny-digits" before RL.
        warm_start_lr: their learning rate.
        warm_start_noise: share of warm-start answers with one wrong digit, so that the model knows sums but does not
            yet say them reliably.
        init_seed: of the initial weights of "tiny-digits".
    """

    source: str = "smollm2-135m"
    cache_dir: str = "~/.cache/farl"
    chat: bool = True
    system: str | None = None
    hidden: int = 96
    layers: int = 2
    heads: int = 4
    warm_start_steps: int = 400
    warm_start_lr: float = 2e-3
    warm_start_noise: float = 0.5
    init_seed: int = 0

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("model.source='': name a model, for example 'smollm2-135m' or a folder")
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be 1 or more")
        if self.system and not self.chat:
            raise ConfigError(f"model.system={self.system!r}: there is no system prompt without chat=true")
        if not 0 <= self.warm_start_noise < 1:
            raise ConfigError(f"model.warm_start_noise={self.warm_start_noise}: must be in [0, 1)")
        if self.hidden % self.heads:
            raise ConfigError(f"model.hidden={self.hidden}: must be a multiple of model.heads={self.heads}")
