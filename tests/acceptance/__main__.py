"""The acceptance study: runs what is not measured yet, then writes docs/acceptance.md and its pictures.

    python -m tests.acceptance [--data DIR] [--quick] [--jobs N] [--only TABLE,...]

Measurements are kept in .acceptance/<digest of code and traces>/, one file each: what is interrupted goes on where it
was."""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from pathlib import Path

import msgspec

from . import bars, plan, report
from .cells import Cell, Measured, digest, measure

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "traces"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.acceptance")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument("--quick", action="store_true", help="a part of the study, in two minutes; writes no report")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="tables by key; writes no report")
    asked = parser.parse_args()
    if not asked.data.is_dir():
        sys.stderr.write(f"acceptance: no traces in {asked.data}; name their folder with --data\n")
        return 2
    tables = plan.QUICK if asked.quick else plan.TABLES
    if asked.only:
        tables = [table for table in tables if table.key in asked.only.split(",")]
    folder = ROOT / ".acceptance" / digest(asked.data)
    folder.mkdir(parents=True, exist_ok=True)
    cells = {cell.key: cell for table in tables for cell in table.cells()}
    measured = _measure_all(list(cells.values()), folder, asked)
    sys.stdout.write(report.tables(tables, measured) + "\n" + report.bar_table(bars.bars(tables, measured)))
    if not asked.quick and not asked.only:
        pictures = ROOT / "docs" / "acceptance"
        pictures.mkdir(exist_ok=True)
        from . import plots  # matplotlib is wanted for the whole study only

        plots.draw(measured, pictures)
        (ROOT / "docs" / "acceptance.md").write_text(report.whole(tables, measured), encoding="utf-8")
    return 0


def _measure_all(cells: list[Cell], folder: Path, asked: argparse.Namespace) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    for cell in cells:
        file = folder / f"{cell.key}.json"
        if file.exists():
            measured[cell.key] = msgspec.json.decode(file.read_bytes(), type=Measured)
    missing = [cell for cell in cells if cell.key not in measured]
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        running = [pool.submit(measure, cell, asked.data) for cell in missing]
        for done, future in enumerate(concurrent.futures.as_completed(running), start=1):
            one = future.result()
            measured[one.cell.key] = one
            file = folder / f"{one.cell.key}.json"
            whole = file.with_suffix(".part")
            whole.write_bytes(msgspec.json.encode(one))
            whole.replace(file)
            minutes = (time.monotonic() - began) / 60
            sys.stderr.write(f"\racceptance: {done} of {len(missing)} runs, {minutes:.1f} minutes ")
            sys.stderr.flush()
    if missing:
        sys.stderr.write("\n")
    return measured


if __name__ == "__main__":
    sys.exit(main())
