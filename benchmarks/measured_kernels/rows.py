"""Read a file of measured kernel times; each row is checked on its own."""

import gzip
import json
import tomllib
import zlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    Strict,
    ValidationError,
)

from tpukit.errors import SliceError, TPUValidationError
from tpukit.hardware import get_chip
from tpukit.plain_data import MOST_BYTES, parse_json

GZIP_MAGIC = b"\x1f\x8b"
# Clocks that include the host's dispatch, or may include it.
HOST_CLOCKS = ("host", "unknown")

Size = Annotated[NonNegativeInt, Strict()]
# Sources write an empty table as null or leave it out.
_Named = BeforeValidator(lambda value: {} if value is None else value)
Settings = Annotated[dict[str, JsonValue], _Named]
Constants = Literal["kernels", "ops"]
# The file beside each set of constants that names the rows it was fitted on.
_FILES: dict[Constants, tuple[str, str]] = {
    "kernels": ("tpukit.compiler.bundles", "calibration.toml"),
    "ops": ("tpukit.compiler.timeline", "fitted_on.toml"),
}


class GroupSizes(BaseModel):
    """The rows of each group of a grouped matmul."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    values: tuple[Size, ...]


class MeasuredRow(BaseModel):
    """One measured kernel; other fields of the file are ignored.

    Attributes:
        id: Unique in its source.
        device: The generation it ran on.
        op: The op, e.g. "attention_fwd".
        impl: The implementation, e.g. "xla" or "pallas_mosaic_tpu".
        measured_us: The measured time.
        shapes: Shapes of the arguments, by name, in their order.
        dtypes: Dtypes of the arguments, by name.
        dims: Named sizes.
        config: Block sizes and switches of a kernel.
        static_args: Other arguments; a null or missing one has its default.
        mask_kind: Attention mask: "none", "causal" or "bool_mask".
        group_sizes: Rows per group of a grouped matmul.
        num_devices: How many devices it ran on.
        timing_method: The clock that was used.
        source_date: When it was published, as a year, a month or a day.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    id: Annotated[str, Field(min_length=1)]
    device: str
    op: str
    impl: str
    measured_us: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
    shapes: dict[str, tuple[Size, ...]]
    dtypes: Annotated[dict[str, str], _Named] = {}
    dims: Settings = {}
    config: Settings = {}
    static_args: Settings = {}
    mask_kind: str | None = None
    group_sizes: GroupSizes | None = None
    num_devices: Annotated[PositiveInt, Strict()] = 1
    timing_method: str = "unknown"
    source_date: str = ""

    @cached_property
    def chip(self) -> str | None:
        """The generation by tpukit's name; None if there is no such generation."""
        try:
            return get_chip(self.device).name
        except SliceError:
            return None

    @property
    def is_pallas(self) -> bool:
        """Whether the row measured a Pallas kernel."""
        return self.impl.startswith("pallas")

    @property
    def is_xla(self) -> bool:
        """Whether the row measured plain XLA."""
        return self.impl.startswith(("xla", "reference"))

    @property
    def on_host_clock(self) -> bool:
        """Whether the time includes, or may include, a host's dispatch."""
        return self.timing_method.startswith(HOST_CLOCKS)

    @cached_property
    def program_key(self) -> str:
        """A key that is equal for rows of one program on one generation."""
        arguments = {name: value for name, value in self.static_args.items() if value}
        return _key([self.case_key, self.impl, self.config, arguments, self.dtypes])

    @cached_property
    def case_key(self) -> str:
        """A key that is equal for rows that compare implementations of one case."""
        kept = bool(self.static_args.get("return_residuals"))
        types = sorted(set(self.dtypes.values()))
        groups = None if self.group_sizes is None else self.group_sizes.values
        return _key([self.device, self.op, self.dims, types, self.mask_kind, kept, groups])

    def describe(self) -> str:
        """Return the row in one line: op, implementation, generation and sizes."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.dims.items())
        return f"{self.op} as {self.impl} on {self.device} ({sizes or self.id})"


@dataclass(frozen=True)
class RowLeftOut:
    """A row without an estimate, and the reason."""

    id: str
    what: str
    reason: str


@dataclass(frozen=True)
class Timings:
    """The readable and unreadable rows of a file."""

    path: Path
    rows: tuple[MeasuredRow, ...]
    unreadable: tuple[RowLeftOut, ...]


def read_timings(path: Path) -> Timings:
    """Read a file of measured kernels, which may be compressed by gzip.

    Raises:
        TPUValidationError: The file cannot be opened, is not a JSON list, or has no readable row.
    """
    rows: list[MeasuredRow] = []
    unreadable: list[RowLeftOut] = []
    for number, fields in enumerate(_read_list(path), 1):
        try:
            rows.append(MeasuredRow.model_validate(fields))
        except ValidationError as error:
            unreadable.append(RowLeftOut(_name(fields, number), "unreadable", _first_of(error)))
    if not rows:
        said = f"row {unreadable[0].id}: {unreadable[0].reason}" if unreadable else "it is empty"
        raise TPUValidationError(
            f"{path} has no measured kernel that can be read ({said}); expected objects with at "
            "least id, device, op, impl, shapes and measured_us."
        )
    return Timings(path, tuple(rows), tuple(unreadable))


def _read_list(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            listed = parse_json(file.read(MOST_BYTES + 1))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TPUValidationError(f"{path} is a damaged gzip file ({error}).") from error
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise TPUValidationError(
            f"{path} is not JSON ({error}); expected a list of measured kernels."
        ) from error
    if not isinstance(listed, list):
        raise TPUValidationError(
            f"{path} holds a JSON {type(listed).__name__}; expected a list of measured kernels."
        )
    return cast(list[Any], listed)


def _name(fields: Any, number: int) -> str:
    """Return the name of an unreadable row: its id, else its place in the file."""
    name = cast(dict[str, Any], fields).get("id") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and name and name.isprintable() else f"#{number}"


def _first_of(error: ValidationError) -> str:
    """Return the first validation error of a row, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the row"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _key(parts: list[Any]) -> str:
    return json.dumps(parts, sort_keys=True)


@cache
def rows_in_view(constants: Constants) -> frozenset[str]:
    """Return the ids of the rows that the rates of kernels, or of XLA ops, were fitted on."""
    package, name = _FILES[constants]
    table = tomllib.loads((files(package) / "data" / name).read_text())
    return frozenset(table["fitted_on"]["rows"])
