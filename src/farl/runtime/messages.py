"""JSON messages over a socket pair: what learner and workers say to each other, weights excepted."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

from farl.errors import WireError

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 30
_READ_BYTES = 1 << 16


class Channel:
    """One end of a connection; each message is a JSON object behind its length.

    `send` may be called from several threads, `recv` from one.

    Args:
        fd: file descriptor of a connected stream socket; owned from here on.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._pending = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, int]:
        """A channel, and the descriptor of the other end for a child process."""
        here, there = socket.socketpair()
        return cls(here.detach()), there.detach()

    def fileno(self) -> int:
        """Descriptor to wait on; -1 when closed."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one object of JSON types.

        Raises:
            WireError: if it cannot be JSON (a NaN, for example) or the other end is gone.
        """
        try:
            body = json.dumps(dict(message), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise WireError(f"message {message.get('type')!r} cannot be sent: {error}") from error
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise WireError(f"message {message.get('type')!r} cannot be sent: {error}") from error

    def recv(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next message.

        Args:
            timeout_s: longest wait; None waits for ever, 0 takes only what is there.

        Returns:
            The object, or None if the time ran out.

        Raises:
            EOFError: if the other end is closed.
            WireError: if the bytes are no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._take()) is None:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], wait_s)[0]:
                return None
            try:
                data = self._socket.recv(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other end is closed")
            self._pending += data
        return message

    def _take(self) -> dict[str, Any] | None:
        if len(self._pending) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._pending)
        if length > _MAX_BYTES:
            raise WireError(f"message of {length} bytes: the stream is damaged")
        end = _LENGTH.size + length
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[_LENGTH.size : end])
        del self._pending[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise WireError(f"message {body[:80]!r}: not JSON") from error
        if not isinstance(message, dict) or "type" not in message:
            raise WireError(f"message {body[:80]!r}: not an object with a type")
        return message

    def close(self) -> None:
        """Closes this end; idempotent."""
        self._socket.close()
