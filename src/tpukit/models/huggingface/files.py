"""Tensors of safetensors files by name, including formats that numpy does not have."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ... import plain_data
from ...errors import TPUModelError
from ...plain_data import JsonObject

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
# Formats that safetensors' numpy reader does not support; their bytes are read from the file.
_NARROW = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class TensorFiles:
    """The tensors of a folder by name; files are opened once, tensors are read on demand."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.file_of: dict[str, str] = {}
        if (folder / INDEX_FILE).exists():
            self.file_of = _weight_map(folder / INDEX_FILE)
        elif not (folder / SINGLE_FILE).exists():
            raise TPUModelError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; point to a folder of "
                "safetensors weights (pickled .bin weights are not read)."
            )
        self._files: JsonObject = {}
        self._headers: dict[str, JsonObject] = {}
        for name in sorted(set(self.file_of.values()) or {SINGLE_FILE}):
            try:
                opened = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise TPUModelError(
                    f"{folder / name} cannot be read as safetensors ({error}); download it again."
                ) from None
            self._files[name] = opened
            if not self.file_of:
                self.file_of = dict.fromkeys(opened.keys(), name)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._header(name)["shape"])

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in its file."""
        start, end = self._header(name)["data_offsets"]
        return end - start

    def read(self, name: str) -> np.ndarray:
        """Return a tensor.

        Raises:
            TPUModelError: The file has no such tensor, or its format is unsupported.
        """
        header = self._header(name)
        kind = _NARROW.get(header["dtype"])
        try:
            if kind is None:
                return self._files[self.file_of[name]].get_tensor(name)
            return self._bytes(name, header).view(kind).reshape(header["shape"])
        except (SafetensorError, AttributeError, KeyError, ValueError) as error:
            raise TPUModelError(
                f"tensor '{name}' ({header['dtype']}) cannot be read from {self.file_of[name]} "
                f"({error}); the file is damaged, or its format is not supported."
            ) from None

    def _bytes(self, name: str, header: JsonObject) -> np.ndarray:
        start, end = header["data_offsets"]
        with (self.folder / self.file_of[name]).open("rb") as file:
            before = int.from_bytes(file.read(8), "little")
            file.seek(8 + before + start)
            return np.frombuffer(file.read(end - start), np.uint8)

    def _header(self, name: str) -> JsonObject:
        file = self.file_of[name]
        if file not in self._headers:
            # safe_open has checked the length and the offsets.
            with (self.folder / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                self._headers[file] = plain_data.parse_json(
                    opened.read(length), most_bytes=_MOST_HEADER_BYTES
                )
        found = self._headers[file].get(name)
        if found is None:
            raise TPUModelError(
                f"tensor '{name}' is not in {file}, although {INDEX_FILE} lists it there; the "
                "index and the file do not match. Download both again."
            )
        return found


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file of a Hugging Face folder.

    Raises:
        TPUModelError: The file does not exist, or has no object.
    """
    try:
        read = plain_data.read_json(path)
    except FileNotFoundError:
        raise TPUModelError(
            f"{path} does not exist; expected a Hugging Face folder with config.json and weights."
        ) from None
    except ValueError as error:
        raise TPUModelError(f"{path} is not JSON ({error}); download it again.") from None
    if not isinstance(read, dict):
        raise TPUModelError(f"{path} has a {type(read).__name__}; expected an object.")
    return read  # pyright: ignore[reportUnknownVariableType]  JSON


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by tensor name.

    Raises:
        TPUModelError: The file is no index, or names a file outside of its folder, which a
            checkpoint must not open.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise TPUModelError(f"{index} has no 'weight_map' of tensors and files; download it again.")
    for name in files.values():  # pyright: ignore[reportUnknownVariableType]  JSON
        if not isinstance(name, str) or Path(name).name != name:
            raise TPUModelError(
                f"{index} names the file {name!r}; expected files in the folder of the index."
            )
    return files  # pyright: ignore[reportUnknownVariableType]
