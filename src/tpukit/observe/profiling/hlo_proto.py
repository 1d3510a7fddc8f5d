"""The programs in an xplane file, read into the objects that HLO text is parsed into.

An xplane file is a protocol buffer (tsl/profiler/protobuf/xplane.proto). jax's `ProfileData` reads
its planes, lines and events, but not the programs, which are in the metadata of a plane without
events. XProf shows them, and is an optional dependency. jaxlib could print a program
(xla/service/hlo.proto), but aborts the process on some damaged ones, and a profile may come from
anywhere. So both are read from the wire format, and only the fields that are used.

What the readers of `compiler.hlo` look up in an instruction's text (called computations, contracted
dimensions, windows, metadata) is written as the compiler would print it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...compiler.hlo import Computation, HloModule, Instruction, Shape
from ...compiler.memory.sources import SourceTable
from ...errors import TPUValidationError
from ...runtime.protobuf_wire import iter_fields, iter_packed

METADATA_PLANE = b"/host:metadata"
# Field numbers, which a published protocol buffer never changes.
PLANES = 1  # of XSpace
PLANE_NAME, EVENT_METADATA = 2, 4  # of XPlane
VALUE = 2  # of an entry of a map
NAME, STATS = 2, 5  # of XEventMetadata
BYTES = 6  # of XStat
HLO_MODULE = 1  # of HloProto


def programs_in(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name (`jit_step(7)`: module and number) and HloModuleProto of every program.

    Raises:
        TPUValidationError: The bytes are cut short or no protocol buffer.
    """
    for number, plane in fields(content):
        if number != PLANES or not isinstance(plane, bytes):
            continue
        parts = list(fields(plane))
        if (PLANE_NAME, METADATA_PLANE) not in parts:
            continue
        for number, entry in parts:
            if number == EVENT_METADATA and isinstance(entry, bytes):
                yield from _program(entry)


def _program(entry: bytes) -> Iterator[tuple[str, bytes]]:
    about = list(fields(_only(entry, VALUE)))
    name = next((value for number, value in about if number == NAME), b"")
    for number, stat in about:
        if number != STATS or not isinstance(stat, bytes):
            continue
        module = _only(_only(stat, BYTES), HLO_MODULE)
        if module and isinstance(name, bytes):
            yield name.decode(errors="replace"), module


