"""`tpukit kernel bench --timings`: what estimates are worth, by kernels that were measured."""

from collections.abc import Sequence
from pathlib import Path

import typer

from .kernel_options import chosen_chips, counted

NOTHING_SCORED = 4


def score_file(
    path: Path,
    *,
    only: Sequence[str] | None,
    on: str | None,
    limit: int | None,
    use_cache: bool,
    json: bool,
) -> None:
    """Score estimates against a file of measured kernels; exit 4 where no row has an estimate.

    Raises:
        TPUValidationError: The file cannot be read, or has no such rows.
        SliceError: `on` names no generation.
    """
    from ..kernels.timing.measured import read_timings, score_timings
    from .output import show

    timings = read_timings(path)
    chips = chosen_chips(on) if on is not None else ()
    with counted(None) as progress:
        score = score_timings(
            timings,
            ops=only or (),
            chips=chips,
            limit=limit,
            progress=progress,
            use_cache=use_cache,
        )
    show(score, json=json)
    if not score.scored:
        raise typer.Exit(NOTHING_SCORED)
