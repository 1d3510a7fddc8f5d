"""The child process that loads jaxlib or libtpu to answer one question about flags.

`run_child` starts it. A parser that refuses a flag or a value ends the process; the parent then
reads the child's output.
"""

import glob
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import DecodeError

from ...exit_codes import ExitCode
from ...hardware import Slice
from ...hardware.catalog import SLICE_FOR_LIBTPU
from ...plain_data import JsonMapping, JsonObject
from ..child import serve_request
from ..protobuf_messages import message_classes

MESSAGE_OF_FILE_TAG = 0x22  # field 4 of FileDescriptorProto, length-delimited
LONGEST_LENGTH_BYTES = 5


class SearchableBytes(Protocol):
    """A memory map or plain bytes."""

    def find(self, sub: bytes, start: int = ..., /) -> int:
        """Return the first position of `sub` at or after `start`, or -1."""
        ...

    def __getitem__(self, index: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class MessageField:
    """One field of a message: its number and its protobuf type number."""

    name: str
    number: int
    type: int
    repeated: bool
    enum_names: tuple[tuple[int, str], ...]  # of an enum nested in the same message


def find_message(library: SearchableBytes, name: str) -> dict[str, MessageField] | None:
    """Return the fields of top-level message `name`, or None if the library has no schema of it."""
    needle = b"\n" + bytes([len(name)]) + name.encode()
    at = library.find(needle)
    while at >= 0:
        size = _length_before(library, at)
        if size is not None:
            try:
                return _message_fields(DescriptorProto.FromString(library[at : at + size]))
            except DecodeError:
                pass  # the same bytes by chance; search further
        at = library.find(needle, at + 1)
    return None


def _length_before(library: SearchableBytes, at: int) -> int | None:
    """Return the length prefix that ends at `at`, if a message of a file starts there."""
    before = library[max(0, at - LONGEST_LENGTH_BYTES - 1) : at]
    for start in range(len(before) - 2, -1, -1):
        length = before[start + 1 :]
        # Every byte of a length but the last has the highest bit set.
        if before[start] == MESSAGE_OF_FILE_TAG and _is_varint(length):
            return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(length))
    return None


def _is_varint(data: bytes) -> bool:
    return data[-1] < 0x80 and all(byte >= 0x80 for byte in data[:-1])


def _message_fields(message: DescriptorProto) -> dict[str, MessageField]:
    enums = {
        enum.name: tuple((value.number, value.name) for value in enum.value)
        for enum in message.enum_type
    }
    return {
        field.name: MessageField(
            name=field.name,
            number=field.number,
            type=field.type,
            repeated=field.label == FieldDescriptorProto.LABEL_REPEATED,
            enum_names=enums.get(field.type_name.rpartition(".")[2], ()),
        )
        for field in message.field
    }


_LIBTPU_FLAG_SYMBOL = re.compile(rb"\0FLAGS_([A-Za-z0-9]\w*)(?=\0)", re.ASCII)
_XLA_NAME = re.compile(rb"xla_(?!2f)[a-z0-9_]{2,}[a-z0-9]")  # "2f" is a mangled file name
# Types of flags, in words of a .proto file.
KIND_OF_TYPE: dict[int, str] = {
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "bytes",  # a default may be no Unicode
    FieldDescriptorProto.TYPE_ENUM: "int32",
    FieldDescriptorProto.TYPE_INT32: "int32",
    FieldDescriptorProto.TYPE_INT64: "int64",
    FieldDescriptorProto.TYPE_UINT32: "uint32",
    FieldDescriptorProto.TYPE_UINT64: "uint64",
}


def answer(request: JsonMapping) -> JsonObject:
    """Answer the question named in `request`."""
    match request["question"]:
        case "try on jaxlib":
            return {"logs": [_try_on_jaxlib(text) for text in request["texts"]]}
        case "first taken by jaxlib":
            return {
                "taken": [
                    next((text for text in texts if not _try_on_jaxlib(text)), None)
                    for texts in request["alternatives"]
                ]
            }
        case "start libtpu":
            _topology(Slice.parse(SLICE_FOR_LIBTPU).libtpu_topology, {})
            return {}
        case "jaxlib":
            return _describe_jaxlib()
        case "libtpu":
            return _describe_libtpu(request["folder"])
        case "compile":
            return _compile(request)
        case question:
            raise ValueError(f"no such question: {question!r}")


def _try_on_jaxlib(text: str) -> str:
    """Return jaxlib's complaint about an XLA_FLAGS text, from a fork that the complaint ends."""
    from jaxlib import xla_client

    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writer, 2)
        os.environ["XLA_FLAGS"] = text
        xla_client.CompileOptions()  # the first of these reads the variable
        os._exit(ExitCode.DONE)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as stream:
        log = stream.read()
    os.waitpid(process, 0)
    return log


