"""Ports for ranks that tests start one by one."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> str:
    """A free port below those that systems hand out, so that no other process is given it before the ranks meet."""
    for port in random.sample(range(20000, 29000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)
    raise AssertionError("100 ports of 100 are taken")
