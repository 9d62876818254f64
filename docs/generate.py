"""Writes docs/reference.md from the code: subjects, headers, errors, messages, configuration.

python docs/generate.py          write it
python docs/generate.py --check  status 1 if it is not what the code says (a test calls this)"""

import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec

from prefixbus.bus import config, errors, messages, subjects
from prefixbus.bus.errors import PrefixbusError

TARGET = Path(__file__).with_name("reference.md")


def _first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _subjects() -> str:
    table = inspect.getdoc(subjects) or ""
    lines = re.findall(r"^\s+(pb\.v1\..*?) {2,}(.*)$", table, re.MULTILINE)
    return "| subject | what |\n|---|---|\n" + "".join(
        f"| `{subject}` | {' '.join(text.split())} |\n" for subject, text in lines
    )


def _headers() -> str:
    names = sorted(value for name, value in vars(subjects).items() if name.startswith("HEADER_"))
    return ", ".join(f"`{name}`" for name in names) + "\n"


def _errors() -> str:
    rows = "".join(
        f"| `{cls.code}` | {cls.status} | {'yes' if cls.retryable else ''} | {_first_paragraph(cls)} |\n"
        for cls in sorted(errors.all_errors(), key=lambda cls: cls.code)
        if issubclass(cls, PrefixbusError)
    )
    return f"| code | status | retryable | meaning |\n|---|---|---|---|\n{rows}"


def _type(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind).replace("typing.", "")


def _messages() -> str:
    parts = []
    for name, cls in vars(messages).items():
        if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__module__ == messages.__name__:
            form = "msgpack array" if cls.__struct_config__.array_like else "JSON object"
            fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(cls))
            parts.append(f"### {name}\n\n{' '.join((inspect.getdoc(cls) or '').split())} ({form})\n\n{fields}\n")
    return "\n".join(parts)


def _config() -> str:
    parts = []
    for section in msgspec.structs.fields(config.Config):
        kind = section.type
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            kind = config.ModelSection
        title = "[models.NAME]" if kind is config.ModelSection else f"[{section.name}]"
        rows = "".join(
            f"| `{field.name}` | {'required' if field.default is msgspec.NODEFAULT else f'`{field.default!r}`'} |\n"
            for field in msgspec.structs.fields(kind)
        )
        parts.append(f"### `{title}`\n\n{_first_paragraph(kind)}\n\n| key | default |\n|---|---|\n{rows}")
    return "\n".join(parts)


def _import_everything() -> None:
    """Errors are registered when their modules are imported."""
    import importlib
    import pkgutil

    import prefixbus

    for module in pkgutil.walk_packages(prefixbus.__path__, "prefixbus."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def render() -> str:
    _import_everything()
    return f"""\
# Reference

Written by `python docs/generate.py` from the code; a test keeps it true.

## Subjects

{_subjects()}
Who may publish and subscribe to what: [infra/nats/permissions.md](../infra/nats/permissions.md).

## Headers

{_headers()}
## Errors

An answer that failed ends with `Pb-Error` (the code), `Nats-Service-Error-Code` (the status) and `Nats-Service-Error`
(a sentence). Codes never change their meaning.

{_errors()}
## Configuration

`config.toml` in the state directory; `PREFIXBUS_SECTION__KEY=value` in the environment overrides a value. What each
key is for stands beside it in `services/bus/config.py`.

{_config()}
## Messages

{_messages()}"""


def main() -> int:
    text = render()
    if "--check" in sys.argv:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
