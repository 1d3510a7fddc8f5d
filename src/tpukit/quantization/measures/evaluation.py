"""What quantizing costs, measured on held-out batches, each figure with a bootstrap interval."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...models.loss.loss import token_targets
from ...models.stored.spread import Spread
from ...shown import Shown

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
        """Plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def text(self, format: str = ".4f") -> str:
        """The value and its interval."""
        return f"{self.value:{format}} ({self.low:{format}} … {self.high:{format}})"


@dataclass(frozen=True, kw_only=True)
class QuantizationEvaluation(Shown):
    """A quantized model beside the one it was made of (origin: measured).

    Attributes:
        measure: What `retention` compares: "perplexity" (the full one's over the quantized one's),
            "accuracy" (quantized over full), "agreement" (how often both choose the same class,
            where data has no targets) or "output" (1 minus the relative squared error, where
            outputs are no classes).
        retention: 1 where nothing was lost.
        kl: Mean KL divergence of the quantized model's distribution from the full one's, in nats;
            None where outputs are no classes.
        agreement: How often both choose the same class; None where there are none.
        rows: Rows of held-out data.
        places: Tokens or examples in them.
    """

    measure: Measure
    retention: Measured
    kl: Measured | None
    agreement: Measured | None
    rows: int
    places: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
    """Compares parameters with the full ones on the same batches; one program for all of them.

    Args:
        apply: (params, batch) -> outputs.
        params: The full ones.
        batches: Held-out data.
        spread: Devices that share each batch; one by default.
    """

    def __init__(
        self,
        apply: Callable[[Any, Any], Any],
        params: Any,
        batches: Sequence[Any],
        spread: Spread | None = None,
    ) -> None:
        self._spread = spread
        self._prepare(self._compiled(apply), params, batches)

    def _compiled(self, apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        run, spread = jax.jit(apply), self._spread
        return run if spread is None else lambda params, batch: run(spread.params(params), batch)

    def _prepare(self, run: Callable[[Any, Any], Any], params: Any, batches: Sequence[Any]) -> None:
        self._apply = run
        place = self._spread
        self._batches = [one if place is None else place.batch(one) for one in batches]
        self._full = [self._apply(params, batch) for batch in self._batches]
        self.measure: Measure = measure_of(self._full[0], self._batches[0])

    def beside(self, params: Any, batches: Sequence[Any]) -> "QuantizationEvaluator":
        """Another one with other batches, by the same compiled program.

        Args:
            params: The full ones.
            batches: Data.
        """
        made = QuantizationEvaluator.__new__(QuantizationEvaluator)
        made._spread = self._spread
        made._prepare(self._apply, params, batches)
        return made

    def __call__(
        self, params: Any, apply: Callable[[Any, Any], Any] | None = None
    ) -> QuantizationEvaluation:
        """What other parameters make of the batches, or another function of them."""
        run = self._apply if apply is None else self._compiled(apply)
        return self._summed(
            [
                _compare(full, run(params, batch), _targets(full, batch), self.measure)
                for full, batch in zip(self._full, self._batches, strict=True)
            ]
        )

    def kl(self, params: Any) -> float:
        """The mean KL divergence, or the relative squared error where there is none."""
        found = self(params)
        return found.kl.value if found.kl is not None else 1 - found.retention.value

    def _summed(self, parts: Sequence[Any]) -> QuantizationEvaluation:
        rows = {
            name: np.concatenate([np.asarray(part[name], np.float64) for part in parts])
            for name in parts[0]
        }
        count = len(rows["places"])
        draws = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))

        def measured(value: Callable[[Callable[[str], Any]], Any]) -> Measured:
            whole = float(value(lambda name: rows[name].sum()))
            drawn = value(lambda name: rows[name][draws].sum(axis=1))
            edge = (1 - CONFIDENCE) / 2
            low, high = np.quantile(drawn, (edge, 1 - edge))
            return Measured(whole, float(low), float(high))

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


def measure_of(outputs: Any, batch: Any) -> Measure:
    """What is lost of such outputs is measured by; see `QuantizationEvaluation`."""
    if not isinstance(outputs, jax.Array) or outputs.ndim < 2 or outputs.shape[-1] < 2:
        return "output"
    if _targets(outputs, batch) is None:
        return "agreement"
    return "perplexity" if outputs.ndim > 2 else "accuracy"


def _targets(outputs: Any, batch: Any) -> jax.Array | None:
    """Classes that are right, negative where nobody knows; next tokens where data has no others."""
    if not isinstance(outputs, jax.Array) or not isinstance(batch, dict):
        return None
    found = token_targets(batch, outputs.shape[:-1])
    tokens = batch.get("inputs")
    if found is not None or "targets" in batch or tokens is None or outputs.ndim != 3:
        return found
    if tokens.shape != outputs.shape[:2] or tokens.dtype.kind not in "iu":
        return None
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)


def divergence(full: Any, other: Any, measure: Measure) -> jax.Array:
    """The mean KL divergence, or the relative squared error where there is none; a scalar."""
    found = _compare(full, other, None, measure)
    if measure == "output":
        return found["error"].sum() / jnp.maximum(found["size"].sum(), 1e-30)
    return found["kl"].sum() / found["places"].sum()


def _compare(full: Any, other: Any, targets: jax.Array | None, measure: str) -> dict[str, Any]:
    if measure == "output":
        return _distances(full, other)
    return _of_classes(full, other, targets)


@jax.jit
def _distances(full: Any, other: Any) -> dict[str, Any]:
    """Squared errors of all outputs, by row."""

    def rows(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32).reshape(leaf.shape[0] if leaf.ndim else 1, -1)

    pairs = list(zip(jax.tree.leaves(full), jax.tree.leaves(other), strict=True))
    error = sum(jnp.sum((rows(a) - rows(b)) ** 2, axis=1) for a, b in pairs)
    size = sum(jnp.sum(rows(a) ** 2, axis=1) for a, _ in pairs)
    return {"error": error, "size": size, "places": jnp.ones_like(size)}


@jax.jit
def _of_classes(full: jax.Array, other: jax.Array, targets: jax.Array | None) -> dict[str, Any]:
    """Sums over the places of each row."""
    wide = [logits.astype(jnp.float32) for logits in (full, other)]
    p, q = (jax.nn.log_softmax(logits, axis=-1) for logits in wide)
    places = tuple(range(1, full.ndim - 1))

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32), axis=places)

    best = [jnp.argmax(logits, axis=-1) for logits in wide]
    found = {
        "kl": summed(jnp.sum(jnp.exp(p) * (p - q), axis=-1)),
        "same": summed(best[0] == best[1]),
        "places": summed(jnp.ones(full.shape[:-1])),
    }
    if targets is not None:
        known = targets >= 0
        at = jnp.maximum(targets, 0)[..., None]
        for name, logs, choice in (("full_", p, best[0]), ("", q, best[1])):
            loss = -jnp.take_along_axis(logs, at, axis=-1)[..., 0]
            found[f"{name}loss"] = summed(jnp.where(known, loss, 0.0))
            found[f"{name}right"] = summed((choice == targets) & known)
        found["counted"] = summed(known)
    return found
