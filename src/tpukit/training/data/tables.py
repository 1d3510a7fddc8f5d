"""Examples of named arrays: from an .npz file, arrays in memory, or a folder of images."""

import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import MissingExtraError, TPUValidationError
from .indexed import Examples, IndexedData
from .stream import Batch, DataDescription

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_SPLITS = ("train", "val", "valid", "validation", "test", "eval", "dev")
_FULLY_HASHED_BYTES = 1 << 28  # of larger arrays only 1,024 rows are hashed
_HASHED_ROWS = 1024


@dataclass(frozen=True)
class ExampleShape:
    """Shape and dtype of one entry of an example."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Table(Protocol):
    """Examples of named arrays, read by number."""

    kind: str
    path: str

    def __len__(self) -> int: ...

    @property
    def shapes(self) -> dict[str, ExampleShape]:
        """The entries of an example."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of the content."""
        ...

    def fitted(self, wanted: Mapping[str, ExampleShape]) -> "Table":
        """Return the same examples with the entries that a model reads.

        Raises:
            TPUValidationError: The table cannot provide these entries.
        """
        ...

    def rows(self, numbers: Sequence[int]) -> Batch:
        """Return these examples, stacked by entry."""
        ...


class ArrayTable:
    """Arrays in memory; row i of each array belongs to example i."""

    def __init__(self, arrays: Mapping[str, Any], path: str, kind: str = "arrays") -> None:
        self.path, self.kind = path, kind
        self._arrays = {str(name): np.asarray(array) for name, array in arrays.items()}
        sizes = {name: len(a) if a.ndim else 0 for name, a in self._arrays.items()}
        if len({*sizes.values()}) != 1 or not min(sizes.values()):
            rows = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "no arrays"
            raise TPUValidationError(
                f"{path} has arrays with different or no rows ({rows}); every array needs one row "
                "per example."
            )

    @classmethod
    def from_npz(cls, path: Path) -> "ArrayTable":
        """Read a file of numpy.savez.

        Raises:
            TPUValidationError: The file cannot be read, or contains pickled objects.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            raise TPUValidationError(
                f"{path} cannot be read as .npz ({error}); write plain arrays with numpy.savez."
            ) from None
        return cls(arrays, str(path), "npz")

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    @property
    def shapes(self) -> dict[str, ExampleShape]:
        """Shapes of the arrays without their first dimension."""
        return {name: ExampleShape(a.shape[1:], a.dtype) for name, a in self._arrays.items()}

    @property
    def fingerprint(self) -> str:
        """A hash of names, shapes and content."""
        digest = hashlib.blake2b(digest_size=16)
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name}{array.shape}{array.dtype};".encode())
            step = 1 if array.nbytes <= _FULLY_HASHED_BYTES else max(1, len(array) // _HASHED_ROWS)
            digest.update(np.ascontiguousarray(array[::step]).tobytes())
        return digest.hexdigest()

    def fitted(self, wanted: Mapping[str, ExampleShape]) -> "ArrayTable":
        """Return the arrays that a model reads, in its dtypes; others are left out."""
        arrays: dict[str, np.ndarray] = {}
        for name, shape in wanted.items():
            if name not in self._arrays:
                raise TPUValidationError(
                    f"{self.path} has {', '.join(self._arrays)}, but the model reads '{name}' "
                    f"{shape.shape}; rename an array, or name the entries in the builder: "
                    "Workload(…, batch={…}, inputs=(…,))."
                )
            array = self._arrays[name]
            is_integer = np.issubdtype(shape.dtype, np.integer)
            if array.shape[1:] != shape.shape or (is_integer and array.dtype.kind not in "iub"):
                raise TPUValidationError(
                    f"'{name}' of {self.path} has examples {array.shape[1:]} of {array.dtype}, but "
                    f"the model reads {shape.shape} of {shape.dtype}."
                )
            arrays[name] = array.astype(shape.dtype, copy=False)
        return ArrayTable(arrays, self.path, self.kind)

    def rows(self, numbers: Sequence[int]) -> Batch:
        """Return these rows of every array."""
        return {name: array[numbers] for name, array in self._arrays.items()}


class ImageTable:
    """A folder of images with one subfolder per class; images are decoded on reading.

    Args:
        folder: Its subfolders are the classes, numbered in the order of their names.
        wanted: The entries of an example; by default "inputs" (height, width, 3) float32 from 0 to
            1, in the size of the first image, and "targets", the class.
    """

    kind = "images"

    def __init__(self, folder: Path, wanted: Mapping[str, ExampleShape] | None = None) -> None:
        self.path = str(folder)
        self.classes = [entry.name for entry in sorted(folder.iterdir()) if entry.is_dir()]
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((folder / name).iterdir())
            if file.suffix.lower() in IMAGES
        ]
        if {name.lower() for name in self.classes} <= {*_SPLITS} or not self._files:
            raise TPUValidationError(
                f"{folder} needs one folder of images per class, but has "
                f"{', '.join(self.classes[:4])} with {len(self._files)} images; name one split: "
                f"{folder}/{self.classes[0] if self.classes else 'train'}."
            )
        self.shapes = dict(wanted) if wanted is not None else self._native()
        images = [name for name, entry in self.shapes.items() if len(entry.shape) == 3]
        labels = [name for name, entry in self.shapes.items() if not entry.shape]
        if len(images) != 1 or len(images) + len(labels) != len(self.shapes):
            reads = ", ".join(f"{name} {entry.shape}" for name, entry in self.shapes.items())
            raise TPUValidationError(
                f"{folder} gives an image (height, width, channels) and its class, but the model "
                f"reads {reads}; write a function that yields batches: --data file.py:function."
            )
        self._image, self._labels = images[0], labels

    def __len__(self) -> int:
        return len(self._files)

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of all files, and of the content of some."""
        digest = hashlib.blake2b(digest_size=16)
        for file, number in self._files:
            digest.update(f"{number}/{file.name};{file.stat().st_size};".encode())
        for file, _ in self._files[:: max(1, len(self._files) // 64)]:
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def fitted(self, wanted: Mapping[str, ExampleShape]) -> "ImageTable":
        """Return the same images in the size that a model reads."""
        return ImageTable(Path(self.path), wanted)

    def rows(self, numbers: Sequence[int]) -> Batch:
        """Return these images, decoded, and their classes."""
        chosen = [self._files[number] for number in numbers]
        batch = {self._image: np.stack([self._decoded(file) for file, _ in chosen])}
        for name in self._labels:
            batch[name] = np.array([number for _, number in chosen], self.shapes[name].dtype)
        return batch

    def _native(self) -> dict[str, ExampleShape]:
        with _opened(self._files[0][0]) as image:
            width, height = image.size
        return {
            "inputs": ExampleShape((height, width, 3), np.dtype(np.float32)),
            "targets": ExampleShape((), np.dtype(np.int32)),
        }

    def _decoded(self, file: Path) -> np.ndarray:
        shape, dtype = self.shapes[self._image].shape, self.shapes[self._image].dtype
        channels_first = shape[0] in (1, 3) and shape[2] not in (1, 3)  # as in torch
        channels, height, width = shape if channels_first else (shape[2], shape[0], shape[1])
        with _opened(file) as image:
            try:
                plain = image.convert("L" if channels == 1 else "RGB").resize((width, height))
                pixels = np.asarray(plain, np.uint8).reshape(height, width, channels)
            except (OSError, ValueError, SyntaxError) as error:
                raise _unreadable(file, error) from None
        pixels = pixels.transpose(2, 0, 1) if channels_first else pixels
        if np.issubdtype(dtype, np.integer):
            return pixels.astype(dtype)
        return (pixels.astype(np.float32) / 255).astype(dtype)


class TableExamples:
    """A table as `Examples`."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def read(self, numbers: np.ndarray) -> list[Batch]:
        """Return one batch per row of numbers."""
        return [self._table.rows(row) for row in numbers.tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class TableData(IndexedData):
    """A table's examples; see `IndexedData` for their order."""

    table: Table

    @property
    def examples(self) -> Examples:
        """The rows of the table."""
        return TableExamples(self.table)

    @property
    def path(self) -> str:
        """Path of the table, for messages."""
        return self.table.path

    @property
    def example_size(self) -> int:
        """Numbers per example, over all entries."""
        return max(1, sum(int(np.prod(entry.shape)) for entry in self.table.shapes.values()))

    def describe(self) -> DataDescription:
        """Return a description of the data."""
        return DataDescription(
            kind=self.table.kind,
            path=self.table.path,
            num_examples=len(self.table),
            batch_size=self.batch_size,
            fingerprint=self.table.fingerprint,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that a position depends on."""
        return {"kind": self.table.kind, "fingerprint": self.table.fingerprint}


def is_image_folder(path: Path) -> bool:
    """Return whether a folder has subfolders with images, or splits with such subfolders."""
    if not os.path.isdir(path):
        return False
    return any(
        _has_images(inner) for folder in _folders(path) for inner in (folder, *_folders(folder))
    )


def _folders(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()]


def _has_images(path: Path) -> bool:
    return any(file.suffix.lower() in IMAGES for file in path.iterdir() if file.is_file())


def _opened(file: Path) -> Any:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtraError("data", needed_for="reading images", module="PIL") from None
    try:
        return Image.open(file)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> TPUValidationError:
    return TPUValidationError(f"{file} cannot be read as an image ({error}); remove or replace it.")
