"""Where each leaf of a model lies in one flat buffer; casting to the wire dtype is the last thing done to it.

N entries of a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farl.core.types import DTYPES
from farl.errors import ConfigError, WireError

_ALIGN_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One named tensor: `shape` and its byte offset in the buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names, shapes and offsets of all leaves, and their common dtype on the wire.

    Attributes:
        dtype: a name of `DTYPES`.
        leaves: in the order in which they are sent.
        num_bytes: of the whole buffer, each leaf aligned to 64 bytes.
    """

    dtype: str
    leaves: tuple[Leaf, ...]
    num_bytes: int

    def fill(self, buffer: Tensor, leaves: Iterable[tuple[str, Tensor]]) -> None:
        """Casts and copies every leaf to its place.

        Args:
            buffer: uint8 [num_bytes].
            leaves: in any order, each exactly once.

        Raises:
            WireError: if a leaf is unknown, repeated, missing, or of another size.
        """
        targets = dict(self.views(buffer))
        for name, leaf in leaves:
            target = targets.pop(name, None)
            if target is None:
                raise WireError(f"leaf {name!r}: not in the layout, or sent twice; build the transport for this model")
            if target.numel() != leaf.numel():
                raise WireError(f"leaf {name!r}: shape {tuple(leaf.shape)}, the layout has {tuple(target.shape)}")
            target.copy_(leaf.detach().reshape(target.shape))
        if targets:
            raise WireError(f"leaves: {len(targets)} missing, first {next(iter(targets))!r}; send every leaf")

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each leaf, as views of the buffer (uint8 [num_bytes])."""
        dtype = DTYPES[self.dtype]
        for leaf in self.leaves:
            end = leaf.offset + math.prod(leaf.shape) * dtype.itemsize
            yield leaf.name, buffer[leaf.offset : end].view(dtype).view(leaf.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` inverts it exactly."""
        return {"dtype": self.dtype, "leaves": [[x.name, list(x.shape)] for x in self.leaves]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Inverse of `to_json`."""
        return layout_of([(name, tuple(shape)) for name, shape in data["leaves"]], dtype=data["dtype"])


def layout_of(spec: Sequence[tuple[str, Sequence[int]]], *, dtype: str = "float32") -> Layout:
    """Lays leaves out one after the other.

    Args:
        spec: name and shape of each leaf.
        dtype: a name of `DTYPES`.

    Raises:
        ConfigError: for a dtype that is not in `DTYPES`, a name given twice, or no leaf.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    names = [name for name, _ in spec]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"spec: {len(names)} leaves, {len(set(names))} different names; need at least one, each once")
    leaves, offset = [], 0
    for name, shape in spec:
        leaves.append(Leaf(name=name, shape=tuple(shape), offset=offset))
        size = math.prod(shape) * DTYPES[dtype].itemsize
        offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return Layout(dtype=dtype, leaves=tuple(leaves), num_bytes=offset)


def spec_of(module: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter of a module; tied ones once."""
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]
