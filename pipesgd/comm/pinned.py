"""Messages of tensors on a GPU over a transport that can only send host memory, such as gloo's."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from pipesgd.comm.transport import Pending, Transport


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Host memory, and the event at which the device has read its last content."""

    memory: Tensor
    read: torch.cuda.Event | None


class PinnedTransport:
    """Sends and receives tensors on a GPU by way of pinned host memory.

    1. ``send`` copies the tensor to the host on the current stream, waits for that stream only, and sends from there.
    2. ``receive`` posts a receive into host memory. Its ``wait`` waits for the message and begins to copy it to the
       device on the current stream. Later work on that stream finds the data there, and the tensor may be sent.

    The communicating thread has a stream of its own, the current one, so that neither waits for computation.
    Host memory is kept, in powers of two, to which torch rounds it anyway: a buffer is reused for a message that needs
    the same power once its message has been sent or its copy to the device is done. So the first all-reduce of a kind
    allocates about as much as is received and sent at once, and later ones allocate nothing. Messages that change their
    size at every call, as topk's in a warm-up, allocate once for each power.
    """

    def __init__(self, transport: Transport):
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.buffers_allocated = 0
        self._transport = transport
        self._free: defaultdict[int, deque[_Buffer]] = defaultdict(deque)  # by size in bytes, least recently used first

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

    def _take(self, least_bytes: int) -> Tensor:
        nbytes = 1 << max(least_bytes - 1, 0).bit_length()
        if self._free[nbytes]:
            buffer = self._free[nbytes].popleft()
            if buffer.read is not None:
                buffer.read.synchronize()
            return buffer.memory
        self.buffers_allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give_back(self, memory: Tensor, read: torch.cuda.Event | None) -> None:
        """Make ``memory`` available for another message once ``read`` has happened."""
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
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
