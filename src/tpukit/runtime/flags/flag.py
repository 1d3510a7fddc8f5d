"""One flag of the installed parsers: type, default, environment variable, accepted values."""

import math
import re
import tomllib
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Literal, cast, get_args

from ...errors import FlagError
from ...plain_data import JsonMapping, JsonObject
from ..ranges import Range

Group = Literal["fusion", "async_collective", "megacore", "latency_hiding"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class BundleFlag:
    """One flag of the bundles; `generations` is None for every generation."""

    name: str
    value: bool | int | str
    level: int
    group: Group
    generations: frozenset[str] | None
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A published flag that tpukit leaves out, and why."""

    name: str
    generations: frozenset[str] | None
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class ExclusiveFlags:
    """Flags of which at most one may be on."""

    flags: tuple[str, ...]
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Bundles:
    """The contents of `bundles.toml`."""

    flags: tuple[BundleFlag, ...]
    excluded: tuple[Exclusion, ...]
    exclusive: tuple[ExclusiveFlags, ...]


@cache
def load_bundles() -> Bundles:
    """Return the bundles of this release."""
    data = _read("bundles.toml")
    sources: Mapping[str, str] = data["sources"]
    return Bundles(
        flags=tuple(BundleFlag(**_fields(entry, sources)) for entry in data["flag"]),
        excluded=tuple(Exclusion(**_fields(entry, sources)) for entry in data["excluded"]),
        exclusive=tuple(
            ExclusiveFlags(tuple(entry["flags"]), entry["reason"], sources[entry["source"]])
            for entry in data["conflict"]
        ),
    )


def exclusive_flags() -> tuple[ExclusiveFlags, ...]:
    """Return the groups of flags that exclude each other."""
    return load_bundles().exclusive


@cache
def published_descriptions() -> Mapping[str, str]:
    """Return descriptions of flags from the compiler's guide, by name."""
    return _read("descriptions.toml")["descriptions"]


@cache
def published_ranges() -> Mapping[str, Range]:
    """Return the published ranges of flags with numbers, by name."""
    return {name: Range(*ends) for name, ends in _read("descriptions.toml")["ranges"].items()}


def _read(name: str) -> JsonObject:
    return tomllib.loads(resources.files("tpukit.runtime.flags").joinpath("data", name).read_text())


def _fields(entry: JsonMapping, sources: Mapping[str, str]) -> JsonObject:
    generations = entry.get("generations")
    return {
        **entry,
        "generations": None if generations is None else frozenset(generations),
        "source": sources[entry["source"]],
    }


Parser = Literal["libtpu", "xla"]
FlagType = Literal[
    "bool", "int32", "int64", "uint32", "uint64", "float", "duration", "string", "enum", "other"
]
VARIABLES: dict[Parser, str] = {"libtpu": "LIBTPU_INIT_ARGS", "xla": "XLA_FLAGS"}

# What the parsers were shown to find the type of each flag; see `infer_type`.
WORD, YES, COUNT, NEGATIVE, WIDE, FRACTION, DURATION = (
    "@@", "true", "7", "-7", "4294967297", "1.5", "1s",
)  # fmt: skip
TRIAL_VALUES = (WORD, YES, COUNT, NEGATIVE, WIDE, FRACTION, DURATION)

_TRUE = frozenset({"true", "t", "yes", "y", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "0"})
_RANGES = {
    "int32": Range(-(2**31), 2**31 - 1),
    "int64": Range(-(2**63), 2**63 - 1),
    "uint32": Range(0, 2**32 - 1),
    "uint64": Range(0, 2**64 - 1),
}
# No amount is negative, but for the -1 that leaves it to the compiler.
_AMOUNT = re.compile(r"_(kib|mib|gib|kb|mb|gb|bytes|percent)$")
_SMALLEST_AMOUNT = -1
_DURATION = re.compile(r"[+-]?(inf|0|(\d+(\.\d*)?|\.\d+)(ns|us|ms|s|m|h)"
                       r"((\d+(\.\d*)?|\.\d+)(ns|us|ms|s|m|h))*)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the installed libtpu or jaxlib.

    Attributes:
        name: Without dashes.
        parsers: Parsers that accept it.
        type: Its type, inferred from the values that the parser accepts.
        default: The parser's text; None if unknown, with `default_reason`.
        choices: The values of an enum, as the parser lists them.
        compile_option: Whether one compile can set it (`compiler_options=` of `jax.jit`).
        description: The parser's own help text, where it publishes one.
    """

    name: str
    parsers: tuple[Parser, ...]
    type: FlagType
    default: str | None = None
    default_reason: str | None = None
    choices: tuple[str, ...] = ()
    compile_option: bool = False
    description: str | None = None

    @property
    def parser(self) -> Parser:
        """The parser that receives it; libtpu for a TPU flag that both parsers know."""
        if "libtpu" in self.parsers and (
            len(self.parsers) == 1 or self.name.startswith("xla_tpu_")
        ):
            return "libtpu"
        return "xla"

    @property
    def variable(self) -> str:
        """The environment variable it is read from."""
        return VARIABLES[self.parser]

    def render(self, value: object) -> str:
        """Return `value` in the parser's spelling.

        Raises:
            FlagError: The flag does not take this value.
        """
        text = _spell(value)
        rendered = self._accept(text)
        if rendered is None:
            raise FlagError(f"{self.name} takes {self.expects}, not {value!r}.")
        if self.parser == "libtpu" and (not rendered or re.search(r"\s", rendered)):
            if rendered or self.type != "string":
                raise FlagError(
                    f"{self.name}={value!r} cannot be given to libtpu, which splits "
                    "LIBTPU_INIT_ARGS at spaces and knows no quotes; use a value without spaces."
                )
        elif re.search(r"['\"\n]", rendered):
            raise FlagError(
                f"{self.name}={value!r} holds a quote or a line break, which XLA_FLAGS cannot "
                "carry; use a value without them."
            )
        return rendered

    @property
    def expects(self) -> str:
        """Description of the accepted values."""
        if self.type == "bool":
            return "true or false"
        if self.type == "enum":
            return "one of " + ", ".join(self.choices)
        accepted = self.accepted
        if accepted is not None:
            return f"a {'' if self.type == 'float' else 'whole '}number from {accepted}"
        words = {"float": "a number", "duration": "a duration such as 10s or 1m30s"}
        return words.get(self.type, "text")

    @property
    def accepted(self) -> Range | None:
        """The range of accepted numbers; None for no limit, or for a flag without numbers."""
        published = published_ranges().get(self.name)
        if published is not None or self.type not in _RANGES:
            return published
        held = _RANGES[self.type]
        if _AMOUNT.search(self.name):
            return Range(max(held.low, _SMALLEST_AMOUNT), held.high)
        return held

    def to_dict(self) -> JsonObject:
        """Return every field as plain data, with the environment variable."""
        return {**asdict(self), "variable": self.variable}

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "Flag":
        """Read the data of `to_dict`."""
        fields = {name: data[name] for name in cls.__slots__}
        fields.update(parsers=tuple(data["parsers"]), choices=tuple(data["choices"]))
        return cls(**fields)

    def _accept(self, text: str) -> str | None:
        lowered = text.lower()
        if self.type == "bool":
            return "true" if lowered in _TRUE else "false" if lowered in _FALSE else None
        if self.type == "enum":
            same = [choice for choice in self.choices if choice.lower() == lowered]
            return text if text in same else same[0] if same else None
        accepted = self.accepted
        if self.type in _RANGES:
            number = _whole_number(text)
            return str(number) if number is not None and number in (accepted or ()) else None
        if self.type == "float":
            number = _number(text)
            if number is None or math.isnan(number):
                return None
            return text if accepted is None or number in accepted else None
        if self.type == "duration":
            return text if _DURATION.fullmatch(text) else None
        return text


def infer_type(refused: Container[str]) -> FlagType:
    """Return a flag's type, from the `TRIAL_VALUES` that its parser refused."""
    taken = {value for value in TRIAL_VALUES if value not in refused}
    if WORD in taken:
        return "string"
    if YES in taken:
        return "bool"
    if FRACTION in taken:
        return "float"
    if COUNT in taken:
        sign = "" if NEGATIVE in taken else "u"
        return cast(FlagType, f"{sign}int{64 if WIDE in taken else 32}")
    return "duration" if DURATION in taken else "other"


def listed_choices(complaint: str) -> tuple[str, ...]:
    """Return the values that a parser lists when it refuses one."""
    listed = re.search(
        r"(?:Valid options are: |Supported values are: |Must be one of \{|Valid options: "
        r"|Possible values are: )([\w', ]+)",
        complaint,
    )
    if listed is None:
        return ()
    return tuple(word.strip(" '") for word in listed.group(1).split(",") if word.strip(" '"))


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str):
        return str(value)
    raise FlagError(f"a flag's value is a bool, a number or text, not {value!r}.")


def _whole_number(text: str) -> int | None:
    try:
        return int(text, 16) if text.lower().startswith("0x") else int(text)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
