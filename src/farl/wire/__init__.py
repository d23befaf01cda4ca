"""Moving one set of weights from the learner to the samplers: whole and of the right version, or not at all.

`InProcessTransport` is the fake that tests and the inline launcher use, `SharedMemoryTransport` crosses
processes of one machine, `folder` writes tensors to disk.
"""

from farl.wire.layout import Layout, layout_of
from farl.wire.memory import InProcessTransport
from farl.wire.shared_memory import SharedMemoryReceiver, SharedMemoryTransport

__all__ = ["InProcessTransport", "Layout", "SharedMemoryReceiver", "SharedMemoryTransport", "layout_of"]