def _describe_jaxlib() -> JsonObject:
    """Return candidate names, and the defaults of those that are fields of DebugOptions."""
    import jaxlib
    from jaxlib import xla_client

    library = _map(Path(jaxlib.__path__[0]) / "libjax_common.so")
    names = {found.group().decode() for found in _XLA_NAME.finditer(library)}
    fields = find_message(library, "DebugOptions") or {}
    outer = find_message(library, "CompileOptionsProto") or {}
    inner = find_message(library, "ExecutableBuildOptionsProto") or {}
    single = {name: field for name, field in fields.items() if not field.repeated}
    defaults: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    if "executable_build_options" in outer and "debug_options" in inner:
        kinds = {name: KIND_OF_TYPE.get(field.type) for name, field in single.items()}
        flags = {
            name: f"{kind} {name} = {single[name].number};"
            for name, kind in kinds.items()
            if kind is not None
        }
        messages = message_classes(
            "xla",
            f"message Options {{ Build build = {outer['executable_build_options'].number}; }}"
            f"message Build {{ Debug debug = {inner['debug_options'].number}; }}"
            f"message Debug {{ {' '.join(flags.values())} }}",
        )
        options = messages["Options"].FromString(xla_client.CompileOptions().SerializeAsString())
        values = {name: getattr(options.build.debug, name) for name in flags}
        written = {name: _default(single[name], value) for name, value in values.items()}
        defaults = {name: text for name, text in written.items() if text is not None}
        choices = {name: [label for _, label in field.enum_names] for name, field in single.items()}
    return {
        "names": sorted(names | set(fields)),
        "fields": sorted(fields),
        "defaults": defaults,
        "choices": {name: labels for name, labels in choices.items() if labels},
    }


def _default(field: MessageField, value: bool | int | bytes) -> str | None:
    """Return a field's value as a flag's text; None for a number that no enum name stands for."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, bool):
        return "true" if value else "false"
    if field.type == FieldDescriptorProto.TYPE_ENUM:
        return dict(field.enum_names).get(value)
    return str(value)


def _describe_libtpu(folder: str) -> JsonObject:
    """Return every flag name, the defaults, and the flags that one compile may set."""
    import libtpu  # pyright: ignore[reportMissingImports] - an optional extra

    library = _map(Path(libtpu.__path__[0]) / "libtpu.so")
    names = {found.group(1).decode() for found in _LIBTPU_FLAG_SYMBOL.finditer(library)}
    options = set(find_message(library, "TpuCompilationEnvironment") or {})
    lowered = _lower(_topology(Slice.parse(SLICE_FOR_LIBTPU).libtpu_topology, {}), rows=8)
    lowered.compile(compiler_options={"xla_dump_to": folder})
    defaults: dict[str, str] = {}
    for path in glob.glob(f"{folder}/*.tpu_comp_env.txt"):
        for line in Path(path).read_text().splitlines():
            if found := re.fullmatch(r"(\w+): (.*)", line):
                defaults[found[1]] = found[2].strip('"')
                options.add(found[1])
    lazy: set[str] = set()
    for path in glob.glob(f"{folder}/*.flagfile"):  # last: it writes values as the parser does
        for line in Path(path).read_text().splitlines():
            if found := re.fullmatch(r"--(\w+)=(.*)", line):
                defaults[found[1]] = found[2].strip("'")
                if found[2].startswith("'"):
                    lazy.add(found[1])
    # A quoted default marks a flag whose text is only read during a compile: ask one.
    complaints = {name: _refusal(lowered, {name: "@@"}) for name in sorted(lazy & options)}
    return {
        "names": sorted(names | set(defaults)),
        "defaults": defaults,
        "options": sorted(options),
        "option_complaints": {name: text for name, text in complaints.items() if text},
    }


def _compile(request: JsonMapping) -> JsonObject:
    """Compile a small sharded matmul for each topology; return the compiler's refusals."""
    refused: dict[str, str] = {}
    for trial in request["trials"]:
        topology = _topology(trial["topology"], trial["topology_options"])
        complaint = _refusal(_lower(topology, rows=256), trial["compiler_options"])
        if complaint is not None:
            refused[trial["label"]] = complaint
    return {"refused": refused}


def _refusal(lowered: Any, options: JsonMapping) -> str | None:
    import jax

    try:
        lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def _lower(topology: Any, *, rows: int) -> Any:
    """Lower a matmul with weights gathered in a loop and a result summed over devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(topology.devices, ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec("x"))
    by_width = NamedSharding(mesh, PartitionSpec(None, "x"))

    def loss(weights: jax.Array, inputs: jax.Array) -> jax.Array:
        def layer(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            gathered = jax.lax.with_sharding_constraint(weight, whole)
            return jnp.tanh(hidden @ gathered), None

        return jnp.sum(jax.lax.scan(layer, inputs, weights)[0].astype(jnp.float32))

    weights = jax.ShapeDtypeStruct((2, 256, 256), jnp.bfloat16)
    inputs = jax.ShapeDtypeStruct((rows * len(topology.devices), 256), jnp.bfloat16)
    step = jax.jit(
        jax.value_and_grad(loss), in_shardings=(by_width, by_row), out_shardings=(whole, by_width)
    )
    return step.trace(weights, inputs).lower(lowering_platforms=("tpu",))


def _topology(name: str, options: JsonMapping) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology_name=name, platform="tpu", **options)


def _map(path: Path) -> mmap.mmap:
    handle = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)


if __name__ == "__main__":
    serve_request(answer)
