"""Compare a quantized model with the full one: perplexity, KL and generated text on held-out data.

Rotated 2-bit models can keep the likelihood of given text and still fail to write (Bielik-Q2,
2026). So both models also continue the same prompts with the same seed, and the full model reads
both texts. The generation score is its perplexity on its own text over that on the quantized
model's text; 1 means no loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...models.generation import Generator, Sampling
from ...models.loss import token_targets
from ...models.stored.placement import Spread
from ...plain_data import JsonObject
from ...shown import Shown
from ..subject import Subject

# What retention is a ratio of; see `QuantizationEvaluation`.
Measure: TypeAlias = Literal["perplexity", "accuracy", "agreement", "output"]
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Measured(Shown):
    """A value with its 95 % bootstrap interval over rows of the held-out data."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields as plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, format: str = ".4f") -> str:
        """Return the value and its interval as text."""
        return f"{self.value:{format}} ({self.low:{format}} … {self.high:{format}})"


@dataclass(frozen=True, kw_only=True)
class QuantizationEvaluation(Shown):
    """A quantized model compared with the full one (origin: measured).

    Attributes:
        measure: What `retention` is: "perplexity" (full over quantized), "accuracy" (quantized over
            full), "agreement" (share of equal classes, for data without targets) or "output" (1
            minus the relative squared error, for outputs that are no classes).
        retention: The measure; 1 means no loss.
        kl: Mean KL divergence of the quantized model's distribution from the full one's, in nats;
            None if outputs are no classes.
        agreement: Share of equal classes; None if outputs are no classes.
        rows: Rows of held-out data.
        places: Tokens or examples in them.
    """

    measure: Measure
    retention: Measured
    kl: Measured | None
    agreement: Measured | None
    rows: int
    places: int

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
        return {
            "measure": self.measure,
            "retention": self.retention.to_dict(),
            "kl": None if self.kl is None else self.kl.to_dict(),
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
            "rows": self.rows,
            "places": self.places,
            "origin": "measured",
        }


class QuantizationEvaluator:
    """Compare parameters with the full ones on the same batches, by one compiled program.

    Args:
        apply: (params, batch) -> outputs.
        params: The full parameters.
        batches: Held-out data.
        spread: Devices that share each batch; one by default.
    """

    def __init__(
        self,
        apply: Callable[[PyTree, PyTree], PyTree],
        params: PyTree,
        batches: Sequence[PyTree],
        spread: Spread | None = None,
    ) -> None:
        self._spread = spread
        self._prepare(self._compiled(apply), params, batches)

    def _compiled(
        self, apply: Callable[[PyTree, PyTree], PyTree]
    ) -> Callable[[PyTree, PyTree], PyTree]:
        run, spread = jax.jit(apply), self._spread
        return run if spread is None else lambda params, batch: run(spread.params(params), batch)

    def _prepare(
        self, run: Callable[[PyTree, PyTree], PyTree], params: PyTree, batches: Sequence[PyTree]
    ) -> None:
        self._apply = run
        place = self._spread
        self._batches = [batch if place is None else place.batch(batch) for batch in batches]
        self._full = [self._apply(params, batch) for batch in self._batches]
        self.measure: Measure = measure_of(self._full[0], self._batches[0])

    def beside(self, params: PyTree, batches: Sequence[PyTree]) -> "QuantizationEvaluator":
        """Return an evaluator of other batches that uses the same compiled program.

        Args:
            params: The full parameters.
            batches: The other batches.
        """
        made = QuantizationEvaluator.__new__(QuantizationEvaluator)
        made._spread = self._spread
        made._prepare(self._apply, params, batches)
        return made

    def __call__(
        self, params: PyTree, apply: Callable[[PyTree, PyTree], PyTree] | None = None
    ) -> QuantizationEvaluation:
        """Evaluate other parameters, or another function, on the batches."""
        run = self._apply if apply is None else self._compiled(apply)
        return self._summed(
            [
                _compare(full, run(params, batch), _targets(full, batch), self.measure)
                for full, batch in zip(self._full, self._batches, strict=True)
            ]
        )

    def kl(self, params: PyTree) -> float:
        """Return the mean KL divergence, or the relative squared error without classes."""
        evaluation = self(params)
        return evaluation.kl.value if evaluation.kl is not None else 1 - evaluation.retention.value

    def _summed(self, parts: Sequence[PyTree]) -> QuantizationEvaluation:
        rows = {
            name: np.concatenate([np.asarray(part[name], np.float64) for part in parts])
            for name in parts[0]
        }
        count = len(rows["places"])
        draws = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))

        def measured(value: Callable[[Callable[[str], Any]], Any]) -> Measured:
            mean = float(value(lambda name: rows[name].sum()))
            drawn = value(lambda name: rows[name][draws].sum(axis=1))
            edge = (1 - CONFIDENCE) / 2
            low, high = np.quantile(drawn, (edge, 1 - edge))
            return Measured(mean, float(low), float(high))

        classes = self.measure != "output"
        return QuantizationEvaluation(
            measure=self.measure,
            retention=measured(_RETENTION[self.measure]),
            kl=measured(lambda of: of("kl") / of("places")) if classes else None,
            agreement=measured(lambda of: of("same") / of("places")) if classes else None,
            rows=count,
            places=int(rows["places"].sum()),
        )


_RETENTION: dict[str, Callable[[Callable[[str], Any]], Any]] = {
    "perplexity": lambda of: np.exp((of("full_loss") - of("loss")) / of("counted")),
    "accuracy": lambda of: of("right") / np.maximum(of("full_right"), 1),
    "agreement": lambda of: of("same") / of("places"),
    "output": lambda of: 1 - of("error") / of("size"),
}


