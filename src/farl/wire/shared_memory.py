"""Weights between processes of one machine: one file in /dev/shm for each publication, mapped by everyone.

    0      8      16       24        32         40           48                    HEADER_BYTES
    magic  state  number   checksum  num_bytes  index_bytes  index (JSON) ...      payload ...

The writer sets `state` to WRITING, fills payload, index and checksum, and sets COMPLETE last, so a reader can
never take a half-written set. Files of writers that died are removed by the next writer: a live writer holds
a lock on each of its files. Files of released publications are used again, which spares the page faults.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farl.core.protocols import NamedTensors
from farl.core.types import PolicyStamp
from farl.errors import WireError
from farl.wire.layout import Layout

log = logging.getLogger("farl.wire")

_MAGIC = 0x46_41_52_4C_57_31_0A_00
_WRITING, _COMPLETE = 1, 2
_HEADER = struct.Struct("<QQQQQQ")
_STATE_OFFSET = 8
_PAGE_BYTES = 4096
_PREFIX = "farl-"


def default_folder() -> Path:
    """/dev/shm where the system has it, else the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


class _Segment:
    """A mapped file of fixed size that its writer has locked."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, num_bytes)
            else:
                os.ftruncate(self.fd, num_bytes)
            self.map = mmap.mmap(self.fd, num_bytes)
        except OSError as error:
            os.close(self.fd)
            path.unlink()
            free = shutil.disk_usage(path.parent).free
            raise WireError(
                f"{path.parent}: cannot hold {num_bytes / 1e6:.0f} MB of weights ({error.strerror}; {free / 1e6:.0f} "
                "MB free); make it larger (docker: --shm-size) or set pipeline.wire_folder to another folder"
            ) from error

    def remove(self) -> None:
        with contextlib.suppress(BufferError):  # views that somebody still holds keep the mapping alive
            self.map.close()
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class SharedMemoryTransport:
    """The learner's end.

    Cost of `send`: one write of the payload, and one read of it for the checksum.

    Args:
        layout: of the leaves.
        folder: where the files go; None takes `default_folder()`.

    Raises:
        WireError: if the folder cannot be used.
    """

    def __init__(self, layout: Layout, *, folder: Path | None = None) -> None:
        self._layout = layout
        self._folder = folder or default_folder()
        if not self._folder.is_dir():
            raise WireError(f"{self._folder}: no such folder; create it or set pipeline.wire_folder to another")
        index_bytes = len(json.dumps(layout.to_json())) + 2 * _PAGE_BYTES
        self._payload_start = -(-(_HEADER.size + index_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self._used: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._token = secrets.token_hex(4)
        self._num_made = 0
        remove_abandoned(self._folder)

    def send(self, publication: int, stamp: PolicyStamp, leaves: NamedTensors) -> Mapping[str, Any]:
        """Publishes the leaves.

        Raises:
            WireError: if the number is in use, the leaves do not fit, or there is no room.
        """
        if publication in self._used:
            raise WireError(f"publication={publication}: already published and not released")
        segment = self._free.pop() if self._free else self._make()
        try:
            self._write(segment, publication, stamp, leaves)
        except BaseException:
            self._free.append(segment)
            raise
        self._used[publication] = segment
        return {"publication": publication, "path": str(segment.path)}

    def _make(self) -> _Segment:
        self._num_made += 1
        path = self._folder / f"{_PREFIX}{os.getpid()}-{self._token}-{self._num_made}"
        return _Segment(path, self._payload_start + self._layout.num_bytes)

    def _write(self, segment: _Segment, publication: int, stamp: PolicyStamp, leaves: NamedTensors) -> None:
        view = segment.map
        struct.pack_into("<Q", view, _STATE_OFFSET, _WRITING)
        index = json.dumps({"stamp": stamp.to_json(), "layout": self._layout.to_json()}).encode()
        if _HEADER.size + len(index) > self._payload_start:
            raise WireError(f"stamp of publication {publication} is too long: {len(stamp.coefficients)} coefficients")
        payload = torch.frombuffer(view, dtype=torch.uint8, offset=self._payload_start, count=self._layout.num_bytes)
        self._layout.fill(payload, leaves)
        view[_HEADER.size : _HEADER.size + len(index)] = index
        checksum = _checksum(view, index, self._payload_start)
        header = (_MAGIC, _WRITING, publication, checksum, self._layout.num_bytes, len(index))
        _HEADER.pack_into(view, 0, *header)
        struct.pack_into("<Q", view, _STATE_OFFSET, _COMPLETE)

    def receive(self, descriptor: Mapping[str, Any]) -> tuple[PolicyStamp, Iterator[tuple[str, Tensor]]]:
        """Opens one of its own publications, verified like any other."""
        return SharedMemoryReceiver().receive(descriptor)

    def release(self, publication: int) -> None:
        """Gives the file of a publication to the next one; idempotent."""
        segment = self._used.pop(publication, None)
        if segment is not None:
            struct.pack_into("<Q", segment.map, _STATE_OFFSET, _WRITING)
            self._free.append(segment)

    def close(self) -> None:
        """Removes all files; idempotent."""
        for segment in [*self._used.values(), *self._free]:
            segment.remove()
        self._used.clear()
        self._free.clear()


class SharedMemoryReceiver:
    """A worker's end: opens publications by their descriptor."""

    def receive(self, descriptor: Mapping[str, Any]) -> tuple[PolicyStamp, Iterator[tuple[str, Tensor]]]:
        """Maps and verifies a publication.

        Args:
            descriptor: as `send` returned it.

        Returns:
            The stamp, and name and view of each leaf; copy them while iterating. When the writer takes the
            file back in the meantime, the iteration ends in a `WireError`.

        Raises:
            WireError: if it is gone, incomplete, of another number, or fails its checksum.
        """
        number, path = descriptor["publication"], Path(descriptor["path"])
        try:
            with path.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WireError(f"publication {number}: cannot open {path}: {error}") from error
        _, _, _, checksum, num_bytes, index_bytes = _header(view, number, path)
        start = len(view) - num_bytes
        if start < _HEADER.size + index_bytes:
            raise WireError(f"publication {number}: {path} is too short for its contents")
        index = view[_HEADER.size : _HEADER.size + index_bytes]
        if _checksum(view, index, start) != checksum:
            raise WireError(f"publication {number}: {path} fails its checksum")
        data = json.loads(index)
        layout = Layout.from_json(data["layout"])
        return PolicyStamp.from_json(data["stamp"]), _views(view, layout, start, number, path)


