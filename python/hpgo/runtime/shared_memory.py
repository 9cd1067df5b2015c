"""Messages between processes of one machine, through memory that both of them see.

What gloo carries is copied into the system and out of it, by a thread that has to wake up before it can wake up the one
that waits. Here the sender copies a tensor into shared memory and says in a pipe where it lies; the receiver, which
looks into that pipe again and again before it sleeps, copies it out. Memory is used again once it was copied out, so
there is as much of it as is under way at once. Messages arrive in the order in which they were sent.
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

from hpgo.runtime.clocks import machine_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_SPIN_S = 0.002
"""For how long a rank looks for a message, if it has a core of its own, before it sleeps until there is one. To wake up
takes a tenth of a millisecond or more."""
_RECORD, _CALLER = struct.Struct("=qq"), struct.Struct("=q")
_READY, _TAKEN = -1, -2
"""Instead of a place in memory: so many receives are posted, so many messages were copied out."""
_ALIGNED = 64
"""Bytes, as memory of torch's own."""
_READ_BYTES = 256 * _RECORD.size
_copy = ctypes.memmove
"""Of bytes. Beside a pass that has used the caches, each function of torch takes some twenty microseconds to call."""


class _Memory:
    """A file without a name that one of two processes writes and the other one reads. It only grows."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._begins: list[int] = []
        self._parts: list[ctypes.Array[ctypes.c_char]] = []
        self._addresses: list[int] = []
        self._end = 0

    def grow(self, size_bytes: int) -> range:
        """Makes it at least so much larger, and twice as large at least: few parts are to be mapped. Returns where."""
        begin, pages = self._end, -(-size_bytes // mmap.ALLOCATIONGRANULARITY)
        os.ftruncate(self.file, begin + max(pages * mmap.ALLOCATIONGRANULARITY, begin))
        self._map()
        return range(begin, self._end)

    def address(self, offset: int) -> int:
        """Of one of its bytes; those that it grew by at once follow each other."""
        if offset >= self._end:
            self._map()
        part = bisect_right(self._begins, offset) - 1
        return self._addresses[part] + offset - self._begins[part]

    def _map(self) -> None:
        begin, self._end = self._end, os.fstat(self.file).st_size
        self._begins.append(begin)
        size_bytes = self._end - begin
        self._parts.append((ctypes.c_char * size_bytes).from_buffer(mmap.mmap(self.file, size_bytes, offset=begin)))
        self._addresses.append(ctypes.addressof(self._parts[-1]))

    def close(self) -> None:
        """It is gone once the other process has closed it, too."""
        self._parts.clear()
        os.close(self.file)


class Neighbour:
    """Another rank of this machine."""

    def __init__(self, rank: int, *, is_alone: bool, timeout_s: float) -> None:
        """`is_alone` if this process has a core of its own to wait on."""
        self.rank, self._spin_s, self._timeout_s = rank, _SPIN_S * is_alone, timeout_s
        self._out = _Memory(os.memfd_create(f"hpgo-to-{rank}", os.MFD_CLOEXEC))
        self._given, self._says = os.pipe()
        os.set_blocking(self._says, False)
        self._unsaid: SimpleQueue[bytes] | None = None
        self._fresh = range(0)
        """Memory that no message has used."""
        self._free: dict[int, list[int]] = {}
        """By size, places that are empty again."""
        self._under_way: deque[tuple[int, int]] = deque()
        """Offset and bytes of what was sent and not copied out."""
        self._sent = self._posted = 0
        self.ready = self.received = 0
        """How many receives the other has posted, and how many of its messages were copied out here."""
        self._expected: deque[torch.Tensor] = deque()
        self._arrived: deque[tuple[int, int]] = deque()
        self._in: _Memory
        self._hears: int
        self._poll = select.poll()

    def hand_out(self, to: socket.socket) -> None:
        """Gives the other one its ends of what this one has made."""
        socket.send_fds(to, [b"!"], [self._out.file, self._given])
        os.close(self._given)

    def take_in(self, source: socket.socket) -> None:
        """Gets the ends of what the other one has made."""
        _, files, _, _ = socket.recv_fds(source, 1, 2)
        if len(files) != 2:
            raise dist.DistError(f"rank {self.rank} of this machine is gone")
        self._in, self._hears = _Memory(files[0]), files[1]
        os.set_blocking(self._hears, False)
        self._poll.register(self._hears, select.POLLIN)

    def send(self, tensor: torch.Tensor) -> _Send:
        """Sends a tensor that lies in one piece; what it becomes afterwards does not matter."""
        size_bytes = tensor.nbytes
        room_bytes = -(-size_bytes // _ALIGNED) * _ALIGNED
        offset = self._place(room_bytes)
        if size_bytes:
            _copy(self._out.address(offset), tensor.data_ptr(), size_bytes)
        self._sent += 1
        self._under_way.append((offset, room_bytes))
        self._say(offset, size_bytes)
        return _Send(self, self._sent)

    def _place(self, room_bytes: int) -> int:
        """Where there is room for a message."""
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
        """The next message that has not been asked for goes into this tensor, which lies in one piece."""
        self._posted += 1
        self._expected.append(tensor)
        self._say(_READY, self._posted)
        return _Receive(self, self._posted)

    def deliver(self) -> None:
        """Copies out the next message, as soon as it is there."""
        while not self._arrived:
            self.listen()
        offset, size_bytes = self._arrived.popleft()
        tensor = self._expected.popleft()
        if size_bytes != tensor.nbytes:
            raise dist.DistError(f"rank {self.rank} has sent {size_bytes} bytes where {tensor.nbytes} are expected")
        if size_bytes:
            _copy(tensor.data_ptr(), self._in.address(offset), size_bytes)
        self.received += 1
        self._say(_TAKEN, self.received)

    def listen(self) -> None:
        """Waits until the other one has said something."""
        until_s = time.perf_counter() + self._spin_s
        while not self._read():
            if time.perf_counter() < until_s:
                os.sched_yield()
            elif not self._poll.poll(1e3 * self._timeout_s):
                raise dist.DistError(f"rank {self.rank} has said nothing for {self._timeout_s:g} s")

    def _read(self) -> bool:
        """Takes note of all that the other one has said since; whether there was anything."""
        try:
            said = os.read(self._hears, _READ_BYTES)
        except BlockingIOError:
            return False
        if not said:
            raise dist.DistError(f"rank {self.rank} of this machine is gone")
        for offset, number in _RECORD.iter_unpack(said):
            if offset >= 0:
                self._arrived.append((offset, number))
            elif offset == _READY:
                self.ready = number
            else:
                place, room_bytes = self._under_way.popleft()
                self._free[room_bytes].append(place)
        return True

    def _say(self, offset: int, number: int) -> None:
        record = _RECORD.pack(offset, number)
        if self._unsaid is not None:
            self._unsaid.put(record)
            return
        try:
            os.write(self._says, record)
        except BlockingIOError:  # thousands wait there; from now on a thread does that waits for room
            self._unsaid = SimpleQueue()
            self._unsaid.put(record)
            threading.Thread(target=self._catch_up, args=(self._unsaid,), daemon=True).start()
        except BrokenPipeError:
            if offset >= 0:  # else it has all that it wanted
                raise dist.DistError(f"rank {self.rank} of this machine is gone") from None

    def _catch_up(self, unsaid: SimpleQueue[bytes]) -> None:
        os.set_blocking(self._says, True)
        with suppress(BrokenPipeError):
            while record := unsaid.get():
                os.write(self._says, record)
        os.close(self._says)

    def close(self) -> None:
        """The other one hears that this one has gone, once it has heard all before."""
        for memory in (self._out, self._in):
            memory.close()
        os.close(self._hears)
        if self._unsaid is None:
            os.close(self._says)
        else:
            self._unsaid.put(b"")


class _Send:
    """A message on its way out."""

    __slots__ = ("_number", "_to")

    def __init__(self, to: Neighbour, number: int) -> None:
        self._to, self._number = to, number

    def wait(self) -> None:
        """Until the other rank has a place for it."""
        while self._to.ready < self._number:
            self._to.listen()


class _Receive:
    """A message on its way in."""

    __slots__ = ("_from", "_number")

    def __init__(self, source: Neighbour, number: int) -> None:
        self._from, self._number = source, number

    def wait(self) -> None:
        """Until it is there."""
        while self._from.received < self._number:
            self._from.deliver()


class Neighbours:
    """Carries messages as a process group does, past that group where both ranks are on one machine."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        """All ranks of `group` make it together. Raises what torch raises where one is lost."""
        self._group, self._of = group, _introduced(group, timeout_s)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """Sends one tensor, and does not wait; `wait` of what it returns does."""
        near = self._of.get(peer)
        return self._group.send(tensors, peer, tag) if near is None else near.send(tensors[0])

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        """Has the next message of a rank go into a tensor; it is there after `wait` of what it returns."""
        near = self._of.get(peer)
        return self._group.recv(tensors, peer, tag) if near is None else near.receive(tensors[0])

    def close(self) -> None:
        """Undoes it; the process group stays."""
        for near in self._of.values():
            near.close()
        self._of.clear()


def _introduced(group: Any, timeout_s: float) -> dict[int, Neighbour]:
    """All other ranks of this machine, with which this one has exchanged ends of pipes and memory."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    where, name = _where(), b""
    with ExitStack() as open_:
        if where:
            door = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            door.settimeout(timeout_s)
            door.bind("")  # the system gives it a name that no file has
            door.listen(size)
            name = door.getsockname()
        doors: list[Any] = [None] * size
        dist.all_gather_object(doors, (where, name), group=group)
        here = [other for other, (theirs, _) in enumerate(doors) if where and theirs == where]
        is_alone = len(here) <= len(os.sched_getaffinity(0)) if here else False
        near = {other: Neighbour(other, is_alone=is_alone, timeout_s=timeout_s) for other in here if other != rank}
        calls: dict[int, socket.socket] = {}
        for other in near:
            if other < rank:
                call = open_.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                call.settimeout(timeout_s)
                call.connect(doors[other][1])
                call.sendall(_CALLER.pack(rank))
                calls[other] = call
        while len(calls) < len(near):
            call = open_.enter_context(door.accept()[0])
            call.settimeout(timeout_s)
            _, user, _ = struct.unpack("=iII", call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.geteuid():
                calls[_CALLER.unpack(call.recv(_CALLER.size, socket.MSG_WAITALL))[0]] = call
        for other, call in calls.items():
            near[other].hand_out(call)
        for other, call in calls.items():
            near[other].take_in(call)
        return near


def _where() -> str:
    """What processes have in common that may share memory; empty where the system has none that lies in no file."""
    try:
        os.close(os.memfd_create("hpgo"))
        space = str(Path("/proc/self/ns/net").readlink())
    except (AttributeError, OSError):
        return ""
    return f"{machine_name()} {space} {os.geteuid()}"
