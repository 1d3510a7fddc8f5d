"""A file of measured kernel times: rows, each checked on its own, and which were fitted on."""

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

from ....errors import SliceError, TPUValidationError
from ....hardware import get_chip
from ....plain_data import MOST_BYTES, parse_json

GZIP_MAGIC = b"\x1f\x8b"
# Sources say how a time was taken; these clocks also count dispatch, or may.
HOST_CLOCKS = ("host", "unknown")

Size = Annotated[NonNegativeInt, Strict()]
# Sources write nothing as null or leave it out.
_Named = BeforeValidator(lambda value: {} if value is None else value)
Settings = Annotated[dict[str, JsonValue], _Named]
Constants = Literal["kernels", "ops"]
# The file beside each set of constants that names the rows it was fitted on.
_FILES: dict[Constants, tuple[str, str]] = {
    "kernels": ("tpukit.compiler.bundles", "calibration.toml"),
    "ops": ("tpukit.compiler.timeline", "fitted_on.toml"),
}


class GroupSizes(BaseModel):
    """How many rows each group of a grouped product has."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    values: tuple[Size, ...]


class MeasuredRow(BaseModel):
    """One measured kernel; fields the file has beside these are not read.

    Attributes:
        id: Unique in its source.
        device: The generation it ran on.
        op: What was computed, e.g. "attention_fwd".
        impl: By which program, e.g. "xla" or "pallas_mosaic_tpu".
        measured_us: The time.
        shapes: Of the arguments, by name, in their order.
        dtypes: Of the arguments, by the same names.
        dims: Named sizes.
        config: Block sizes and switches of a kernel.
        static_args: Other arguments; what is null or left out has its default.
        mask_kind: Of attention: "none", "causal" or "bool_mask".
        group_sizes: Of grouped products.
        num_devices: How many it ran on.
        timing_method: Which clock said so.
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
        """The generation by tpukit's own name; None where there is no such generation."""
        try:
            return get_chip(self.device).name
        except SliceError:
            return None

    @property
    def is_pallas(self) -> bool:
        """Whether a Pallas kernel was measured, not what XLA makes."""
        return self.impl.startswith("pallas")

    @property
    def is_xla(self) -> bool:
        """Whether what XLA alone makes was measured."""
        return self.impl.startswith(("xla", "reference"))

    @property
    def on_host_clock(self) -> bool:
        """Whether the time was, or may have been, taken by a host that also dispatches."""
        return self.timing_method.startswith(HOST_CLOCKS)

    @cached_property
    def program_key(self) -> str:
        """The same for rows that measured one program on one generation, at whatever time."""
        asked = {name: value for name, value in self.static_args.items() if value}
        return _key([self.case_key, self.impl, self.config, asked, self.dtypes])

    @cached_property
    def case_key(self) -> str:
        """The same for rows that answer one question: which implementation is faster here."""
        kept = bool(self.static_args.get("return_residuals"))
        types = sorted(set(self.dtypes.values()))
        groups = None if self.group_sizes is None else self.group_sizes.values
        return _key([self.device, self.op, self.dims, types, self.mask_kind, kept, groups])

    def describe(self) -> str:
        """The row in one line: what ran where, at which sizes."""
        sizes = ", ".join(f"{name} {value}" for name, value in self.dims.items())
        return f"{self.op} as {self.impl} on {self.device} ({sizes or self.id})"


@dataclass(frozen=True)
class RowLeftOut:
    """A row without an estimate, and why."""

    id: str
    what: str
    reason: str


@dataclass(frozen=True)
class Timings:
    """What a file holds: rows that can be read, and those that cannot."""

    path: Path
    rows: tuple[MeasuredRow, ...]
    unreadable: tuple[RowLeftOut, ...]


def read_timings(path: Path) -> Timings:
    """Read a file of measured kernels, which may be compressed by gzip.

    Raises:
        TPUValidationError: It cannot be opened, is no JSON list, or has no row that can be read.
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
    """What to call a row that cannot be read: its id, else its place in the file."""
    found = cast(dict[str, Any], fields).get("id") if isinstance(fields, dict) else None
    return found if isinstance(found, str) and found and found.isprintable() else f"#{number}"


def _first_of(error: ValidationError) -> str:
    """The first thing that is wrong with a row, in one line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the row"
    return f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _key(parts: list[Any]) -> str:
    return json.dumps(parts, sort_keys=True)


@cache
def rows_in_view(constants: Constants) -> frozenset[str]:
    """The ids of the rows that the rates of Pallas kernels, or of XLA's ops, were chosen by."""
    package, name = _FILES[constants]
    table = tomllib.loads((files(package) / "data" / name).read_text())
    return frozenset(table["fitted_on"]["rows"])
