"""xplane files made by hand, as TPUs and GPUs write them, small enough to reckon by hand."""

from dataclasses import dataclass, field
from itertools import count

from jax.profiler import ProfileData


@dataclass
class Event:
    """From `start` for `duration`, in microseconds."""

    name: str
    start: float
    duration: float
    stats: dict = field(default_factory=dict)


@dataclass
class Plane:
    """Lines by name, what the plane says of itself, and programs (HloModuleProto) by name."""

    name: str
    lines: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)
    programs: dict = field(default_factory=dict)


def xspace(*planes):
    """The bytes of a file."""
    return ProfileData.text_proto_to_serialized_xspace("\n".join(map(_plane, planes)))


def _plane(plane):
    numbers, names, events = count(1), {}, {}

    def stat(key, value):
        number = names.setdefault(key, next(numbers))
        if isinstance(value, bytes):
            written = "bytes_value: " + _quoted(value)
        elif isinstance(value, str):
            written = "str_value: " + _quoted(value.encode())
        elif isinstance(value, float):
            written = f"double_value: {value}"
        else:
            written = f"int64_value: {value}"
        return f"stats {{ metadata_id: {number} {written} }}"

    lines = []
    for number, (name, found) in enumerate(plane.lines.items(), start=1):
        inside = []
        for event in found:
            known = events.setdefault(event.name, len(events) + 1)
            stats = " ".join(stat(key, value) for key, value in event.stats.items())
            inside.append(
                f"events {{ metadata_id: {known} offset_ps: {round(event.start * 1e6)} "
                f"duration_ps: {round(event.duration * 1e6)} {stats} }}"
            )
        lines.append(f"lines {{ id: {number} name: {_quoted(name.encode())} {' '.join(inside)} }}")
    metadata = [_described("event_metadata", number, name) for name, number in events.items()]
    for number, (name, module) in enumerate(plane.programs.items(), start=1000):
        # HloProto: the module is its first field.
        wrapped = b"\x0a" + _varint(len(module)) + module
        metadata.append(
            f"event_metadata {{ key: {number} value {{ id: {number} name: "
            f"{_quoted(name.encode())} {stat('Hlo Proto', wrapped)} }} }}"
        )
    own = [stat(key, value) for key, value in plane.stats.items()]
    described = [_described("stat_metadata", number, name) for name, number in names.items()]
    inside = "\n".join([*lines, *metadata, *described, *own])
    return f"planes {{ name: {_quoted(plane.name.encode())}\n{inside} }}"


def _described(what, number, name):
    inside = f"id: {number} name: {_quoted(name.encode())}"
    return f"{what} {{ key: {number} value {{ {inside} }} }}"


def _quoted(content):
    return '"' + "".join(f"\\{byte:03o}" for byte in content) + '"'


def _varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
