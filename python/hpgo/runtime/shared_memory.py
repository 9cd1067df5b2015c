"""Messages between processes of one node, through shared memory.

Gloo copies a message into the kernel and out of it, by a thread that must wake up before it can wake the waiting one.
Here the sender copies a tensor into shared memory and writes its position into a pipe. The receiver polls that pipe
before it sleeps, and copies the tensor out. Memory is reused once its message was copied out, so its size is that of
the messages under way. Messages arrive in the order in which they were sent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpgo.runtime.clocks import node_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_SPIN_S = 0.002
"""Time in seconds for which a rank with a core of its own polls for a message before it sleeps. Waking up takes 0.1 ms
or more."""
_RECORD, _CALLER = struct.Struct("=qq"), struct.Struct("=q")
_READY, _TAKEN = -1, -2
"""Kinds of records instead of a position: the number of receives posted, and of messages copied out."""
_ALIGNED = 64
"""Alignment in bytes, like that of torch's own memory."""
_READ_BYTES = 256 * _RECORD.size
_copy = ctypes.memmove
"""Copy bytes. When a pass has filled the caches, a call of a torch function takes about 20 µs, which this avoids."""


class _Memory:
    """An anonymous file that one of two processes writes and the other reads. It only grows."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._begins: list[int] = []
        self._parts: list[ctypes.Array[ctypes.c_char]] = []
        self._addresses: list[int] = []
        self._end = 0

    def grow(self, size_bytes: int) -> range:
        """Grow the memory by `size_bytes` or more, at least to twice its size, so that few parts are mapped.

        Returns the range of new offsets.
        """
        begin, pages = self._end, -(-size_bytes // mmap.ALLOCATIONGRANULARITY)
        os.ftruncate(self.file, begin + max(pages * mmap.ALLOCATIONGRANULARITY, begin))
        self._map()
        return range(begin, self._end)

    def address(self, offset: int) -> int:
        """Return the address of the byte at `offset`. Bytes from one call of `grow` are contiguous."""
        if offset >= self._end:
            self._map()
        part = bisect_right(self._begins, offset) - 1
        return self._addresses[part] + offset - self._begins[part]

    def _map(self) -> None:
        begin, self._end = self._end, os.fstat(self.file).st_size
        self._begins.append(begin)
        size_bytes = self._end - begin
        # Parts stay mapped at their addresses while the file grows, so positions of messages under way stay valid.
        self._parts.append((ctypes.c_char * size_bytes).from_buffer(mmap.mmap(self.file, size_bytes, offset=begin)))
        self._addresses.append(ctypes.addressof(self._parts[-1]))

    def close(self) -> None:
        """Close the file. The memory is freed once the other process has closed it, too."""
        self._parts.clear()
        os.close(self.file)


class Neighbour:
    """Connection to another rank of this node."""

    def __init__(self, rank: int, *, is_alone: bool, timeout_s: float) -> None:
        """Create the sending end. `is_alone` means that this process has a core of its own, on which it can poll."""
        self.rank, self._spin_s, self._timeout_s = rank, _SPIN_S * is_alone, timeout_s
        self._out = _Memory(os.memfd_create(f"hpgo-to-{rank}", os.MFD_CLOEXEC))
        self._given, self._pipe_out = os.pipe()
        # A sender that blocked on a full pipe could deadlock with a receiver that does the same.
        os.set_blocking(self._pipe_out, False)
        self._backlog: SimpleQueue[bytes] | None = None
        self._fresh = range(0)
        """Range of memory that no message has used yet."""
        self._free: dict[int, list[int]] = {}
        """Positions that are free again, by size."""
        self._under_way: deque[tuple[int, int]] = deque()
        """Position and size of messages that were sent and not copied out."""
        self._sent = self._posted = 0
        self.ready = self.received = 0
        """Number of receives that the other rank has posted, and number of its messages copied out here."""
        self._expected: deque[torch.Tensor] = deque()
        self._arrived: deque[tuple[int, int]] = deque()
        self._in: _Memory
        self._pipe_in: int
        self._poll = select.poll()

    def hand_out(self, to: socket.socket) -> None:
        """Send the other rank its ends of the pipe and of the memory."""
        socket.send_fds(to, [b"!"], [self._out.file, self._given])
        os.close(self._given)

    def take_in(self, source: socket.socket) -> None:
        """Receive the ends that the other rank has created."""
        _, files, _, _ = socket.recv_fds(source, 1, 2)
        if len(files) != 2:
            raise dist.DistError(f"rank {self.rank} of this node is gone")
        self._in, self._pipe_in = _Memory(files[0]), files[1]
        os.set_blocking(self._pipe_in, False)
        self._poll.register(self._pipe_in, select.POLLIN)

    def send(self, tensor: torch.Tensor) -> _Send:
        """Send a contiguous tensor. It may be changed right afterwards."""
        size_bytes = tensor.nbytes
        room_bytes = -(-size_bytes // _ALIGNED) * _ALIGNED
        offset = self._place(room_bytes)
        if size_bytes:
            _copy(self._out.address(offset), tensor.data_ptr(), size_bytes)
        self._sent += 1
        self._under_way.append((offset, room_bytes))
        self._write(offset, size_bytes)
        return _Send(self, self._sent)

    def _place(self, room_bytes: int) -> int:
        """Return the offset of free memory for a message."""
        free = self._free.setdefault(room_bytes, [])
        if not free:
            self._read()
        if free:
            return free.pop()
        if len(self._fresh) < room_bytes:
            self._fresh = self._out.grow(room_bytes)
        offset = self._fresh.start
        self._fresh = self._fresh[room_bytes:]
        return offset

    def receive(self, tensor: torch.Tensor) -> _Receive:
        """Receive the next message into `tensor`, which must be contiguous."""
        self._posted += 1
        self._expected.append(tensor)
        self._write(_READY, self._posted)
        return _Receive(self, self._posted)

    def deliver(self) -> None:
        """Copy out the next message, as soon as it has arrived."""
        while not self._arrived:
            self.listen()
        offset, size_bytes = self._arrived.popleft()
        tensor = self._expected.popleft()
        if size_bytes != tensor.nbytes:
            raise dist.DistError(f"rank {self.rank} has sent {size_bytes} bytes where {tensor.nbytes} are expected")
        if size_bytes:
            _copy(tensor.data_ptr(), self._in.address(offset), size_bytes)
        self.received += 1
        self._write(_TAKEN, self.received)

    def listen(self) -> None:
        """Wait until the other rank has written a record."""
        until_s = time.perf_counter() + self._spin_s
        while not self._read():
            if time.perf_counter() < until_s:
                os.sched_yield()
            elif not self._poll.poll(1e3 * self._timeout_s):
                raise dist.DistError(f"rank {self.rank} has sent nothing for {self._timeout_s:g} s")

    def _read(self) -> bool:
        """Process all records that the other rank has written. Return whether there were any."""
        try:
            records = os.read(self._pipe_in, _READ_BYTES)
        except BlockingIOError:
            return False
        if not records:
            raise dist.DistError(f"rank {self.rank} of this node is gone")
        for offset, number in _RECORD.iter_unpack(records):
            if offset >= 0:
                self._arrived.append((offset, number))
            elif offset == _READY:
                self.ready = number
            else:
                place, room_bytes = self._under_way.popleft()
                self._free[room_bytes].append(place)
        return True

    def _write(self, offset: int, number: int) -> None:
        record = _RECORD.pack(offset, number)
        if self._backlog is not None:
            self._backlog.put(record)
            return
        try:
            os.write(self._pipe_out, record)
        except BlockingIOError:
            # The pipe is full with thousands of records. From now on a thread writes, because it may block.
            self._backlog = SimpleQueue()
            self._backlog.put(record)
            threading.Thread(target=self._catch_up, args=(self._backlog,), daemon=True).start()
        except BrokenPipeError:
            # The other rank may leave once it has all its messages. Only a message that it can't get is an error.
            if offset >= 0:
                raise dist.DistError(f"rank {self.rank} of this node is gone") from None

    def _catch_up(self, backlog: SimpleQueue[bytes]) -> None:
        os.set_blocking(self._pipe_out, True)
        with suppress(BrokenPipeError):
            while record := backlog.get():
                os.write(self._pipe_out, record)
        os.close(self._pipe_out)

    def close(self) -> None:
        """Close the connection. The other rank sees it after all records before."""
        for memory in (self._out, self._in):
            memory.close()
        os.close(self._pipe_in)
        if self._backlog is None:
            os.close(self._pipe_out)
        else:
            self._backlog.put(b"")


class _Send:
    """A message that was sent."""

    __slots__ = ("_number", "_to")

    def __init__(self, to: Neighbour, number: int) -> None:
        self._to, self._number = to, number

    def wait(self) -> None:
        """Wait until the other rank has posted the receive of it."""
        while self._to.ready < self._number:
            self._to.listen()


class _Receive:
    """A message to be received."""

    __slots__ = ("_from", "_number")

    def __init__(self, source: Neighbour, number: int) -> None:
        self._from, self._number = source, number

    def wait(self) -> None:
        """Wait until the message has been copied into the tensor."""
        while self._from.received < self._number:
            self._from.deliver()


class Neighbours:
    """Transport with the interface of a process group, which bypasses the group between ranks of one node."""

    def __init__(self, group: Any, timeout_s: float, *, is_used: bool = True) -> None:
        """Connect to the ranks of this node, if shared memory is used at all.

        All ranks of `group` call it together. Raises torch's error if one is lost.
        """
        self._group: Any = group
        self._of = _introduced(group, timeout_s) if is_used else {}

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """Send one tensor without waiting. The result's `wait` waits for the receive."""
        near = self._of.get(peer)
        return self._group.send(tensors, peer, tag) if near is None else near.send(tensors[0])

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """Receive the next message of a rank into a tensor. It has arrived after `wait` of the result."""
        near = self._of.get(peer)
        return self._group.recv(tensors, peer, tag) if near is None else near.receive(tensors[0])

    def close(self) -> None:
        """Close all connections and drop the reference to the process group, which stays."""
        for near in self._of.values():
            near.close()
        self._of.clear()
        self._group = None


