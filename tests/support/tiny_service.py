"""A service of a few lines, to see what bus.runtime does for every service.

Run it with `python -m support.tiny_service STATE DRAIN_S`.
It is the bridge of w1 and obeys `pb.v1.ctl.w1.<verb>`:

    begin          says that it is ready
    trouble        is not ready, for the reason in the body; none: ready again
    work           takes the request whose id is the body in hand, and answers it at `finish`
    finish         ends the work in hand
    stumble        the handler raises what nobody foresaw
    recreate       nats-py gives up on the connection
    break          a task of the service raises what nobody foresaw"""

import sys
from pathlib import Path

import anyio
from nats.aio.msg import Msg

from prefixbus.bus import runtime, subjects
from prefixbus.bus.runtime import Runtime

WORKER = "w1"


class Tiny:
    def __init__(self, rt: Runtime) -> None:
        self._rt = rt
        self._reason = ""
        self._in_hand = 0
        self._finish = anyio.Event()

    async def run(self) -> None:
        await self._rt.listen_plain(subjects.control(WORKER, "*"), self._hear)
        await self._rt.bus.flush()
        self._rt.log.info("listening")
        await self._rt.stopping.wait()
        if self._in_hand:
            await self._finish.wait()

    def _hear(self, message: Msg) -> None:
        text = message.data.decode()
        match message.subject.rsplit(".", 1)[1]:
            case "begin":
                self._rt.ready(lambda: self._reason)
            case "trouble":
                self._reason = text
            case "work":
                self._in_hand += 1
                self._rt.log.info("work begins", extra={"fields": {"request_id": text}})
                self._rt.task_group.start_soon(self._work, message)
                return
            case "finish":
                self._finish.set()
            case "recreate":
                self._rt.task_group.start_soon(self._rt.bus.client._process_err, "'user authentication expired'")
            case "break":
                self._rt.task_group.start_soon(self._break)
            case "stumble":
                raise LookupError("nobody foresaw this")
        self._rt.bus.send(message.reply, b"yes")

    async def _work(self, message: Msg) -> None:
        await self._finish.wait()
        await self._rt.bus.publish(message.reply, b"done")

    async def _break(self) -> None:
        raise LookupError("nobody foresaw this")


async def run(rt: Runtime) -> None:
    await Tiny(rt).run()


if __name__ == "__main__":
    raise SystemExit(
        runtime.main("worker_bridge", run, state=Path(sys.argv[1]), worker=WORKER, drain_s=float(sys.argv[2]))
    )
