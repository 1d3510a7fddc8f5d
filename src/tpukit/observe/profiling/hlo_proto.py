"""The programs in an xplane file, read into the objects that HLO text is parsed into.

An xplane file is a protocol buffer (tsl/profiler/protobuf/xplane.proto). jax's `ProfileData` reads
its planes, lines and events, but not the programs, which are in the metadata of a plane without
events. XProf shows them, is an optional dependency and publishes no classes of these messages.
jaxlib could print a program (xla/service/hlo.proto), but aborts the process on some damaged ones,
and a profile may come from anywhere. So protobuf reads both, and only the fields that are used.

What the readers of `compiler.hlo` look up in an instruction's text (called computations, contracted
dimensions, windows, metadata) is written as the compiler would print it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from ...compiler.hlo import Computation, HloModule, Instruction, Shape
from ...compiler.memory.sources import SourceTable
from ...errors import TPUValidationError
from ...runtime.protobuf_messages import message_classes

METADATA_PLANE = b"/host:metadata"
Message: TypeAlias = Any
"""A message of one of the schemas below; its attributes are the fields."""
# Bytes stand for strings that may be no Unicode, and for messages that are not always needed.
_PROFILE = message_classes(
    "tensorflow.profiler",
    """
    message XSpace { repeated XPlane planes = 1; }
    message XPlane { bytes name = 2; repeated Entry event_metadata = 4; }
    message Entry { XEventMetadata value = 2; }
    message XEventMetadata { bytes name = 2; repeated XStat stats = 5; }
    message XStat { bytes bytes_value = 6; }
    message HloProto { bytes hlo_module = 1; }
    """,
)
_PROGRAM = message_classes(
    "xla",
    """
    message HloModuleProto {
      string name = 1; string entry_computation_name = 2; int64 entry_computation_id = 6;
      repeated HloComputationProto computations = 3; StackFrameIndexProto stack_frame_index = 17;
    }
    message HloComputationProto {
      string name = 1; repeated HloInstructionProto instructions = 2; int64 id = 5;
      int64 root_id = 6;
    }
    message HloInstructionProto {
      string name = 1; string opcode = 2; ShapeProto shape = 3; OpMetadata metadata = 7;
      int64 parameter_number = 9; Window window = 15;
      ConvolutionDimensionNumbers convolution_dimension_numbers = 16;
      string custom_call_target = 28; DotDimensionNumbers dot_dimension_numbers = 30;
      int64 id = 35; repeated int64 operand_ids = 36; repeated int64 called_computation_ids = 38;
      bytes backend_config = 43; bool is_host_transfer = 47;
      repeated ReplicaGroup replica_groups = 49;
    }
    message ShapeProto {
      int32 element_type = 2; repeated int64 dimensions = 3; repeated ShapeProto tuple_shapes = 4;
      LayoutProto layout = 5;
    }
    message LayoutProto {
      repeated int64 minor_to_major = 1; repeated TileProto tiles = 6; int64 memory_space = 8;
    }
    message TileProto { repeated int64 dimensions = 1; }
    message OpMetadata {
      string op_name = 2; string source_file = 3; int32 source_line = 4; int32 stack_frame_id = 15;
    }
    message DotDimensionNumbers { repeated int64 lhs_contracting_dimensions = 1; }
    message ReplicaGroup { repeated int64 replica_ids = 1; }
    message Window { repeated WindowDimension dimensions = 1; }
    message WindowDimension {
      int64 size = 1; int64 stride = 2; int64 padding_low = 3; int64 padding_high = 4;
      int64 window_dilation = 5; int64 base_dilation = 6;
    }
    message ConvolutionDimensionNumbers {
      int64 input_batch_dimension = 7; int64 input_feature_dimension = 8;
      repeated int64 input_spatial_dimensions = 11;
      int64 kernel_input_feature_dimension = 3; int64 kernel_output_feature_dimension = 4;
      repeated int64 kernel_spatial_dimensions = 6;
      int64 output_batch_dimension = 9; int64 output_feature_dimension = 10;
      repeated int64 output_spatial_dimensions = 12;
    }
    message StackFrameIndexProto {
      repeated string file_names = 1; repeated FileLocation file_locations = 3;
      repeated StackFrame stack_frames = 4;
    }
    message FileLocation { int32 file_name_id = 1; int32 line = 3; }
    message StackFrame { int32 file_location_id = 1; int32 parent_frame_id = 2; }
    """,
)


def programs_in(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name (`jit_step(7)`: module and number) and HloModuleProto of every program.

    Raises:
        TPUValidationError: The bytes are cut short or no protocol buffer.
    """
    for plane in _parse(_PROFILE["XSpace"], content).planes:
        if plane.name != METADATA_PLANE:
            continue
        for entry in plane.event_metadata:
            for stat in entry.value.stats:
                module = _parse(_PROFILE["HloProto"], stat.bytes_value).hlo_module
                if module:
                    yield entry.value.name.decode(errors="replace"), module


def _parse(kind: type[Message], content: bytes) -> Message:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise TPUValidationError(f"it is cut short or damaged: {error}.") from None


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


def read_program(content: bytes) -> tuple[HloModule, SourceTable]:
    """Read an HloModuleProto and the source lines it was made from.

    Raises:
        TPUValidationError: The bytes are damaged, or have no entry computation.
    """
    module = _parse(_PROGRAM["HloModuleProto"], content)
    names = {computation.id: computation.name for computation in module.computations}
    computations = {
        computation.name: _computation(computation, names) for computation in module.computations
    }
    entry = names.get(module.entry_computation_id, module.entry_computation_name)
    if entry not in computations:
        raise TPUValidationError("it is damaged: its program has no entry computation.")
    return HloModule(module.name, computations, entry), _sources(module.stack_frame_index)


