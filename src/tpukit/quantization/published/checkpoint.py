"""`read_quantized`: a checkpoint that somebody published, weight by weight."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from rich.table import Table

from ...errors import TPUModelError
from ...models.huggingface.files import TensorFiles, read_json
from ...models.huggingface.published.reading import Quantization, quantization_of
from ...models.huggingface.published.scheme import Scheme
from ...models.huggingface.published.weight import PublishedWeight
from ...shown import Shown
from .converting import LoadedWeight, held_as, load_weight


@dataclass(frozen=True)
class QuantizedCheckpoint(Shown):
    """An open checkpoint whose weights are quantized; close it, or use it in a `with`.

    Attributes:
        quantization: The format, and what its configuration says.
        files: Every tensor by its own name.
        names: The weights that are quantized, by the names a model has for them.
    """

    quantization: Quantization
    files: TensorFiles
    names: tuple[str, ...]
    _stack: ExitStack = field(repr=False)

    @property
    def scheme(self) -> Scheme:
        """How its matrices are quantized."""
        return self.quantization.scheme

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(map(self.files.nbytes, self.files))

    def published(self, name: str) -> PublishedWeight:
        """A quantized weight as it was published: values, scales, zero points."""
        if name not in self.names:
            raise TPUModelError(
                f"'{name}' is not quantized in {self.files.folder}; quantized are "
                f"{', '.join(self.names[:3])} … ({len(self.names)})."
            )
        return self.quantization.read(name, self.files)

    def load(self, name: str) -> LoadedWeight:
        """A quantized weight in a format of this package, without loss where one holds it."""
        return load_weight(self.published(name))

    def __iter__(self) -> Iterator[tuple[str, LoadedWeight]]:
        """Every quantized weight, one at a time."""
        return ((name, self.load(name)) for name in self.names)

    def dense(self, name: str, dtype: DTypeLike = "bfloat16") -> np.ndarray:
        """Any weight as plain numbers."""
        if name in self.names:
            return self.published(name).dequantize(np.dtype(dtype))
        return self.files.read(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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

    Nothing but headers is read until a weight is asked for.

    Raises:
        TPUModelError: It is no such folder, is not quantized, or in a way that is not read.
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
