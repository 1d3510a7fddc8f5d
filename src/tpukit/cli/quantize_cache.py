"""`tpukit quantize --kv`: which formats of a KV cache a model's greedy text bears."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..training.trained_model import TrainedModel

NOT_REACHED = 1


def choose(
    model: "TrainedModel",
    data: Any,
    formats: Sequence[str],
    *,
    target: float | None,
    batches: int,
    output: Path | None,
    seed: int,
    json: bool,
) -> None:
    """Measure caches, write the first that reaches the target, and exit 1 where none does."""
    import numpy as np

    from ..quantization.cache.choice import choose_cache
    from ..quantization.cache.codebooks import save_cache
    from ..quantization.cache.retention import DEFAULT_TARGET
    from .output import Announcer, show

    parts = [np.asarray(batch["inputs"]) for batch in islice(data, batches)]
    rows = np.concatenate(parts) if parts else np.zeros((0, 1), np.int32)
    found = choose_cache(
        model.config,
        model.params,
        rows,
        formats=formats,
        target=DEFAULT_TARGET if target is None else target,
        seed=seed,
        progress=Announcer(),
    )
    if found.spec is not None and output is not None:
        save_cache(found.spec, output)
    show(found, json=json)
    if found.spec is None:
        best = max(found.reports, key=lambda one: one.free.value)
        typer.secho(f"NOT REACHED {best.verdict()}", fg=typer.colors.RED, err=True)
        raise typer.Exit(NOT_REACHED)
