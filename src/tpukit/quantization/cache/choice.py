"""Which KV cache a model's greedy text bears: formats measured in turn, against one target."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.cache_formats import CacheFormat, parse_cache_format
from ...models.generation.cache import CacheSpec
from ...runtime.progress import Progress, silent
from ...shown import Shown
from .codebooks import fit_cache
from .retention import DEFAULT_TARGET, CacheJudge, CacheReport

_FITTED = 4  # one row in so many is for codebooks, and nothing is measured on it


@dataclass(frozen=True)
class CacheChoice(Shown):
    """Reports of formats, and the first of them that reaches the target.

    Attributes:
        reports: In the order asked for.
        spec: The first that reaches the target, with its codebooks; None where none does.
    """

    reports: tuple[CacheReport, ...]
    spec: CacheSpec | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        chosen = None if self.spec is None else self.spec.format.name
        return {"chosen": chosen, "formats": [one.to_dict() for one in self.reports]}

    def __rich__(self) -> Group:
        return Group(*self.reports)


def choose_cache(
    model: object,
    params: PyTree,
    rows: Any,
    *,
    formats: Iterable[CacheFormat | str],
    target: float = DEFAULT_TARGET,
    new_tokens: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Progress = silent,
) -> CacheChoice:
    """Measure formats of a KV cache on text, and take the first that keeps enough of it.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters.
        rows: (rows, tokens) of text; one row in four is for codebooks, the others are prompts.
        formats: Names, the one wanted most first.
        target: The share of greedy tokens that must be those of a bfloat16 cache, surely.
        new_tokens: That prompts are continued with; the last quarter of a row by default.
        batch_size: Rows at once.
        seed: Of codebooks.
        progress: Called with a line for each thing done.

    Raises:
        TPUValidationError: A format is unknown, or there are too few rows.
    """
    asked = [parse_cache_format(name) for name in formats]
    text = np.asarray(rows, np.int32)
    new = new_tokens or max(1, text.shape[1] // 4)
    fitted, prompts = text[::_FITTED], _others(text)
    if len(prompts) < 2 or text.shape[1] <= new:
        raise TPUValidationError(
            f"{text.shape[0]} rows of {text.shape[1]} tokens are too few to measure a cache on; "
            "give at least 4 rows that are longer than what is generated."
        )
    judge = CacheJudge(
        model, params, prompts[:, : text.shape[1] - new], new_tokens=new, batch_size=batch_size
    )
    reports: list[CacheReport] = []
    chosen: CacheSpec | None = None
    for format in asked:
        spec = fit_cache(model, params, fitted, kv=format, seed=seed, progress=progress)
        reports.append(judge(spec, target=target, progress=progress))
        if chosen is None and reports[-1].reached:
            chosen = spec
    return CacheChoice(tuple(reports), chosen)


def _others(text: np.ndarray) -> np.ndarray:
    places: Sequence[int] = [n for n in range(len(text)) if n % _FITTED]
    return text[places]
