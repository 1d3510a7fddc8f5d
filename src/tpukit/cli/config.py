"""`tpukit config`: show a configuration with the origin of each value, check it, list presets."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)

File = Annotated[Path | None, typer.Argument(help="A YAML file; none: environment and defaults.")]
Preset = Annotated[str | None, typer.Option(help="training, inference or development.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show_config(
    file: File = None, preset: Preset = None, set_: Set = None, json: Json = False
) -> None:
    """Show every setting, its value and where the value came from."""
    from ..job.config.view import ConfigView
    from .output import show

    show(ConfigView(_load(file, preset, set_)), json=json)


@app.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="A YAML file.")],
    set_: Set = None,
    json: Json = False,
) -> None:
    """Check that a file is valid and names a slice that exists; exit 2 if not."""
    from .output import show

    config = _load(file, None, set_).validate()
    assert config.slice is not None  # validate() refuses anything else
    show(config.slice, json=json)


def _load(file: Path | None, preset: str | None, assignments: list[str] | None) -> Any:
    from ..job.config import TPUConfig
    from ..job.sources import parse_assignments

    return TPUConfig.load(file, preset=preset, **parse_assignments(assignments or ()))