def _views(view: mmap.mmap, layout: Layout, start: int, number: int, path: Path) -> Iterator[tuple[str, Tensor]]:
    payload = torch.frombuffer(view, dtype=torch.uint8, offset=start, count=layout.num_bytes)
    yield from layout.views(payload)
    _header(view, number, path)


def _header(view: mmap.mmap, number: int, path: Path) -> tuple[int, ...]:
    if len(view) < _HEADER.size:
        raise WireError(f"publication {number}: {path} is empty")
    header: tuple[int, ...] = _HEADER.unpack_from(view, 0)
    magic, state, found = header[:3]
    if magic != _MAGIC:
        raise WireError(f"publication {number}: {path} does not hold weights of this version of farl")
    if state != _COMPLETE:
        raise WireError(f"publication {number}: {path} is not complete")
    if found != number:
        raise WireError(f"publication {number}: {path} holds publication {found}")
    return header


def _checksum(view: mmap.mmap, index: bytes, start: int) -> int:
    """CRC-32 of index and payload, 2.5 GB/s."""
    with memoryview(view) as whole, whole[start:] as payload:
        return zlib.crc32(payload, zlib.crc32(index))


def remove_abandoned(folder: Path) -> int:
    """Removes the files of writers that are gone; returns how many.

    A live writer holds a lock on each of its files, so a file that can be locked has no writer.
    """
    removed = 0
    for path in folder.glob(f"{_PREFIX}*-*-*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
        except OSError:
            continue
    if removed:
        log.info("removed %d abandoned weight files from %s", removed, folder)
    return removed
