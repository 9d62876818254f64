"""What the documents say is what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import typer
import typer.core
import typer.main

from prefixbus import cli
from prefixbus.cluster.lab import commands

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], timeout=18)

    assert done.returncode == 0, "run: python docs/generate.py"


def test_the_paths_that_the_readme_names_exist() -> None:
    named = re.findall(r"`((?:services|infra|docs|tests)/[^`\s]*)`", (ROOT / "README.md").read_text())

    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_performance_page_has_a_figure_for_every_service() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()

    for service in ("tokenizer", "router", "directory", "bridge", "nats-server", "auditor", "callout"):
        assert re.search(rf"^\| {service} \| \d+\.\d+ \| \d+\.\d+ \|", page, re.MULTILINE), service


def test_the_metrics_that_the_monitoring_page_speaks_of_exist() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    reference = (ROOT / "docs" / "reference.md").read_text()
    kinds = dict(re.findall(r"^\| `(prefixbus_\w+)` \| (\w+) \|", reference, re.MULTILINE))
    histograms = {
        f"{name}_{what}" for name, kind in kinds.items() if kind == "histogram" for what in ("bucket", "count")
    }

    named = set(re.findall(r"prefixbus_\w+", page))

    assert named
    assert sorted(named - kinds.keys() - histograms) == []


def test_the_commands_that_are_shown_exist_with_their_options() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    # A line that ends with a backslash goes on in the next.
    texts = [re.sub(r"\\\n\s*", "", page.read_text()) for page in pages]
    shown = [line for text in texts for line in re.findall(r"^    prefixbus ([a-z].*)", text, re.MULTILINE)]
    group = typer.main.get_command(cli.app)

    assert len(shown) > 20
    for line in shown:
        # What explains it stands behind three spaces or a comment sign.
        words = re.split(r" {3,}| #", line)[0].split()
        command = group
        while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_the_options_that_the_lab_page_speaks_of_exist() -> None:
    page = (ROOT / "docs" / "lab.md").read_text()
    group = typer.main.get_command(commands)
    assert isinstance(group, typer.core.TyperGroup)
    known = {option for command in group.commands.values() for parameter in command.params for option in parameter.opts}

    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page)) - {"-o"}

    assert {"--policies", "--trace-block", "--tenant-field"} <= named
    assert sorted(named - known) == []
    assert set(re.findall(r"prefixbus lab (\w+)", page)) == set(group.commands)
