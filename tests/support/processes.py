"""Processes that tests start; none outlives the block it belongs to, whatever happens in it."""

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def spawned(command: list[str], **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this command; its output goes nowhere unless `options` (of Popen) say so."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
    # The block of Popen closes its pipes.
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
