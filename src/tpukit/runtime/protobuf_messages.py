"""Protobuf message classes made from an excerpt of a published schema, without generated modules.

Generated code registers itself in protobuf's process-wide pool, where a second copy of a schema
(tpu-info's, TensorFlow's or another tool's) aborts the process. Classes made here have a pool of
their own. An excerpt lists only the fields that are used; protobuf skips the others.
"""

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_MESSAGE = re.compile(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}")
_FIELD = re.compile(r"oneof (\w+) \{|(repeated )?(\w+) (\w+) = (\d+);|(\})")


def message_classes(package: str, schema: str, *, syntax: str = "proto3") -> Mapping[str, Any]:
    r"""Return the class of each message of a schema, whose attributes are the message's fields.

    Args:
        package: The package of the schema.
        schema: Messages as a .proto file declares them, not nested in each other. A type with a
            capital letter is another message; an enum is an int32.
        syntax: With proto2, a field that is set to zero is written too.

    Example:
        >>> classes = message_classes("demo", "message Point { int32 x = 1; int32 y = 2; }")
        >>> classes["Point"](x=3).SerializeToString()
        b'\x08\x03'
    """
    file = FileDescriptorProto(name=f"tpukit/{package}", package=package, syntax=syntax)
    for name, body in _MESSAGE.findall(schema):
        _add_fields(file.message_type.add(name=name), body, package)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{message.name}"))
        for message in file.message_type
    }


def _add_fields(message: DescriptorProto, body: str, package: str) -> None:
    in_choice = False
    for choice, repeated, kind, name, number, end in _FIELD.findall(body):
        if choice:
            message.oneof_decl.add(name=choice)
        if choice or end:
            in_choice = bool(choice)
            continue
        field = message.field.add(name=name, number=int(number))
        field.label = (
            FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        )
        if kind[0].isupper():
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{package}.{kind}"
        else:
            field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
        if in_choice:
            field.oneof_index = len(message.oneof_decl) - 1
