# ruff: noqa: TID251 - it listens, and redraws a terminal
"""`prefixbus top`: the board, fed from heartbeats and the journal with the operator's key.

Owns: the subscriptions and the terminal.   Must not know: what is shown."""

import asyncio
import os
import signal
import time
from pathlib import Path

from nats.aio.msg import Msg
from rich.live import Live

from ..bus import config, subjects
from ..bus.connection import Bus
from . import control, records, status, streams
from .board import WINDOW_S, Board, frame
from .records import Records

_REFRESH_S = 0.5
# Every worker's heartbeat comes several times within this.
_LISTEN_S = 0.6


async def show(directory: Path, *, once: bool) -> None:
    """Until SIGINT or SIGTERM; `once`: one frame. :raises Unavailable: nothing runs on this state directory."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with records.operator(directory) as bus:
        section = config.load(directory / "config.toml", os.environ).directory
        board = Board(section.suspect_after_s, section.lost_after_s)
        await _feed(bus, board)
        await _until(stop, _LISTEN_S)
        if once:
            console = status.terminal()
            console.print(frame(board.view(time.monotonic(), time.time()), console.height), highlight=False)
            return
        with Live(console=status.terminal(), screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                view = board.view(time.monotonic(), time.time())
                live.update(frame(view, live.console.height, cut_off=not bus.connected), refresh=True)
                await _until(stop, _REFRESH_S)


async def _feed(bus: Bus, board: Board) -> None:
    """What the window holds already, and then all that comes."""

    async def heard_load(message: Msg) -> None:
        load = control.load_in(message)
        if load is not None:
            board.load(load, time.monotonic())
        else:
            board.left_out(message.subject, time.time())

    async def heard_record(message: Msg) -> None:
        _take(board, message.subject, message.data, time.time())

    await bus.subscribe(subjects.ALL_LOAD, heard_load)
    last_seq = (await streams.state(bus, subjects.STREAM_JOURNAL)).last_seq
    since = time.time() - WINDOW_S
    if last_seq:
        everything = f"{subjects.PREFIX}.>"
        async for kept in streams.read(bus, subjects.STREAM_JOURNAL, everything, since=since, last_seq=last_seq):
            _take(board, kept.subject, kept.data, kept.at)
    await bus.follow(subjects.STREAM_JOURNAL, f"{subjects.PREFIX}.>", heard_record, start="all", after_seq=last_seq)


def _take(board: Board, subject: str, data: bytes, wall: float) -> None:
    found = Records([], [])
    records.add(found, subject, data)
    for decision in found.decisions:
        board.decision(decision)
    for outcome in found.outcomes:
        board.outcome(outcome)
    for bad in found.unreadable:
        board.left_out(bad, wall)


async def _until(stop: asyncio.Event, seconds: float) -> None:
    """Returns when `stop` is set, or after this time."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