def _only(message: bytes, wanted: int) -> bytes:
    """Return the bytes of a field; empty where the field is missing."""
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            return value
    return b""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a message, in order.

    Raises:
        TPUValidationError: The bytes are cut short or no message.
    """
    try:
        yield from iter_fields(message)
    except ValueError as error:
        raise _damaged(error) from None


def packed_numbers(content: bytes) -> list[int]:
    """Return the numbers of a packed field.

    Raises:
        TPUValidationError: The last one is cut short.
    """
    try:
        return list(iter_packed(content))
    except ValueError as error:
        raise _damaged(error) from None


def _damaged(error: ValueError) -> TPUValidationError:
    return TPUValidationError(f"it is cut short or damaged: {error}.")


# Names of the number formats by their value in xla_data.proto; 13 is a tuple.
FORMATS = dict(
    enumerate(
        (
            *("pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"),
            *("tuple", "opaque", "c64", "bf16", "token", "c128", "f8e5m2", "f8e4m3fn", "s4", "u4"),
            *("f8e4m3b11fnuz", "f8e5m2fnuz", "f8e4m3fnuz", "s2", "u2", "f8e4m3", "f8e3m4", "s1"),
            *("u1", "f4e2m1fn", "f8e8m0fnu"),
        ),
        start=1,
    )
)
TUPLE, SHAPELESS = 13, ("opaque", "tuple")
# Roles of called computations, by opcode, in the order in which the message lists them.
_ROLES = {"while": ("body", "condition"), "fusion": ("calls",), "conditional": ()}
_TO_APPLY = frozenset(
    (
        *("call", "reduce", "reduce-window", "map", "sort", "scatter", "all-reduce"),
        *("all-reduce-start", "reduce-scatter", "custom-call", "select-and-scatter"),
    )
)


@dataclass(frozen=True)
class Message:
    """One protocol buffer message with its fields by number."""

    content: bytes

    @cached_property
    def _fields(self) -> dict[int, list[int | bytes]]:
        by_number: dict[int, list[int | bytes]] = {}
        for number, value in fields(self.content):
            by_number.setdefault(number, []).append(value)
        return by_number

    def number(self, field: int, default: int = 0) -> int:
        """Return a number, the last one where there are several."""
        value = self._fields.get(field, [default])[-1]
        return value if isinstance(value, int) else default

    def numbers(self, field: int) -> tuple[int, ...]:
        """Return repeated numbers, packed or not."""
        numbers: list[int] = []
        for value in self._fields.get(field, ()):
            numbers += [value] if isinstance(value, int) else packed_numbers(value)
        return tuple(numbers)

    def text(self, field: int) -> str:
        """Return a string; bytes that are no Unicode become replacement characters."""
        value = self._fields.get(field, [b""])[-1]
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def texts(self, field: int) -> list[str]:
        """Return repeated strings."""
        values = self._fields.get(field, ())
        return [value.decode(errors="replace") for value in values if isinstance(value, bytes)]

    def message(self, field: int) -> "Message":
        """Return an inner message; an empty one where it is missing."""
        value = self._fields.get(field, [b""])[-1]
        return Message(value if isinstance(value, bytes) else b"")

    def messages(self, field: int) -> "list[Message]":
        """Return repeated inner messages."""
        values = self._fields.get(field, ())
        return [Message(value) for value in values if isinstance(value, bytes)]


def read_program(content: bytes) -> tuple[HloModule, SourceTable]:
    """Read an HloModuleProto and the source lines it was made from.

    Raises:
        TPUValidationError: The bytes are damaged, or have no entry computation.
    """
    module = Message(content)
    messages = module.messages(3)
    names = {message.number(5): message.text(1) for message in messages}
    computations = {message.text(1): _computation(message, names) for message in messages}
    entry = names.get(module.number(6), module.text(2))
    if entry not in computations:
        raise TPUValidationError("it is damaged: its program has no entry computation.")
    program = HloModule(module.text(1), computations, entry)
    return program, _sources(module.message(17))


def _computation(message: Message, computations: dict[int, str]) -> Computation:
    instructions = message.messages(2)
    names = {instruction.number(35): instruction.text(1) for instruction in instructions}
    root = message.number(6)
    return Computation(
        message.text(1),
        tuple(
            _instruction(instruction, names, computations, is_root=instruction.number(35) == root)
            for instruction in instructions
        ),
    )


def _instruction(
    message: Message, names: dict[int, str], computations: dict[int, str], *, is_root: bool
) -> Instruction:
    opcode = message.text(2)
    operands = [names[number] for number in message.numbers(36) if number in names]
    is_parameter = opcode == "parameter"
    return Instruction(
        name=message.text(1),
        opcode=opcode,
        shapes=tuple(_shapes(message.message(3))),
        operands=tuple(operands),
        arguments=str(message.number(9)) if is_parameter else ", ".join(operands),
        attributes=_attributes(message, opcode, computations),
        is_root=is_root,
    )


def _shapes(message: Message) -> Iterable[Shape]:
    kind = message.number(2)
    if kind == TUPLE:
        for inner in message.messages(4):
            yield from _shapes(inner)
        return
    dtype = FORMATS.get(kind)
    if dtype is None or dtype in SHAPELESS:
        return
    layout = message.message(5)
    yield Shape(
        dtype=dtype,
        dims=message.numbers(3),
        layout=layout.numbers(1),
        tiles=tuple(tile.numbers(1) for tile in layout.messages(6)),
        memory_space=layout.number(8),
    )


def _attributes(message: Message, opcode: str, computations: dict[int, str]) -> str:
    """Return the attributes that follow an instruction's parentheses, as far as they are used."""
    called = [computations.get(number, "") for number in message.numbers(38)]
    written: list[str] = []
    if opcode == "conditional":
        written.append(f"branch_computations={{{', '.join(f'%{name}' for name in called)}}}")
    else:
        roles = _ROLES.get(opcode, ("to_apply",) if opcode in _TO_APPLY else ("calls",))
        # A reduction of several arrays still applies one computation.
        written += [f"{role}=%{name}" for role, name in zip(roles, called, strict=False)]
    if opcode == "dot":
        dimensions = message.message(30)
        written.append(f"lhs_contracting_dims={{{_listed(dimensions.numbers(1))}}}")
    if opcode == "convolution":
        written += [_window(message.message(15)), _labels(message)]
    if target := message.text(28):
        written.append(f'custom_call_target="{target}"')
    if message.number(47):
        written.append("is_host_transfer=true")
    if groups := message.messages(49):
        inside = ",".join(f"{{{_listed(group.numbers(1))}}}" for group in groups)
        written.append(f"replica_groups={{{inside}}}")
    about = message.message(7)
    written.append(f"metadata={{{_metadata(about)}}}")
    if notes := message.text(43):
        written.append(f"backend_config={notes}")
    return ", " + ", ".join(written)


