"""Named tensors in one safetensors file, written atomically. The only module that imports safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from farl.errors import WireError


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors beside `path`, flushes them to disk, and renames the file into place.

    Args:
        path: the file to make or replace.
        tensors: any dtype and shape; views are written out whole.

    Raises:
        WireError: if it cannot be written (a full disk, for example); an earlier file is intact.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, partial)
        flush_to_disk(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise WireError(f"{path}: cannot write: {error}") from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads what `save_tensors` wrote.

    Raises:
        WireError: if the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WireError(f"{path}: cannot read: {error}") from error


def flush_to_disk(path: Path) -> None:
    """Fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
