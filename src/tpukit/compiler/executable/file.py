"""The file of a compiled program: a header in JSON beside the compiler's own bytes, in a zip."""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from ...errors import TPUValidationError
from ...hardware.figure import format_quantity
from ...plain_data import DAMAGE, MOST_BYTES, JsonMapping, JsonObject, parse_json
from ...runtime.files import whole_file
from ...shown import Renderable, Shown

FORMAT = "tpukit.executable/2"
_HEADER, _CODE = "header.json", "executable.bin"
_WHEN = (1980, 1, 1, 0, 0, 0)  # the same program gives the same file


@dataclass(frozen=True)
class ArraySlot:
    """One array that goes in or comes out.

    Attributes:
        path: Where in the arguments or results it is, e.g. `[0]['w']`; "" when not known.
        spec: Mesh axes by dimension; None for an array on one device.
        memory: Kind of memory it lies in; None for the device's default.
        kept: False for an argument the program never reads, which the compiler dropped.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] | None
    memory: str | None = None
    kept: bool = True


@dataclass(frozen=True, kw_only=True)
class ExecutableHeader(Shown):
    """What there is to know of a saved program without loading it.

    Attributes:
        platform: "tpu", "cpu" or "cuda".
        slice: The slice it was compiled for offline; None when compiled where it runs.
        versions: Of jax, jaxlib and, for TPU, libtpu: a program loads only with the same.
        host: A hash of what the CPU can do, for programs that run on it; "" otherwise.
        devices: Number and, on TPU, place of each device, in the program's order.
        mesh_axes: Name and size of each mesh axis; empty for one device.
        structure: Of the results, as jax serializes it, in base64; None where they are in other
            containers than tuples, lists and dicts.
        checksum: SHA-256 of the program's bytes.
    """

    name: str
    platform: str
    device_kind: str
    slice: str | None
    versions: Mapping[str, str]
    host: str
    devices: tuple[tuple[int, ...], ...]
    mesh_axes: tuple[tuple[str, int], ...]
    arguments: tuple[ArraySlot, ...]
    results: tuple[ArraySlot, ...]
    structure: str | None = field(default=None, repr=False)
    options: JsonMapping = field(default_factory=JsonObject)
    fingerprint: str = ""
    code_bytes: int = 0
    checksum: str = ""
    format: str = FORMAT

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "ExecutableHeader":
        """Read what `to_dict` wrote, also after a trip through JSON.

        Raises:
            ValueError: A field is missing or of another type.
        """
        return TypeAdapter(cls).validate_python(data)

    @property
    def target(self) -> str:
        """Where it runs, in words."""
        where = self.slice or self.device_kind
        return f"{where} ({len(self.devices)} device{'' if len(self.devices) == 1 else 's'})"

    def __rich__(self) -> Renderable:
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        table.add_row("program", self.name)
        table.add_row("for", self.target)
        table.add_row("needs", versions)
        table.add_row("arguments", f"{len(self.arguments)}, results {len(self.results)}")
        table.add_row("code", format_quantity(self.code_bytes, "B"))
        return table


def write_executable(path: Path, header: ExecutableHeader, code: bytes) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as out, zipfile.ZipFile(out, "w") as archive:
        text = json.dumps(header.to_dict(), indent=1)
        for name, data in ((_HEADER, text.encode()), (_CODE, code)):
            entry = zipfile.ZipInfo(name, date_time=_WHEN)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def read_header(path: str | Path) -> ExecutableHeader:
    """What a file says of itself; loads nothing and needs no accelerator.

    Raises:
        TPUValidationError: The file is missing, damaged or something else.
    """
    return _read(Path(path), with_code=False)[0]


def read_executable(path: Path) -> tuple[ExecutableHeader, bytes]:
    """Header and program of a file, the program checked against the header.

    Raises:
        TPUValidationError: The file is missing, damaged or something else.
    """
    header, code = _read(path, with_code=True)
    if hashlib.sha256(code).hexdigest() != header.checksum:
        raise TPUValidationError(
            f"{path} is damaged: its program is not the one its header describes; save it again."
        )
    return header, code


def _read(path: Path, *, with_code: bool) -> tuple[ExecutableHeader, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            with archive.open(_HEADER) as header:
                data = parse_json(header.read(MOST_BYTES + 1))
            seen = data.get("format") if isinstance(data, dict) else None
            if seen != FORMAT:
                raise TPUValidationError(
                    f"{path} has the format {seen!r}, and this tpukit reads {FORMAT!r}; "
                    "save the program again with the version that is to load it."
                )
            return ExecutableHeader.from_dict(data), archive.read(_CODE) if with_code else b""
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}).") from error
    except TPUValidationError:
        raise
    # A RuntimeError is what zipfile raises of encrypted files and of unknown compressions.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, *DAMAGE) as error:
        raise TPUValidationError(
            f"{path} is no saved program, or is cut short or damaged "
            f"({type(error).__name__}); save it again with save_executable."
        ) from error
