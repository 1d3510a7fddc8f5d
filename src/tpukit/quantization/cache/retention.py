"""What a KV cache in few bits costs: the tokens it changes, and how far it moves distributions.

Two generators of the same weights continue the same prompts, each taking its likeliest token. One
has the wide cache, the other the narrow one. `free`: each goes on with its own text, and tokens are
compared place by place; after the first that differs, nearly all do, so this falls with the length
of the text. `forced`: both read the wide one's text, and at each place the choice is compared, by
which one bad choice counts once. Neither is the other's estimate; a user sees the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from rich.table import Table

from ...annotations import PyTree
from ...errors import TPUValidationError
from ...hardware.cache_formats import CacheFormat
from ...models.generation import CacheSpec, Generation, Generator, Sampling
from ...models.generation.agreement import same_choices
from ...models.generation.cache import kept_units
from ...models.generation.generator import transformer_config
from ...models.transformer.config import TransformerConfig
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from ..measures.evaluation import CONFIDENCE, RESAMPLES, Measured

DEFAULT_TARGET = 0.95
_LOGITS_AT_ONCE = 2**26  # of both caches, so that a large vocabulary does not fill the memory


@dataclass(frozen=True, kw_only=True)
class CacheReport(Shown):
    """A narrow cache beside a wide one, on prompts that were continued (origin: measured).

    Attributes:
        format: Of the narrow cache.
        reference: Of the wide one.
        bits: A value of the narrow one takes, scales and what stays in bfloat16 included, when a
            sequence has its full length.
        free: Share of tokens that are equal, each cache going on with its own text.
        forced: Share of choices that are equal, both reading the wide one's text.
        kl: Mean KL divergence of the narrow one's distribution there, in nats.
        same_until: Tokens until the first that differs, in the mean over rows; all of them where
            none does.
        rows: Prompts.
        prompt_tokens: Tokens of each.
        new_tokens: Tokens that each was continued with.
        target: What `free` was to reach, surely.
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
        """Whether the lower end of the interval of `free` is at the target."""
        return self.free.low >= self.target

    def verdict(self) -> str:
        """One sentence: yes or no, and by how much."""
        said = "yes" if self.reached else "no"
        text = (
            f"{said}: the {self.format} cache keeps {self.free.text('.3f')} of the greedy tokens "
            f"of {self.reference}; asked for is {self.target:g}, surely."
        )
        return text if self.reached else f"{text} Use int8, or a wider cache."

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
    """Measure what a narrow cache changes of greedy text.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters, quantized ones too.
        prompts: (rows, tokens) that both continue; intervals are over rows, so give many.
        kv: The narrow cache; see `Generator`.
        reference: The wide one; None for the model's own dtype.
        new_tokens: Of each row.
        target: The share of equal tokens that is asked for.
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
    """Compares caches with one wide cache on the same prompts; see `measure_cache`."""

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
        """What one narrow cache changes."""
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
    """Bits of each value that the layers of a model keep of a sequence of `tokens` tokens.

    Scales and what stays in bfloat16 are counted; codebooks, which all sequences share, and the
    states of linear attention are not.
    """
    nbytes = values = 0
    for kind in config.layer_order:
        layer = config.kinds[kind]
        if layer.shares_keys_of is None:
            units, held = kept_units(layer).values(), layer.reach(tokens) or tokens
            nbytes += format.nbytes(units, held)
            values += held * sum(one.number * one.width for one in units)
    return 8 * nbytes / values if values else 0.0


def share_kept(
    reference: Generator,
    prompts: Sequence[Sequence[int]],
    found: Generation,
    sampling: Sampling,
) -> float | None:
    """The share of generated tokens that another cache would have chosen after the same text.

    What a row draws is a function of seed, row and place, so this holds for any temperature.

    Args:
        reference: The same weights with a wide cache.
        prompts: Of the generation.
        found: What the narrow cache made of them.
        sampling: How it chose.

    Returns:
        None where nothing was generated.
    """
    same = total = 0
    for row, (prompt, made) in enumerate(zip(prompts, found.tokens, strict=True)):
        if made:
            equal = same_choices(reference, prompt, made, sampling, row=row)
            same, total = same + int(equal.sum()), total + len(made)
    return same / total if total else None


def _greedy(generator: Generator, prompts: np.ndarray, new: int) -> np.ndarray:
    sampling = Sampling(temperature=0)
    found = generator.generate(prompts, max_new_tokens=new, sampling=sampling)
    return np.asarray(found.tokens, np.int32)


def _compare(
    narrow: Generator, wide: Generator, prompts: np.ndarray, text: np.ndarray
) -> dict[str, np.ndarray]:
    """Of every row, what `CacheReport` has the means of; `text` is the wide one's."""
    new = text.shape[1]
    equal = _greedy(narrow, prompts, new) == text
    until = np.where(equal.all(axis=1), new, np.argmin(equal, axis=1))
    forced: list[np.ndarray] = []
    kl: list[np.ndarray] = []
    few = max(1, _LOGITS_AT_ONCE // (2 * new * wide.config.vocab_size))
    for start in range(0, len(prompts), few):
        part = slice(start, start + few)
        theirs, ours = (one.follow(prompts[part], text[part]) for one in (wide, narrow))
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
