"""Moments as people type them: `10m` is ten minutes ago, `2026-03-01T12:00` is that moment here.

Must not know: what happened then.   Units: Unix seconds."""

import re
from datetime import UTC, datetime

from ..bus.errors import BadRequest

_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse(text: str, now: float, field: str) -> float:
    """A moment before `now`, or one of the calendar; without a zone it is local time.

    :raises BadRequest: neither; the error names `field`."""
    if ago := _AGO.match(text):
        return now - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as exc:
        raise BadRequest(
            f"{text[:40]!r} is no moment.", field=field, remedy="Write 10m, 2h, 1d or 2026-03-01T12:00."
        ) from exc


def show(at: float) -> str:
    """In UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