def _introduced(group: Any, timeout_s: float) -> dict[int, Neighbour]:
    """Return connections to all other ranks of this node, with which it has exchanged ends of pipes and memory."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    where, name = _where(), b""
    with ExitStack() as open_:
        if where:
            door = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            door.settimeout(timeout_s)
            door.bind("")  # Linux chooses an abstract name, which leaves no file behind
            door.listen(size)
            name = door.getsockname()
        doors: list[Any] = [None] * size
        # Ranks without neighbors take part, too, because the gathering is collective.
        dist.all_gather_object(doors, (where, name), group=group)
        here = [other for other, (theirs, _) in enumerate(doors) if where and theirs == where]
        # Polling helps only if every rank has a core. Otherwise it would take time from the rank that is awaited.
        is_alone = len(here) <= len(os.sched_getaffinity(0)) if here else False
        near = {other: Neighbour(other, is_alone=is_alone, timeout_s=timeout_s) for other in here if other != rank}
        calls: dict[int, socket.socket] = {}
        for other in near:
            # The higher rank of each pair calls, so that each pair has exactly one connection.
            if other < rank:
                call = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                call.settimeout(timeout_s)
                call.connect(doors[other][1])
                call.sendall(_CALLER.pack(rank))
                calls[other] = call
        while len(calls) < len(near):
            call = open_.enter_context(door.accept()[0])
            call.settimeout(timeout_s)
            # An abstract socket has no file permissions, so check that the caller runs as the same user.
            _, user, _ = struct.unpack("=iII", call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.geteuid():
                calls[_CALLER.unpack(call.recv(_CALLER.size, socket.MSG_WAITALL))[0]] = call
        for other, call in calls.items():
            # Hand out all ends before taking any in, so that no two ranks wait for each other.
            near[other].hand_out(call)
        for other, call in calls.items():
            near[other].take_in(call)
        return near


def _where() -> str:
    """Return a name shared by the processes that can share memory; empty if the system has no anonymous files."""
    try:
        os.close(os.memfd_create("hpgo"))
        space = str(Path("/proc/self/ns/net").readlink())
    except (AttributeError, OSError):
        return ""
    return f"{node_name()} {space} {os.geteuid()}"