def _computation(message: Message, computations: dict[int, str]) -> Computation:
    names = {instruction.id: instruction.name for instruction in message.instructions}
    root = message.root_id
    return Computation(
        message.name,
        tuple(
            _instruction(instruction, names, computations, is_root=instruction.id == root)
            for instruction in message.instructions
        ),
    )


def _instruction(
    message: Message, names: dict[int, str], computations: dict[int, str], *, is_root: bool
) -> Instruction:
    operands = [names[number] for number in message.operand_ids if number in names]
    is_parameter = message.opcode == "parameter"
    return Instruction(
        name=message.name,
        opcode=message.opcode,
        shapes=tuple(_shapes(message.shape)),
        operands=tuple(operands),
        arguments=str(message.parameter_number) if is_parameter else ", ".join(operands),
        attributes=_attributes(message, computations),
        is_root=is_root,
    )


def _shapes(message: Message) -> Iterable[Shape]:
    if message.element_type == TUPLE:
        for inner in message.tuple_shapes:
            yield from _shapes(inner)
        return
    dtype = FORMATS.get(message.element_type)
    if dtype is None or dtype in SHAPELESS:
        return
    layout = message.layout
    yield Shape(
        dtype=dtype,
        dims=tuple(message.dimensions),
        layout=tuple(layout.minor_to_major),
        tiles=tuple(tuple(tile.dimensions) for tile in layout.tiles),
        memory_space=layout.memory_space,
    )


def _attributes(message: Message, computations: dict[int, str]) -> str:
    """Return the attributes that follow an instruction's parentheses, as far as they are used."""
    opcode = message.opcode
    called = [computations.get(number, "") for number in message.called_computation_ids]
    written: list[str] = []
    if opcode == "conditional":
        written.append(f"branch_computations={{{', '.join(f'%{name}' for name in called)}}}")
    else:
        roles = _ROLES.get(opcode, ("to_apply",) if opcode in _TO_APPLY else ("calls",))
        # A reduction of several arrays still applies one computation.
        written += [f"{role}=%{name}" for role, name in zip(roles, called, strict=False)]
    if opcode == "dot":
        contracted = message.dot_dimension_numbers.lhs_contracting_dimensions
        written.append(f"lhs_contracting_dims={{{_listed(contracted)}}}")
    if opcode == "convolution":
        written += [_window(message.window), _labels(message.convolution_dimension_numbers)]
    if message.custom_call_target:
        written.append(f'custom_call_target="{message.custom_call_target}"')
    if message.is_host_transfer:
        written.append("is_host_transfer=true")
    if message.replica_groups:
        groups = ",".join(f"{{{_listed(group.replica_ids)}}}" for group in message.replica_groups)
        written.append(f"replica_groups={{{groups}}}")
    written.append(f"metadata={{{_metadata(message.metadata)}}}")
    if message.backend_config:
        written.append(f"backend_config={message.backend_config.decode(errors='replace')}")
    return ", " + ", ".join(written)


def _metadata(message: Message) -> str:
    words: list[str] = []
    if message.op_name:
        name = message.op_name.replace("\\", "\\\\").replace('"', '\\"')
        words.append(f'op_name="{name}"')
    if message.source_file:
        words.append(f'source_file="{message.source_file}" source_line={message.source_line}')
    if message.stack_frame_id:
        words.append(f"stack_frame_id={message.stack_frame_id}")
    return " ".join(words)


def _window(message: Message) -> str:
    dimensions = message.dimensions
    settings = {
        "size": [str(dimension.size) for dimension in dimensions],
        "stride": [str(dimension.stride or 1) for dimension in dimensions],
        "pad": [f"{dimension.padding_low}_{dimension.padding_high}" for dimension in dimensions],
        "lhs_dilate": [str(dimension.base_dilation or 1) for dimension in dimensions],
        "rhs_dilate": [str(dimension.window_dilation or 1) for dimension in dimensions],
    }
    inside = " ".join(f"{name}={'x'.join(values)}" for name, values in settings.items() if values)
    return f"window={{{inside}}}"


def _labels(numbers: Message) -> str:
    """Return the dimension labels of a convolution as the compiler prints them: bf01_oi01->bf01."""
    sides = (
        (
            {"b": numbers.input_batch_dimension, "f": numbers.input_feature_dimension},
            numbers.input_spatial_dimensions,
        ),
        (
            {
                "i": numbers.kernel_input_feature_dimension,
                "o": numbers.kernel_output_feature_dimension,
            },
            numbers.kernel_spatial_dimensions,
        ),
        (
            {"b": numbers.output_batch_dimension, "f": numbers.output_feature_dimension},
            numbers.output_spatial_dimensions,
        ),
    )
    words: list[str] = []
    for named, spatial in sides:
        places = {at: label for label, at in named.items()}
        places.update({at: str(number) for number, at in enumerate(spatial)})
        words.append("".join(places[at] for at in sorted(places)))
    return f"dim_labels={words[0]}_{words[1]}->{words[2]}"


def _sources(index: Message) -> SourceTable:
    files = index.file_names
    locations = [(location.file_name_id, location.line) for location in index.file_locations]
    frames: dict[int, tuple[str, int, int]] = {}
    for number, frame in enumerate(index.stack_frames, start=1):
        at = frame.file_location_id - 1
        file, line = locations[at] if 0 <= at < len(locations) else (0, 0)
        name = files[file - 1] if 0 < file <= len(files) else "?"
        frames[number] = (name, line, frame.parent_frame_id)
    return SourceTable(frames)


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
