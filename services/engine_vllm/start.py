"""`python start.py FLAGS`, by vLLM's own Python: vLLM's API server, whose processes all end with it.

A killed API server would leave its engine core and its worker behind, with the memory, the port of the replay socket
and the connection that events come by. Each process that vLLM spawns imports this file again before anything else, and
asks the kernel to be killed together with the one that started it.

Linux alone; needs nothing of prefixbus."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on."""
    kernel = ctypes.CDLL(None)
    parent = kernel.getppid()
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before that.
    if kernel.getppid() != parent:
        raise SystemExit(1)


if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
elif __name__ == "__mp_main__":
    die_with_parent()
