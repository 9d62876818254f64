"""Ports for processes that are told theirs: below those that the kernel gives away, and none of them twice.

One that was bound to port 0 and let go again may be another's, a client's even, before its process has begun."""

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 12_000
# Test runs beside each other begin at different places.
_next = itertools.count(os.getpid() * 97)


def free_port() -> int:
    for number in itertools.islice(_next, _COUNT):
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
