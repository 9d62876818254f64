"""Options that several commands have, and what they mean."""

import os
from pathlib import Path
from typing import Annotated

import typer

State = Annotated[Path, typer.Option("--state", help="The state directory.", envvar="PREFIXBUS_STATE")]
DEFAULT_STATE = Path(".prefixbus")
TOKEN_VARIABLE = "PREFIXBUS_TOKEN"
EngineKind = Annotated[str, typer.Option(help="What stands behind the bridges: sim, or vllm (make vllm).")]
VllmPython = Annotated[
    Path, typer.Option(help="--engine vllm: a Python that has vLLM.", envvar="PREFIXBUS_VLLM_PYTHON")
]
DEFAULT_VLLM_PYTHON = Path(".venv-vllm/bin/python")
Label = Annotated[str, typer.Option(help="Which of the tenant's credentials the token is.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, readable=True, help=f"File with the tenant's token; else ${TOKEN_VARIABLE}."
    ),
]


def read_token(token_file: Path | None) -> str:
    """A tenant's token, from the file or the environment. :raises BadParameter: it is in neither."""
    token = token_file.read_text("utf-8", "replace") if token_file else os.environ.get(TOKEN_VARIABLE, "")
    if not token.strip():
        raise typer.BadParameter(
            f"set {TOKEN_VARIABLE} or give --token-file. `prefixbus up` printed the one of tenant demo, once; a new "
            "one: prefixbus tenant demo --replace.",
            param_hint="token",
        )
    return token.strip()


def only_with(owner: str, given: list[str]) -> None:
    """:raises BadParameter: options were given that mean something beside `owner` alone."""
    if given:
        raise typer.BadParameter(f"It goes with {owner} alone; leave it out.", param_hint=given[0])
