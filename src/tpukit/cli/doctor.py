"""`tpukit doctor`: what is installed here, what is wrong, and how to fix it."""

from typing import Annotated

import typer

from ..exit_codes import ExitCode
from .job_options import Json
from .output import show


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compile a small program with the TPU compiler.")
    ] = False,
    json: Json = False,
) -> None:
    """Check this machine and show how to fix what is wrong. Exits 1 on any error."""
    from ..runtime.doctor import diagnose_tpu

    diagnosis = diagnose_tpu(deep=deep)
    show(diagnosis, json=json)
    if not diagnosis.healthy:
        raise typer.Exit(ExitCode.FAILED)
