"""Programs as a profile stores them (xla/service/hlo.proto), as the objects that HLO text becomes.

jaxlib could print them, but aborts the process on some damaged ones, and a profile comes from
anywhere. What the readers of `compiler.hlo` look up in an instruction's text (called computations,
contracted dimensions, windows, metadata) is written as the compiler would print it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...compiler.hlo import Computation, HloModule, Instruction, Shape
from ...compiler.memory.sources import SourceTable
from ...errors import TPUValidationError
from .wire import fields, packed_numbers

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
    """One protocol buffer message, its fields by number."""

    content: bytes

    @cached_property
    def _fields(self) -> dict[int, list[int | bytes]]:
        found: dict[int, list[int | bytes]] = {}
        for number, value in fields(self.content):
            found.setdefault(number, []).append(value)
        return found

    def number(self, field: int, default: int = 0) -> int:
        """A number, the last one where there are several."""
        value = self._fields.get(field, [default])[-1]
        return value if isinstance(value, int) else default

    def numbers(self, field: int) -> tuple[int, ...]:
        """Repeated numbers, packed or not."""
        found: list[int] = []
        for value in self._fields.get(field, ()):
            found += [value] if isinstance(value, int) else packed_numbers(value)
        return tuple(found)

    def text(self, field: int) -> str:
        """A string; what is no Unicode becomes a replacement character."""
        value = self._fields.get(field, [b""])[-1]
        return value.decode(errors="replace") if isinstance(value, bytes) else ""

    def texts(self, field: int) -> list[str]:
        """Repeated strings."""
        values = self._fields.get(field, ())
        return [value.decode(errors="replace") for value in values if isinstance(value, bytes)]

    def message(self, field: int) -> "Message":
        """A message inside; an empty one where it is missing."""
        value = self._fields.get(field, [b""])[-1]
        return Message(value if isinstance(value, bytes) else b"")

    def messages(self, field: int) -> "list[Message]":
        """Repeated messages."""
        values = self._fields.get(field, ())
        return [Message(value) for value in values if isinstance(value, bytes)]


def read_program(content: bytes) -> tuple[HloModule, SourceTable]:
    """Read an HloModuleProto and the source lines it was made from.

    Raises:
        TPUValidationError: The bytes are damaged, or hold no entry computation.
    """
    module = Message(content)
    messages = module.messages(3)
    names = {one.number(5): one.text(1) for one in messages}
    computations = {one.text(1): _computation(one, names) for one in messages}
    entry = names.get(module.number(6), module.text(2))
    if entry not in computations:
        raise TPUValidationError("it is damaged: its program has no entry computation.")
    program = HloModule(module.text(1), computations, entry)
    return program, _sources(module.message(17))


def _computation(message: Message, computations: dict[int, str]) -> Computation:
    instructions = message.messages(2)
    names = {one.number(35): one.text(1) for one in instructions}
    root = message.number(6)
    return Computation(
        message.text(1),
        tuple(
            _instruction(one, names, computations, is_root=one.number(35) == root)
            for one in instructions
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
    """What stands behind the parentheses of an instruction, as far as anyone here reads it."""
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
        "size": [str(one.number(1)) for one in dimensions],
        "stride": [str(one.number(2, 1)) for one in dimensions],
        "pad": [f"{_signed(one.number(3))}_{_signed(one.number(4))}" for one in dimensions],
        "lhs_dilate": [str(one.number(6, 1)) for one in dimensions],
        "rhs_dilate": [str(one.number(5, 1)) for one in dimensions],
    }
    inside = " ".join(f"{name}={'x'.join(values)}" for name, values in settings.items() if values)
    return f"window={{{inside}}}"


def _labels(message: Message) -> str:
    """The roles of dimensions as the compiler prints them: bf01_oi01->bf01."""
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
    locations = [(one.number(1), one.number(3)) for one in index.messages(3)]
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
