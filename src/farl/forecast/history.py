"""Displacements of one leaf, stored narrow: float32, bfloat16, or int8 with one scale to a block.

Arithmetic is float32 and works chunk by chunk, so nothing of the size of a leaf is ever made. Suffixes: C displacements
held, N entries of a leaf, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farl.core.types import DTYPES

CHUNK = 1 << 17
"""Entries a CPU works on at once: scratch stays in cache, and a call costs little beside it; a multiple of `BLOCK`."""
_DEVICE_CHUNK = 1 << 24
"""The same on other devices, where launches cost more and scratch of this size does not matter."""
BLOCK = 128
"""Entries that share a float32 scale in int8 storage."""
STORAGE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4.0 / BLOCK}
"""Bytes of one stored displacement for each parameter, by `history_dtype`."""


def pieces(tensor_N: Tensor) -> Iterator[slice]:
    """The pieces of a leaf that are worked on at once."""
    size = CHUNK if tensor_N.device.type == "cpu" else _DEVICE_CHUNK
    return (slice(start, min(start + size, len(tensor_N))) for start in range(0, len(tensor_N), size))


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A ring of displacements of one leaf.

    Attributes:
        values_CN: stored displacements; integers of -127 .. 127 in int8 storage.
        scales_CB: float32 scale of each block in int8 storage; None otherwise.
    """

    values_CN: Tensor
    scales_CB: Tensor | None = None

    @classmethod
    def empty(cls, capacity: int, size: int, *, dtype: str, device: torch.device, offload: bool = False) -> Ring:
        """A ring of zeros; with `offload` it lives in host memory, pinned where the leaf is on a GPU."""
        pin = offload and device.type == "cuda"
        place = torch.device("cpu") if offload else device
        scales = None
        if dtype == "int8":
            scales = torch.zeros(capacity, -(-size // BLOCK), device=place, pin_memory=pin)
        kind = torch.int8 if dtype == "int8" else DTYPES[dtype]
        return cls(values_CN=torch.zeros(capacity, size, dtype=kind, device=place, pin_memory=pin), scales_CB=scales)

    @property
    def capacity(self) -> int:
        """C."""
        return len(self.values_CN)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"values": self.values_CN} | ({} if self.scales_CB is None else {"scales": self.scales_CB})

    def is_plain(self, device: torch.device) -> bool:
        """Whether rows are ordinary float tensors beside the leaf, as the fused passes need them."""
        return self.scales_CB is None and self.values_CN.device == device

    def zero(self) -> None:
        """Forgets everything."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def store(self, slot: int, start: int, moved_n: Tensor) -> None:
        """Writes a float32 piece that begins at entry `start`, a multiple of `BLOCK`, into a row."""
        part = slice(start, start + len(moved_n))
        if self.scales_CB is None:
            self.values_CN[slot, part].copy_(moved_n, non_blocking=True)
            return
        padded_n = torch.nn.functional.pad(moved_n, (0, -len(moved_n) % BLOCK))
        blocks = padded_n.view(-1, BLOCK)
        scale_B = blocks.abs().amax(dim=1) / 127
        codes = torch.where(scale_B.unsqueeze(1) > 0, blocks / scale_B.unsqueeze(1), 0.0).round_().to(torch.int8)
        self.values_CN[slot, part].copy_(codes.view(-1)[: len(moved_n)], non_blocking=True)
        first = start // BLOCK
        self.scales_CB[slot, first : first + len(scale_B)].copy_(scale_B, non_blocking=True)

    def sum_into(self, out_n: Tensor, base_n: Tensor, start: int, terms: Sequence[tuple[int, float]]) -> None:
        """Writes `base + sum_i factor_i * row_i` of the piece that begins at entry `start` into a float32 tensor."""
        total_n = base_n
        for slot, factor in terms:
            torch.add(total_n, self._wide(slot, start, len(out_n), out_n.device), alpha=factor, out=out_n)
            total_n = out_n

    def _wide(self, slot: int, start: int, size: int, device: torch.device) -> Tensor:
        row_n = self.values_CN[slot, start : start + size].to(device, torch.float32, non_blocking=True)
        if self.scales_CB is None:
            return row_n
        first = start // BLOCK
        scale_B = self.scales_CB[slot, first : first + -(-size // BLOCK)].to(device, non_blocking=True)
        padded = torch.nn.functional.pad(row_n, (0, -size % BLOCK)).view(-1, BLOCK)
        return (padded * scale_B.unsqueeze(1)).view(-1)[:size]
