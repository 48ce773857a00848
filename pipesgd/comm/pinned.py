"""Messages of tensors on a GPU over a transport that knows host memory alone, as gloo does."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.comm.transport import Pending, Transport


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Host memory, and when the device has read what was in it last."""

    memory: Tensor
    read: torch.cuda.Event | None


class PinnedTransport:
    """Sends and receives tensors on a GPU by way of pinned host memory.

    1. ``send`` copies the tensor to the host on the current stream, waits for that stream alone, and sends from there.
    2. ``receive`` posts a receive into host memory. Its ``wait`` waits for the message and begins to copy it to the
       device, on the current stream: what is put on that stream afterwards finds it there, and the tensor may be sent.

    The current stream is that of the thread that communicates, one of its own, so that neither waits for computation.
    Host memory is kept: a buffer is used again for a message of as many bytes, as soon as its message is sent, or its
    copy to the device is done. So the first all-reduce of a kind allocates, about as much as is received and sent at
    once, and later ones do not.
    """

    def __init__(self, transport: Transport):
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.buffers_allocated = 0
        self._transport = transport
        self._free: defaultdict[int, deque[_Buffer]] = defaultdict(deque)  # by size in bytes, used longest ago first

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._transport.bytes_received

    def send(self, tensor: Tensor, peer: int, what: str) -> Pending:
        memory = self._take(tensor.nbytes)
        staged = _shaped(memory, tensor)
        staged.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return _Sending(self, self._transport.send(staged, peer, what), memory)

    def receive(self, tensor: Tensor, peer: int, what: str) -> Pending:
        memory = self._take(tensor.nbytes)
        staged = _shaped(memory, tensor)
        return _Receiving(self, self._transport.receive(staged, peer, what), memory, staged, tensor)

    def _take(self, nbytes: int) -> Tensor:
        if self._free[nbytes]:
            buffer = self._free[nbytes].popleft()
            if buffer.read is not None:
                buffer.read.synchronize()
            return buffer.memory
        self.buffers_allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give_back(self, memory: Tensor, read: torch.cuda.Event | None) -> None:
        """Take ``memory`` for another message, once ``read`` has happened."""
        self._free[memory.nbytes].append(_Buffer(memory, read))


@dataclass(slots=True)
class _Sending:
    transport: PinnedTransport
    pending: Pending
    memory: Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.transport.give_back(self.memory, None)


@dataclass(slots=True)
class _Receiving:
    transport: PinnedTransport
    pending: Pending
    memory: Tensor
    staged: Tensor
    tensor: Tensor

    def wait(self) -> None:
        self.pending.wait()
        self.tensor.copy_(self.staged, non_blocking=True)
        read = torch.cuda.current_stream(self.tensor.device).record_event() if self.tensor.is_cuda else None
        self.transport.give_back(self.memory, read)


def _shaped(memory: Tensor, tensor: Tensor) -> Tensor:
    return memory.view(tensor.dtype).view(tensor.shape)