def _metadata(message: Message) -> str:
    words: list[str] = []
    if name := message.text(2):
        words.append('op_name="' + name.replace("\\", "\\\\").replace('"', '\\"') + '"')
    if file := message.text(3):
        words.append(f'source_file="{file}" source_line={message.number(4)}')
    if frame := message.number(15):
        words.append(f"stack_frame_id={frame}")
    return " ".join(words)


def _window(message: Message) -> str:
    dimensions = message.messages(1)
    settings = {
        "size": [str(dimension.number(1)) for dimension in dimensions],
        "stride": [str(dimension.number(2, 1)) for dimension in dimensions],
        "pad": [
            f"{_signed(dimension.number(3))}_{_signed(dimension.number(4))}"
            for dimension in dimensions
        ],
        "lhs_dilate": [str(dimension.number(6, 1)) for dimension in dimensions],
        "rhs_dilate": [str(dimension.number(5, 1)) for dimension in dimensions],
    }
    inside = " ".join(f"{name}={'x'.join(values)}" for name, values in settings.items() if values)
    return f"window={{{inside}}}"


def _labels(message: Message) -> str:
    """Return the dimension labels of a convolution as the compiler prints them: bf01_oi01->bf01."""
    about = message.message(16)
    sides = (
        ({"b": about.number(7), "f": about.number(8)}, about.numbers(11)),
        ({"i": about.number(3), "o": about.number(4)}, about.numbers(6)),
        ({"b": about.number(9), "f": about.number(10)}, about.numbers(12)),
    )
    words: list[str] = []
    for named, spatial in sides:
        places = {**{at: label for label, at in named.items()}}
        places.update({at: str(number) for number, at in enumerate(spatial)})
        words.append("".join(places[at] for at in sorted(places)))
    return f"dim_labels={words[0]}_{words[1]}->{words[2]}"


def _sources(index: Message) -> SourceTable:
    files = index.texts(1)
    locations = [(message.number(1), message.number(3)) for message in index.messages(3)]
    frames: dict[int, tuple[str, int, int]] = {}
    for number, frame in enumerate(index.messages(4), start=1):
        at = frame.number(1) - 1
        file, line = locations[at] if 0 <= at < len(locations) else (0, 0)
        name = files[file - 1] if 0 < file <= len(files) else "?"
        frames[number] = (name, line, frame.number(2))
    return SourceTable(frames)


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
