"""`tpukit presets`: list the named models."""

from typing import Annotated

import typer

from .job_options import Json, presets_like
from .output import show


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Part of a name, such as llama3. [default: all]", autocompletion=presets_like
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the named models: size, layers, experts, context, source."""
    from ..models.presets import PresetListing

    show(PresetListing.of(name), json=json)
