"""Measure how a quantized KV cache changes greedy text, and choose its format.

Two generators with the same weights continue the same prompts greedily, one with a bfloat16 cache
and one with a quantized cache. For `free`, each generator continues its own text and tokens are
compared position by position. Nearly all tokens after the first difference differ, so `free` falls
with the length of the text. For `forced`, both read the text of the bfloat16 cache, and the next
token is compared at every position, so one bad choice counts once. Users see `free`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from rich.console import Group
from rich.table import Table

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.stored_formats import CacheFormat, parse_cache_format
from ...models.generation import CacheSpec, Generation, Generator, Sampling
from ...models.generation.cache import kept_units
from ...models.generation.generator import same_choices, transformer_config
from ...models.transformer.config import TransformerConfig
from ...plain_data import JsonObject
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from ..measures.evaluation import CONFIDENCE, RESAMPLES, Measured
from .codebooks import fit_cache

DEFAULT_TARGET = 0.95
_LOGITS_AT_ONCE = 2**26  # of both caches, so that a large vocabulary does not fill the memory


@dataclass(frozen=True, kw_only=True)
class CacheReport(Shown):
    """A quantized cache compared with a reference cache on continued prompts (origin: measured).

    Attributes:
        format: Format of the quantized cache.
        reference: Format of the reference cache.
        bits: Bits per value of the quantized cache at full sequence length, with scales and the
            tokens that stay in bfloat16.
        free: Share of equal tokens where each cache continues its own text.
        forced: Share of equal next tokens where both read the reference text.
        kl: Mean KL divergence of the next-token distributions on that text, in nats.
        same_until: Mean number of tokens before the first difference; all tokens of a row without
            a difference.
        rows: Number of prompts.
        prompt_tokens: Tokens per prompt.
        new_tokens: Generated tokens per prompt.
        target: The value that the lower end of the interval of `free` has to reach.
    """

    format: str
    reference: str
    bits: float
    free: Measured
    forced: Measured
    kl: Measured
    same_until: Measured
    rows: int
    prompt_tokens: int
    new_tokens: int
    target: float

    @property
    def reached(self) -> bool:
        """Whether the lower end of the interval of `free` reaches the target."""
        return self.free.low >= self.target

    def verdict(self) -> str:
        """Return one sentence with the result and its margin."""
        answer = "yes" if self.reached else "no"
        text = (
            f"{answer}: the {self.format} cache keeps {self.free.text('.3f')} of the greedy tokens "
            f"of {self.reference}; asked for is {self.target:g}, surely."
        )
        return text if self.reached else f"{text} Use int8, or a wider cache."

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
        plain = {
            name: value.to_dict() if isinstance(value, Measured) else value
            for name, value in ((n, getattr(self, n)) for n in self.__dataclass_fields__)
        }
        return {**plain, "reached": self.reached, "origin": "measured"}

    def __rich__(self) -> Table:
        title = (
            f"KV cache in {self.format} ({self.bits:.2f} bits) beside {self.reference}: "
            f"{self.rows} prompts of {self.prompt_tokens} tokens, {self.new_tokens} new ones"
        )
        table = Table("measured", "value", title=title, caption=self.verdict())
        table.add_row("equal tokens, each its own text", self.free.text())
        table.add_row("equal choices, the same text", self.forced.text())
        table.add_row("KL of next tokens, nats", self.kl.text(".2g"))
        table.add_row("tokens before the first other one", self.same_until.text(".1f"))
        return table


def measure_cache(
    model: object,
    params: PyTree,
    prompts: ArrayLike,
    *,
    kv: CacheSpec | CacheFormat | str,
    reference: CacheSpec | CacheFormat | str | None = "bf16",
    new_tokens: int = 64,
    target: float = DEFAULT_TARGET,
    batch_size: int = 16,
    progress: Progress = silent,
) -> CacheReport:
    """Measure how a quantized cache changes greedy text.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters, quantized or not.
        prompts: (rows, tokens) to continue; intervals are over rows, so give many.
        kv: The quantized cache; see `Generator`.
        reference: The reference cache; None for the model's own dtype.
        new_tokens: Generated tokens per row.
        target: Required share of equal tokens.
        batch_size: Rows at once.
        progress: Called with a line for each batch.

    Raises:
        TPUValidationError: There are fewer than two prompts, or they differ in length.
    """
    judge = CacheJudge(
        model, params, prompts, reference=reference, new_tokens=new_tokens, batch_size=batch_size
    )
    return judge(kv, target=target, progress=progress)


class CacheJudge:
    """Compare quantized caches with a reference cache on the same prompts (`measure_cache`)."""

    def __init__(
        self,
        model: object,
        params: PyTree,
        prompts: ArrayLike,
        *,
        reference: CacheSpec | CacheFormat | str | None = "bf16",
        new_tokens: int = 64,
        batch_size: int = 16,
    ) -> None:
        self._config, self._params = transformer_config(model), params
        self._rows, self._new = np.asarray(prompts, np.int32), new_tokens
        if self._rows.ndim != 2 or len(self._rows) < 2:
            raise TPUValidationError(
                f"prompts have shape {self._rows.shape}; an interval needs at least two rows "
                "(rows, tokens)."
            )
        self._reference = self._config.dtype
        if reference is not None:
            self._reference = CacheSpec.of(reference).format.name
        self._wide = Generator(self._config, params, kv=reference)
        starts = range(0, len(self._rows), batch_size)
        self._batches = [self._rows[start : start + batch_size] for start in starts]
        self._texts = [_greedy(self._wide, batch, new_tokens) for batch in self._batches]

    def __call__(
        self,
        kv: CacheSpec | CacheFormat | str,
        *,
        target: float = DEFAULT_TARGET,
        progress: Progress = silent,
    ) -> CacheReport:
        """Compare one quantized cache with the reference."""
        spec = CacheSpec.of(kv)
        narrow = Generator(self._config, self._params, kv=spec)
        parts: list[dict[str, np.ndarray]] = []
        for batch, text in zip(self._batches, self._texts, strict=True):
            parts.append(_compare(narrow, self._wide, batch, text))
            done = sum(len(part["free"]) for part in parts)
            progress(Counted(f"{spec.format.name} cache", done=done, total=len(self._rows)))
        each = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        length = self._rows.shape[1]
        return CacheReport(
            format=spec.format.name,
            reference=self._reference,
            bits=cache_bits(self._config, spec.format, length + self._new),
            **{name: _measured(rows) for name, rows in each.items()},
            rows=len(self._rows),
            prompt_tokens=length,
            new_tokens=self._new,
            target=target,
        )


def cache_bits(config: TransformerConfig, format: CacheFormat, tokens: int) -> float:
    """Return bits per cached value for a sequence of `tokens` tokens.

    Scales and tokens that stay in bfloat16 count. Codebooks, which all sequences share, and states
    of linear attention do not.
    """
    nbytes = values = 0
    for kind in config.layer_order:
        layer = config.kinds[kind]
        if layer.shares_keys_of is None:
            units, held = kept_units(layer).values(), layer.reach(tokens) or tokens
            nbytes += format.nbytes(units, held)
            values += held * sum(unit.number * unit.width for unit in units)
    return 8 * nbytes / values if values else 0.0


def share_kept(
    reference: Generator,
    prompts: Sequence[Sequence[int]],
    found: Generation,
    sampling: Sampling,
) -> float | None:
    """Return the share of generated tokens that another cache chooses after the same text.

    Random draws depend on seed, row and position only, so this holds at any temperature.

    Args:
        reference: A generator of the same weights with the reference cache.
        prompts: The prompts of the generation.
        found: The generation with the quantized cache.
        sampling: The sampling of that generation.

    Returns:
        None if nothing was generated.
    """
    same = total = 0
    for row, (prompt, made) in enumerate(zip(prompts, found.tokens, strict=True)):
        if made:
            equal = same_choices(reference, prompt, made, sampling, row=row)
            same, total = same + int(equal.sum()), total + len(made)
    return same / total if total else None


def _greedy(generator: Generator, prompts: np.ndarray, new: int) -> np.ndarray:
    sampling = Sampling(temperature=0)
    generation = generator.generate(prompts, max_new_tokens=new, sampling=sampling)
    return np.asarray(generation.tokens, np.int32)


def _compare(
    narrow: Generator, wide: Generator, prompts: np.ndarray, text: np.ndarray
) -> dict[str, np.ndarray]:
    """Return per-row figures whose means `CacheReport` has; `text` is the reference text."""
    new = text.shape[1]
    equal = _greedy(narrow, prompts, new) == text
    until = np.where(equal.all(axis=1), new, np.argmin(equal, axis=1))
    forced: list[np.ndarray] = []
    kl: list[np.ndarray] = []
    few = max(1, _LOGITS_AT_ONCE // (2 * new * wide.config.vocab_size))
    for start in range(0, len(prompts), few):
        part = slice(start, start + few)
        theirs, ours = (generator.follow(prompts[part], text[part]) for generator in (wide, narrow))
        forced.append((theirs.argmax(-1) == ours.argmax(-1)).mean(axis=1))
        logs, other = _log_softmax(theirs), _log_softmax(ours)
        kl.append((np.exp(logs) * (logs - other)).sum(-1).mean(axis=1))
    return {
        "free": equal.mean(axis=1),
        "forced": np.concatenate(forced),
        "kl": np.concatenate(kl),
        "same_until": until.astype(np.float64),
    }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _measured(rows: np.ndarray) -> Measured:
    draws = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(rows[draws].mean(axis=1), (edge, 1 - edge))
    return Measured(float(rows.mean()), float(low), float(high))


_FITTED = 4  # one row in so many is for codebooks, and nothing is measured on it


@dataclass(frozen=True)
class CacheChoice(Shown):
    """Reports on cache formats, and the first format that reaches the target.

    Attributes:
        reports: In the order of the requested formats.
        spec: The first format that reaches the target, with its codebooks; None if none does.
    """

    reports: tuple[CacheReport, ...]
    spec: CacheSpec | None

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
        chosen = None if self.spec is None else self.spec.format.name
        return {"chosen": chosen, "formats": [report.to_dict() for report in self.reports]}

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
    """Measure formats of a KV cache on text, and choose the first that reaches the target.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters.
        rows: (rows, tokens) of text; codebooks are fitted to every fourth row, the others are
            prompts.
        formats: Names in the order of preference.
        target: Required share of greedy tokens that equal those of a bfloat16 cache, for the lower
            end of the interval.
        new_tokens: Generated tokens per prompt; the last quarter of a row by default.
        batch_size: Rows at once.
        seed: Seed of the codebooks.
        progress: Called with one line per step of the work.

    Raises:
        TPUValidationError: A format is unknown, or there are too few rows.
    """
    candidates = [parse_cache_format(name) for name in formats]
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
    for format in candidates:
        spec = fit_cache(model, params, fitted, kv=format, seed=seed, progress=progress)
        reports.append(judge(spec, target=target, progress=progress))
        if chosen is None and reports[-1].reached:
            chosen = spec
    return CacheChoice(tuple(reports), chosen)


def _others(text: np.ndarray) -> np.ndarray:
    places: Sequence[int] = [n for n in range(len(text)) if n % _FITTED]
    return text[places]
