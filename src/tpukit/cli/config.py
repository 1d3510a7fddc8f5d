"""`tpukit config`: show a job's settings with the origin of each, check them, list presets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .job_options import Json

if TYPE_CHECKING:
    from ..job.config import TPUConfig
    from ..job.job import Job

app = typer.Typer(no_args_is_help=True)

File = Annotated[
    Path | None, typer.Argument(help="A YAML file. [default: environment variables and defaults]")
]
Preset = Annotated[str | None, typer.Option(help="training, inference or development.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="A setting as key=value; repeatable.")]


@app.command("show")
def show_config(
    file: File = None, preset: Preset = None, set_: Set = None, json: Json = False
) -> None:
    """Show every setting with its value and origin."""
    from ..job.settings import SettingsView
    from .output import show

    found = _load(file, preset, set_)
    view = SettingsView.of_job if hasattr(found, "train") else SettingsView.of_settings
    show(view(found), json=json)  # pyright: ignore[reportArgumentType]  told apart above


@app.command("check")
def check_config(
    file: Annotated[Path, typer.Argument(help="A YAML file.")],
    set_: Set = None,
    json: Json = False,
) -> None:
    """Check that a file is valid and names an existing slice; exit 2 if not."""
    from ..job.config import TPUConfig
    from .output import show

    found = _load(file, None, set_)
    config = found.validate() if isinstance(found, TPUConfig) else found
    assert config.slice is not None  # either refuses anything else
    show(config.slice, json=json)


def _load(
    file: Path | None, preset: str | None, assignments: list[str] | None
) -> "Job | TPUConfig":
    """Return the job of a job file, or else the `TPUConfig` of flat settings."""
    from ..errors import ConfigError
    from ..job.config import TPUConfig
    from ..job.document import parse_assignments
    from ..job.job import Job
    from ..job.reading import read_document

    typed = parse_assignments(assignments or ())
    if file is not None:
        document = read_document(str(file), typed)
        if "model" in document.values:
            if preset is not None:
                raise ConfigError(
                    f"{file} is a job, and presets are for files of flat settings; set what "
                    f"the preset {preset} sets with --set."
                )
            return Job.from_document(document)
    return TPUConfig.load(file, preset=preset, **typed)