def measure_of(outputs: PyTree, batch: PyTree) -> Measure:
    """Return the measure for such outputs; see `QuantizationEvaluation`."""
    if not isinstance(outputs, jax.Array) or outputs.ndim < 2 or outputs.shape[-1] < 2:
        return "output"
    if _targets(outputs, batch) is None:
        return "agreement"
    return "perplexity" if outputs.ndim > 2 else "accuracy"


def _targets(outputs: PyTree, batch: PyTree) -> jax.Array | None:
    """Return target classes, negative if unknown; next tokens for data without targets."""
    if not isinstance(outputs, jax.Array) or not isinstance(batch, dict):
        return None
    targets = token_targets(batch, outputs.shape[:-1])
    tokens = batch.get("inputs")
    if targets is not None or "targets" in batch or tokens is None or outputs.ndim != 3:
        return targets
    if tokens.shape != outputs.shape[:2] or tokens.dtype.kind not in "iu":
        return None
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def divergence(full: PyTree, other: PyTree, measure: Measure) -> jax.Array:
    """Return the mean KL divergence, or the relative squared error if outputs are no classes."""
    sums = _compare(full, other, None, measure)
    if measure == "output":
        return sums["error"].sum() / jnp.maximum(sums["size"].sum(), 1e-30)
    return sums["kl"].sum() / sums["places"].sum()


def _compare(
    full: PyTree, other: PyTree, targets: jax.Array | None, measure: str
) -> dict[str, Any]:
    if measure == "output":
        return _distances(full, other)
    return _of_classes(full, other, targets)


@jax.jit
def _distances(full: PyTree, other: PyTree) -> dict[str, Any]:
    """Return squared errors of all outputs per row."""

    def rows(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32).reshape(leaf.shape[0] if leaf.ndim else 1, -1)

    pairs = list(zip(jax.tree.leaves(full), jax.tree.leaves(other), strict=True))
    error = sum(jnp.sum((rows(a) - rows(b)) ** 2, axis=1) for a, b in pairs)
    size = sum(jnp.sum(rows(a) ** 2, axis=1) for a, _ in pairs)
    return {"error": error, "size": size, "places": jnp.ones_like(size)}


@jax.jit
def _of_classes(full: jax.Array, other: jax.Array, targets: jax.Array | None) -> dict[str, Any]:
    """Return sums over the positions of each row."""
    wide = [logits.astype(jnp.float32) for logits in (full, other)]
    p, q = (jax.nn.log_softmax(logits, axis=-1) for logits in wide)
    places = tuple(range(1, full.ndim - 1))

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32), axis=places)

    best = [jnp.argmax(logits, axis=-1) for logits in wide]
    sums = {
        "kl": summed(jnp.sum(jnp.exp(p) * (p - q), axis=-1)),
        "same": summed(best[0] == best[1]),
        "places": summed(jnp.ones(full.shape[:-1])),
    }
    if targets is not None:
        known = targets >= 0
        at = jnp.maximum(targets, 0)[..., None]
        for name, logs, choice in (("full_", p, best[0]), ("", q, best[1])):
            loss = -jnp.take_along_axis(logs, at, axis=-1)[..., 0]
            sums[f"{name}loss"] = summed(jnp.where(known, loss, 0.0))
            sums[f"{name}right"] = summed((choice == targets) & known)
        sums["counted"] = summed(known)
    return sums


PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 32


def generation_score(
    subject: Subject, params: PyTree, batches: Sequence[PyTree]
) -> tuple[Measured | None, str]:
    """Return the generation score, or None and the reason.

    Args:
        subject: The full model.
        params: The quantized parameters.
        batches: Held-out text; prompts are its beginnings.
    """
    if subject.config is None:
        return None, "not measured: only reference transformers generate here"
    rows = np.concatenate([np.asarray(batch["inputs"]) for batch in batches])[:PROMPTS]
    length = min(PROMPT_TOKENS, rows.shape[1] // 2)
    room = subject.config.max_seq_len - length
    if length < 1 or room < 2:
        return None, "not measured: held-out rows are too short to continue"
    prompts, new = rows[:, :length], min(NEW_TOKENS, room)
    losses = [
        _losses(subject, prompts, _written(subject, given, prompts, new), length)
        for given in (subject.params, params)
    ]
    draws = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    lost = losses[0] - losses[1]
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.exp(lost[draws].mean(axis=1)), (edge, 1 - edge))
    return Measured(float(np.exp(lost.mean())), float(low), float(high)), ""


def _written(subject: Subject, params: PyTree, prompts: np.ndarray, new: int) -> np.ndarray:
    made = Generator(subject.config, params).generate(
        prompts, max_new_tokens=new, sampling=Sampling(temperature=1.0, seed=1)
    )
    return np.asarray(made.tokens, np.int32)


def _losses(subject: Subject, prompts: np.ndarray, text: np.ndarray, length: int) -> np.ndarray:
    """Return the full model's mean loss per row."""
    text_after_prompts = jnp.asarray(np.concatenate([prompts, text], axis=1))
    logits = jax.jit(subject.apply)(subject.params, {"inputs": text_after_prompts})
    logs = jax.nn.log_softmax(logits[:, length - 1 : -1].astype(jnp.float32), axis=-1)
    losses = -jnp.take_along_axis(logs, text_after_prompts[:, length:, None], axis=-1)[..., 0]
    return np.asarray(losses.mean(axis=1), np.float64)
