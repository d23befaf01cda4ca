"""LoRA adapters as what they add to a weight, `scaling * B @ A`: merged weights, and products to forecast.

By default the factors themselves are forecast, which costs their few parameters and nothing more. `merge` turns such a
stream into the full weights that an engine without LoRA loads. `farl.Forecaster(..., lora_products=model)` forecasts
the merged product instead: its history is as large as the adapted weights. Adapters are recognised by
the attributes that peft gives its layers; peft itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter of one weight.

    Attributes:
        weight: name of the frozen weight [O, I] it adds to, among the model's parameters.
        a: name of the factor A [r, I].
        b: name of the factor B [O, r].
        scaling: factor of the product.
        transposed: whether the weight is stored as [I, O].
    """

    weight: str
    a: str
    b: str
    scaling: float
    transposed: bool = False

    def product(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """What the adapter adds to its weight, float32 in the weight's own layout."""
        added: Tensor = leaves[self.b].float() @ leaves[self.a].float() * self.scaling
        return added.T if self.transposed else added


def find_adapters(model: nn.Module) -> list[Adapter]:
    """The active adapters of a model's linear layers.

    Raises:
        ConfigError: if there is none, or one of a kind whose effect is not a product of two factors.
    """
    found = []
    for path, module in model.named_modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "base_layer")):
            continue
        if len(getattr(module, "lora_embedding_A", {})) or getattr(module, "lora_magnitude_vector", None):
            raise ConfigError(
                f"lora: {path!r} is an embedding or DoRA adapter; only plain linear ones can be merged here"
            )
        for name in module.active_adapters:
            if name not in module.lora_A:
                continue
            factors = (module.lora_A[name], module.lora_B[name])
            if any(f.weight.ndim != 2 or f.bias is not None for f in factors):
                raise ConfigError(
                    f"lora: {path!r} is a convolution or has a bias in its adapter; only plain linear ones can be "
                    "merged here"
                )
            found.append(
                Adapter(
                    weight=f"{path}.base_layer.weight",
                    a=f"{path}.lora_A.{name}.weight",
                    b=f"{path}.lora_B.{name}.weight",
                    scaling=float(module.scaling[name]),
                    transposed=bool(getattr(module, "fan_in_fan_out", False)),
                )
            )
    if not found:
        raise ConfigError("lora: the model has no active LoRA adapter; pass the model that peft returned")
    return found


@torch.no_grad()
def products(adapters: Iterable[Adapter], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all adapters add to each weight, float32, by the weight's name."""
    added: dict[str, Tensor] = {}
    for adapter in adapters:
        own = adapter.product(leaves)
        added[adapter.weight] = added[adapter.weight] + own if adapter.weight in added else own
    return added


@torch.no_grad()
def merge(adapters: Iterable[Adapter], leaves: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Full weights from a stream of factors and frozen weights, `W + sum scaling * B @ A`; adapters are left out.

    Args:
        adapters: from `find_adapters`.
        leaves: all parameters of the model by name, for example `forecaster.weights()`; held until the adapters are
            complete.

    Yields:
        The name without peft's wrapping, and the weight; sums in fp32, in the dtype the weight came in.
    """
    held = dict(leaves)
    by_weight: dict[str, list[Adapter]] = {}
    factors = set()
    for adapter in adapters:
        by_weight.setdefault(adapter.weight, []).append(adapter)
        factors |= {adapter.a, adapter.b}
    for name, weight in held.items():
        if name in factors:
            continue
        for adapter in by_weight.get(name, ()):
            weight = (weight.float() + adapter.product(held)).to(weight.dtype)
        yield plain_name(name), weight


def plain_name(name: str) -> str:
    """Name of a parameter in the model that peft wrapped."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
