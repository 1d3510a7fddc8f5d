"""The schema reader finds what protobuf itself wrote."""

import pytest

from tpukit.runtime.flags.probe import find_message

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")


def library_with(message, *, padding=b"\0noise\0"):
    file = descriptor_pb2.FileDescriptorProto(name="x/y.proto", package="x")
    file.message_type.add(name="Other").field.add(name="a", number=1, type=5)
    file.message_type.append(message)
    return padding + file.SerializeToString() + padding


def example_message():
    message = descriptor_pb2.DescriptorProto(name="Options")
    mode = message.enum_type.add(name="Mode")
    mode.value.add(name="OFF", number=0)
    mode.value.add(name="ON", number=3)
    message.field.add(name="xla_flag", number=1, type=8, label=1)
    message.field.add(name="xla_mode", number=400, type=14, label=1, type_name=".x.Options.Mode")
    message.field.add(name="xla_list", number=7, type=9, label=3)
    return message


def test_finds_a_message_inside_a_library():
    # The name alone appears first, as it does among the strings of a real library.
    fields = find_message(b"\n\x07Options\0" + library_with(example_message()), "Options")
    assert fields is not None
    assert {name: field.number for name, field in fields.items()} == {
        "xla_flag": 1,
        "xla_mode": 400,
        "xla_list": 7,
    }
    assert fields["xla_mode"].enum_names == ((0, "OFF"), (3, "ON"))
    assert fields["xla_list"].repeated
    assert not fields["xla_flag"].repeated


def test_a_missing_message_is_none():
    assert find_message(library_with(example_message()), "Absent") is None
