"""`tpukit doctor`: what is here, what is wrong, how to mend it."""

from typing import Annotated

import typer

from .job_options import Json
from .output import show

NOT_HEALTHY = 1


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compile a small program with the TPU compiler.")
    ] = False,
    json: Json = False,
) -> None:
    """Look at this machine and say what is wrong and how to mend it. Exits 1 on any error."""
    from ..runtime.doctor import diagnose_tpu

    diagnosis = diagnose_tpu(deep=deep)
    show(diagnosis, json=json)
    if not diagnosis.healthy:
        raise typer.Exit(NOT_HEALTHY)
