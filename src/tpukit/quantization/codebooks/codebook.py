"""`Codebook`: int8 vectors that codes index, and the report of their fit."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import TPUValidationError, did_you_mean
from ...hardware.formats import INT8
from ...kernels.rounding import absmax_scales, to_nearest
from ...plain_data import JsonMapping, JsonObject
from ...shown import Shown

Metric: TypeAlias = Literal["euclidean", "cosine", "dot"]
METRICS: tuple[str, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport(Shown):
    """The report of a codebook's fit.

    Attributes:
        history: Mean squared error of a value after each pass, on the vectors of that pass.
        error: Mean squared error of a value in the last pass, before its update.
        vectors: Number of vectors it was fitted to.
        iterations: Passes made.
        converged: Whether it stopped because no pass lowered the error.
        respawned: Entries that no vector chose, and that were moved.
        seconds: Wall time.
        notes: Remarks on the fit for users.
    """

    history: tuple[float, ...] = ()
    error: float | None = None
    vectors: int = 0
    iterations: int = 0
    converged: bool = False
    respawned: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "FitReport":
        """Read a report that `to_dict` wrote; unknown fields are ignored.

        Raises:
            TypeError, ValueError: A field has the wrong type.
        """
        return cls(
            history=tuple(float(value) for value in data.get("history", ())),
            error=None if data.get("error") is None else float(data["error"]),
            vectors=int(data.get("vectors", 0)),
            iterations=int(data.get("iterations", 0)),
            converged=bool(data.get("converged", False)),
            respawned=int(data.get("respawned", 0)),
            seconds=float(data.get("seconds", 0.0)),
            notes=tuple(str(note) for note in data.get("notes", ())),
        )

    def to_dict(self) -> JsonObject:
        """Return all fields as plain data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "history": list(self.history),
            "notes": list(self.notes),
        }


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("entries", "scale"),
    meta_fields=("metric", "fit"),
)
@dataclass(frozen=True)
class Codebook(Shown):
    """Vectors that codes index; entries of several stages are added up.

    Attributes:
        entries: (stages, entries, length), int8, or float32 where rounding was not wanted.
        scale: float32 scalar factor of all entries.
        metric: How the nearest entry is found: by "euclidean" distance, by "cosine" (entries are
            unit vectors, and every code has a gain) or by "dot" product.
        fit: The report of its fit; None if unknown.
    """

    entries: jax.Array
    scale: jax.Array
    metric: Metric = "euclidean"
    fit: FitReport | None = field(default=None, compare=False)

    @property
    def stages(self) -> int:
        """Number of codes per vector."""
        return self.entries.shape[0]

    @property
    def size(self) -> int:
        """Entries per stage."""
        return self.entries.shape[1]

    @property
    def length(self) -> int:
        """Values per vector."""
        return self.entries.shape[2]

    @property
    def values(self) -> jax.Array:
        """The entries as float32 (stages, entries, length)."""
        return self.entries.astype(jnp.float32) * self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of entries and scale."""
        return self.entries.size * self.entries.dtype.itemsize + 4

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """The narrowest dtype of codes."""
        return code_dtype(self.size)

    @property
    def bits_per_value(self) -> float:
        """Bits of codes per value, without `gain_bits`."""
        code = max(1, (self.size - 1).bit_length())
        return (self.stages * code + self.gain_bits) / self.length

    @property
    def gain_bits(self) -> int:
        """Bits of the gain per vector: 16 for cosine, else 0."""
        return 16 if self.metric == "cosine" else 0

    def decode(self, codes: jax.Array) -> jax.Array:
        """Return vectors (..., length) of codes (stages, ...), without gains."""
        take = jax.vmap(lambda table, code: table[code.astype(jnp.int32)])
        return take(self.values, codes).sum(0)

    def to_dict(self) -> JsonObject:
        """Return sizes, metric and fit as plain data."""
        return {
            "stages": self.stages,
            "entries": self.size,
            "length": self.length,
            "metric": self.metric,
            "dtype": str(self.entries.dtype),
            "nbytes": self.nbytes,
            "bits_per_value": self.bits_per_value,
            "fit": None if self.fit is None else self.fit.to_dict(),
        }

    def __rich__(self) -> str:
        stages = f"{self.stages} × " if self.stages > 1 else ""
        text = (
            f"codebook {stages}{self.size} entries of {self.length} values ({self.metric}): "
            f"{self.bits_per_value:.2f} bits a value, {self.nbytes:,} bytes"
        )
        if self.fit is not None and self.fit.error is not None:
            text += f", error {self.fit.error:.4g} after {self.fit.iterations} passes"
        return text


def code_dtype(entries: int) -> Any:
    """Return the narrowest unsigned integer dtype that indexes so many entries."""
    return jnp.uint8 if entries <= 256 else jnp.uint16


def parse_metric(name: str) -> Metric:
    """Return the metric of a name; "dot_product" is "dot".

    Raises:
        TPUValidationError: The name is unknown.
    """
    spelled = {"dot_product": "dot", "l2": "euclidean"}.get(name, name)
    for known in get_args(Metric):
        if spelled == known:
            return known
    raise TPUValidationError(
        f"{name!r} is no metric of a codebook; expected one of {', '.join(METRICS)} and "
        "dot_product." + did_you_mean(name, (*METRICS, "dot_product"))
    )


def round_entries(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Round entries to int8 with one float32 scale; return both."""
    wide = values.astype(jnp.float32)
    scale = absmax_scales(wide, INT8).astype(jnp.float32)
    return to_nearest(wide / scale, INT8), scale
