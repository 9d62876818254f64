"""Writes docs/reference.md from the code: subjects, headers, errors, metrics, configuration, messages.

python docs/generate.py          write it
python docs/generate.py --check  status 1 if it is not what the code says (a test calls this)"""

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from prefixbus.auditor.metrics import AuditMetrics, CalloutMetrics
from prefixbus.bus import config, errors, messages, subjects
from prefixbus.bus.clock import RealClock
from prefixbus.bus.errors import PrefixbusError
from prefixbus.bus.runtime import Runtime
from prefixbus.directory import metrics as directory
from prefixbus.gateway import metrics as gateway
from prefixbus.lab.rules import RULES
from prefixbus.router import metrics as router
from prefixbus.router import policy
from prefixbus.router.fleet import Fleet
from prefixbus.tokenizer import metrics as tokenizer
from prefixbus.worker_bridge import metrics as bridge
from prefixbus.worker_bridge.evictions import Evictions

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


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    return "required" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"


def _config() -> str:
    parts = []
    sections: list[tuple[str, Any]] = []
    for section in msgspec.structs.fields(config.Config):
        if section.name == "models":
            sections += [("[models.NAME]", config.ModelSection), ("[models.NAME.adapters.NAME]", config.AdapterSection)]
        else:
            sections.append((f"[{section.name}]", section.type))
    for title, kind in sections:
        rows = "".join(f"| `{field.name}` | {_default(field)} |\n" for field in msgspec.structs.fields(kind))
        parts.append(f"### `{title}`\n\n{_first_paragraph(kind)}\n\n| key | default |\n|---|---|\n{rows}")
    return "\n".join(parts)


def _policies() -> str:
    rows = "".join(
        f"| `{field.name}` | `{msgspec.json.encode(field.default).decode()}` |\n"
        for field in msgspec.structs.fields(policy.Policy)
    )
    return f"| key | default |\n|---|---|\n{rows}"


def _rules() -> str:
    rows = "".join(
        f"| `{name}` | {f'{rule.parameter}, `{rule.default:g}`' if rule.parameter else ''} | {rule.description} |\n"
        for name, rule in RULES.items()
    )
    return f"| rule | parameter, default | what it does |\n|---|---|---|\n{rows}"


def _registries() -> dict[str, CollectorRegistry]:
    """What each service registers, by the service that owns it."""

    def zeros(*names: dict[str, str]) -> dict[str, Callable[[], float]]:
        return {name: lambda: 0.0 for texts in names for name in texts}

    owners = "tokenizer", "router", "directory", "worker_bridge", "auditor", "callout", "gateway"
    found = {owner: CollectorRegistry() for owner in owners}
    tokenizer.Metrics(found["tokenizer"])
    router.Metrics(found["router"], ())
    found["router"].register(router.WorkerGauges(Fleet(1.0, 1.0), lambda: 0.0))
    of_directory = directory.DirectoryMetrics(found["directory"])
    of_directory.watch(zeros(directory.GAUGES, directory.COUNTERS))
    of_directory.watch_snapshot(zeros(directory.SNAPSHOT_GAUGES))
    of_bridge = bridge.BridgeMetrics(found["worker_bridge"], 32, model="", pool="", template="")
    of_bridge.watch(zeros(bridge.GAUGES, bridge.COUNTERS), Evictions())
    AuditMetrics(found["auditor"], lambda: 0.0)
    CalloutMetrics(found["callout"])
    of_gateway = gateway.GatewayMetrics(found["gateway"])
    of_gateway.watch(zeros(gateway.GAUGES, gateway.COUNTERS))
    return {"every service": Runtime("", "", Path(), config.Config(), RealClock()).registry, **found}


def metrics() -> dict[str, list[tuple[str, str, tuple[str, ...], str]]]:
    """Of each owner: (name as scraped, kind, labels, meaning)."""
    return {owner: list(map(_metric, _families(registry))) for owner, registry in _registries().items()}


def _families(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    # The library tells nobody the labels of a metric that has no series yet.
    for collector in registry._collector_to_names:
        for family in collector.collect():
            yield family, tuple(getattr(collector, "_labelnames", getattr(family, "_labelnames", ())))


def _metric(described: tuple[Metric, tuple[str, ...]]) -> tuple[str, str, tuple[str, ...], str]:
    family, labels = described
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, labels, family.documentation


def _metrics() -> str:
    parts = []
    for owner, rows in metrics().items():
        table = "".join(
            f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |\n"
            for name, kind, labels, meaning in rows
        )
        parts.append(f"### {owner}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n{table}")
    return "\n".join(parts)


def _import_everything() -> None:
    """Errors are registered when their modules are imported."""
    import importlib
    import pkgutil

    import prefixbus

    for module in pkgutil.walk_packages(prefixbus.__path__, "prefixbus."):
        # The second runs in the engine's environment, which has what it imports.
        if not module.name.endswith(("__main__", "engine_vllm.weights")):
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
## Metrics

On `/metrics` of each process, each number by the service that owns it; a histogram is scraped as `NAME_bucket`,
`NAME_sum` and `NAME_count`. No label is of a request, a prefix or a tenant. What to look at and when to be woken:
[monitoring.md](monitoring.md).

{_metrics()}
## Configuration

`config.toml` in the state directory; `PREFIXBUS_SECTION__KEY=value` in the environment overrides a value. What each
key is for stands beside it in `services/bus/config.py`.

{_config()}
## Policies

A JSON object with what differs from these defaults, for `prefixbus policy FILE` and `prefixbus replay --policy FILE`;
an unknown key is refused. What each weight does stands beside it in `services/router/policy.py`.

{_policies()}
## Rules of the lab

For `prefixbus lab replay --policies NAME` or `NAME:PARAMETER`; [lab.md](lab.md) says how.

{_rules()}
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
