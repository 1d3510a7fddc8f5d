"""Published quantized checkpoints, converted without loss to formats that kernels here multiply."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from rich.table import Table

from ..errors import TPUModelError
from ..hardware.formats import INT4, INT8
from ..kernels.ops.quantized_matmul.weight import (
    INT4_GROUP,
    QuantizedWeight,
    pack_fp8,
    pack_int4,
    pack_int8,
)
from ..models.huggingface.files import TensorFiles, read_json
from ..models.huggingface.published.reading import Quantization, quantization_of
from ..models.huggingface.published.scheme import PublishedWeight, Scheme
from ..plain_data import JsonObject
from ..shown import Shown

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class LoadedWeight:
    """A published weight in a format of this package.

    Attributes:
        weight: An operand of `quantized_matmul`, (in, out), or a dense array in the model's layout.
        held: "int8", "int4", "fp8", or the array's dtype.
        exact: Whether its values equal the published ones to the bit.
        reason: Why no kernel here reads it; empty if one does.
    """

    weight: QuantizedWeight | np.ndarray
    held: str
    exact: bool
    reason: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.weight.nbytes


def load_weight(published: PublishedWeight) -> LoadedWeight:
    """Convert a weight to a format of this package if that is exact, else to the narrowest array.

    If neither bfloat16 nor float32 is exact, it is rounded to float32 and `exact` is False.
    """
    packed, reason = _packed(published)
    if packed is not None:
        return LoadedWeight(packed, packed.format, exact=True)
    dtype = published.exact or np.dtype(np.float32)
    array = published.dequantize(dtype)
    return LoadedWeight(array, dtype.name, published.exact is not None, reason)


def held_as(scheme: Scheme) -> tuple[str, str]:
    """Return the format of this package that holds such weights exactly, or None, and the reason.

    The configuration decides; `load_weight` also checks the values.
    """
    by_row = scheme.block[1] is None
    zeros = bool(scheme.zero_bits) and scheme.values.startswith("uint")
    reason = _obstacle(
        scheme.values, scheme.block[1], per_column=by_row, moved=scheme.reordered, zeros=zeros
    )
    if reason:
        return "bf16", reason
    if scheme.values == "float8_e4m3fn":
        return "fp8", ""
    return ("int4" if scheme.bits <= INT4.bits else "int8"), ""


def _obstacle(values: str, group: int | None, *, per_column: bool, moved: bool, zeros: bool) -> str:
    """Return why values with scales per `group` inputs fit no format here; empty if one fits."""
    if moved:
        return "groups are of inputs that are no neighbours (desc_act)"
    if zeros:
        return "zero points move the values out of what int4 and int8 hold with one scale"
    if values == "float8_e4m3fn":
        return "" if per_column else "scales are inside the sum over inputs, ours are outside"
    if not values.startswith("int"):
        return f"{values} is a table of numbers that no kernel here looks up"
    narrow = int(values.removeprefix("int")) <= INT4.bits
    if per_column or (narrow and group is not None and group % INT4_GROUP == 0):
        return ""
    return f"scales for {group} inputs; ours are for {INT4_GROUP} of int4, or all of int8"


def _packed(published: PublishedWeight) -> tuple[QuantizedWeight | None, str]:
    if published.values.ndim != 2 or published.transposed:
        return None, "several matrices in one tensor, of numbers that no kernel here looks up"
    values = published.signed
    group = published.block[1]
    per_column = group >= values.shape[1]
    moved = published.groups is not None
    if values.dtype == FP8:
        reason = _obstacle("float8_e4m3fn", group, per_column=per_column, moved=moved, zeros=False)
        if reason:
            return None, reason
        scales = published.spread(published.scales)[:, 0]
        return pack_fp8(jnp.asarray(values.T), jnp.asarray(scales)), ""
    if values.dtype.kind not in "iu":
        return None, _obstacle("a value", group, per_column=per_column, moved=moved, zeros=False)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    narrow = -INT4.largest - 1 <= low and high <= INT4.largest
    zeros = low < -INT8.largest - 1 or high > INT8.largest or (not narrow and not per_column)
    name = "int4" if narrow else "int8"
    reason = _obstacle(name, group, per_column=per_column, moved=moved, zeros=zeros)
    if reason:
        return None, reason
    columns = jnp.asarray(values.astype(np.int8).T)
    if not narrow or (per_column and published.values.dtype == np.int8):
        return pack_int8(columns, jnp.asarray(published.spread(published.scales)[:, 0])), ""
    return pack_int4(columns, jnp.asarray(_by_lanes(published))), ""


def _by_lanes(published: PublishedWeight) -> np.ndarray:
    """Return scales (groups, outputs) for every 128 inputs, with padding."""
    rows = -(-published.values.shape[1] // INT4_GROUP)
    firsts = np.arange(rows) * INT4_GROUP // published.block[1]
    tall = np.repeat(published.scales, published.block[0], axis=0)[: published.values.shape[0]]
    return tall[:, firsts].T.astype(np.float32)


@dataclass(frozen=True)
class QuantizedCheckpoint(Shown):
    """An open checkpoint of quantized weights; close it, or use it in a `with`.

    Attributes:
        quantization: The format and its configuration.
        files: Every tensor by name.
        names: The model's names of the quantized weights.
    """

    quantization: Quantization
    files: TensorFiles
    names: tuple[str, ...]
    _stack: ExitStack = field(repr=False)

    @property
    def scheme(self) -> Scheme:
        """The quantization scheme of its matrices."""
        return self.quantization.scheme

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(map(self.files.nbytes, self.files))

    def published(self, name: str) -> PublishedWeight:
        """Return a quantized weight as published: values, scales, zero points."""
        if name not in self.names:
            raise TPUModelError(
                f"'{name}' is not quantized in {self.files.folder}; quantized are "
                f"{', '.join(self.names[:3])} … ({len(self.names)})."
            )
        return self.quantization.read(name, self.files)

    def load(self, name: str) -> LoadedWeight:
        """Return a quantized weight in a format of this package; see `load_weight`."""
        return load_weight(self.published(name))

    def __iter__(self) -> Iterator[tuple[str, LoadedWeight]]:
        """Yield every quantized weight."""
        return ((name, self.load(name)) for name in self.names)

    def dense(self, name: str, dtype: DTypeLike = "bfloat16") -> np.ndarray:
        """Return any weight as a dense array."""
        if name in self.names:
            return self.published(name).dequantize(np.dtype(dtype))
        return self.files.read(name)

    def to_dict(self) -> JsonObject:
        """Return the fields as plain data."""
        held, reason = held_as(self.scheme)
        return {
            "folder": str(self.files.folder),
            "scheme": vars(self.scheme),
            "quantized": len(self.names),
            "tensors": len(self.files.file_of),
            "bytes": self.nbytes,
            "held_as": held,
            "reason": reason,
        }

    def __rich__(self) -> Table:
        held, reason = held_as(self.scheme)
        table = Table(title=str(self.files.folder), show_header=False)
        table.add_row("format", str(self.scheme))
        table.add_row("quantized", f"{len(self.names):,} weights of {len(self.files.file_of):,}")
        table.add_row("bytes", f"{self.nbytes:,} (in its files)")
        table.add_row("held as", f"{held}: {reason}" if reason else f"{held}, without loss")
        return table

    def close(self) -> None:
        """Close its files."""
        self._stack.close()

    def __enter__(self) -> "QuantizedCheckpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_quantized(folder: str | Path) -> QuantizedCheckpoint:
    """Open a folder of quantized weights: GPTQ, AWQ, compressed-tensors, FP8, MXFP4, bitsandbytes.

    Only headers are read until a weight is loaded.

    Raises:
        TPUModelError: The folder has no checkpoint, is not quantized, or has an unsupported format.
    """
    folder = Path(folder)
    quantization = quantization_of(read_json(folder / "config.json"))
    if quantization is None:
        raise TPUModelError(
            f"{folder}/config.json has no quantization_config: the weights are not quantized, and "
            "import_huggingface reads them."
        )
    with ExitStack() as stack:
        files = TensorFiles(folder, stack)
        names = tuple(quantization.names(files))
        return QuantizedCheckpoint(quantization, files, names, stack.pop_all())
