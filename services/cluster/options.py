"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

State = Annotated[Path, typer.Option("--state", help="The state directory.", envvar="PREFIXBUS_STATE")]
DEFAULT_STATE = Path(".prefixbus")
