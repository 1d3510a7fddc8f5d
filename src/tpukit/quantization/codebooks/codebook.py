"""`Codebook`: the vectors that codes stand for, in int8, and how well they were fitted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import TPUValidationError, did_you_mean
from ...hardware.formats import INT8
from ...kernels.rounding import absmax_scales, to_nearest
from ...shown import Shown

Metric: TypeAlias = Literal["euclidean", "cosine", "dot"]
METRICS: tuple[str, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport(Shown):
    """How a codebook was fitted.

    Attributes:
        history: Mean squared error of a value after each pass, on the vectors of that pass.
        error: Mean squared error of a value on the last pass, with the codebook before it.
        vectors: How many it was fitted to.
        iterations: Passes made.
        converged: Whether it stopped because nothing changed any more.
        respawned: Entries that no vector chose and that were put elsewhere.
        seconds: Wall time.
        notes: What a user should know of the fit.
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
    def from_dict(cls, said: Mapping[str, Any]) -> "FitReport":
        """The report that `to_dict` wrote; what it does not know is left out.

        Raises:
            TypeError, ValueError: Something is no number or text where one should be.
        """
        return cls(
            history=tuple(float(value) for value in said.get("history", ())),
            error=None if said.get("error") is None else float(said["error"]),
            vectors=int(said.get("vectors", 0)),
            iterations=int(said.get("iterations", 0)),
            converged=bool(said.get("converged", False)),
            respawned=int(said.get("respawned", 0)),
            seconds=float(said.get("seconds", 0.0)),
            notes=tuple(str(note) for note in said.get("notes", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
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
    """Vectors that codes stand for; those of several stages are added up.

    Attributes:
        entries: (stages, entries, length), int8, or float32 where rounding was not wanted.
        scale: float32 scalar that entries are multiplied with.
        metric: What the nearest entry is: by "euclidean" distance, by "cosine" (entries are unit
            vectors, and a gain is stored with every code) or by "dot" product.
        fit: How it was fitted; None where nobody said.
    """

    entries: jax.Array
    scale: jax.Array
    metric: Metric = "euclidean"
    fit: FitReport | None = field(default=None, compare=False)

    @property
    def stages(self) -> int:
        """How many codes a vector has."""
        return self.entries.shape[0]

    @property
    def size(self) -> int:
        """Entries of each stage."""
        return self.entries.shape[1]

    @property
    def length(self) -> int:
        """Values of a vector."""
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
        """Of codes: the narrowest that holds one."""
        return code_dtype(self.size)

    @property
    def bits_per_value(self) -> float:
        """Bits that codes take of each value, at the whole bits a code needs; see `gain_bits`."""
        code = max(1, (self.size - 1).bit_length())
        return (self.stages * code + self.gain_bits) / self.length

    @property
    def gain_bits(self) -> int:
        """Bits of the gain that every vector has beside its codes: 16 for cosine, else none."""
        return 16 if self.metric == "cosine" else 0

    def decode(self, codes: jax.Array) -> jax.Array:
        """The vectors (..., length) of codes (stages, ...); without gain, where there is one."""
        take = jax.vmap(lambda table, code: table[code.astype(jnp.int32)])
        return take(self.values, codes).sum(0)

    def to_dict(self) -> dict[str, Any]:
        """Sizes, metric and fit."""
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
    """The narrowest unsigned integers that number so many entries."""
    return jnp.uint8 if entries <= 256 else jnp.uint16


def parse_metric(name: str) -> Metric:
    """The metric of a name; "dot_product" is "dot".

    Raises:
        TPUValidationError: There is none of that name.
    """
    spelled = {"dot_product": "dot", "l2": "euclidean"}.get(name, name)
    for known in get_args(Metric):
        if spelled == known:
            return known
    raise TPUValidationError(
        f"{name!r} is no metric of a codebook; known are {', '.join(METRICS)} and dot_product."
        + did_you_mean(name, (*METRICS, "dot_product"))
    )


def round_entries(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 entries and the float32 scale that all of them share."""
    wide = values.astype(jnp.float32)
    scale = absmax_scales(wide, INT8).astype(jnp.float32)
    return to_nearest(wide / scale, INT8), scale
