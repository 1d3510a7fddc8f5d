"""Reads what kubectl sends as protobuf: `kubectl create secret`, `configmap` and `namespace`.

The field numbers are those of k8s.io/api/core/v1 and k8s.io/apimachinery (generated.proto).
"""

import base64
from collections.abc import Iterator
from typing import Any

from ..refusal import Refusal

_MAGIC = b"k8s\x00"


def read_object(body: bytes) -> dict[str, Any]:
    """Return an object from its protobuf form.

    Raises:
        Refusal: It is another kind of object, or cannot be read (415).
    """
    try:
        if not body.startswith(_MAGIC):
            raise ValueError("no Kubernetes protobuf")
        unknown = _fields(body[len(_MAGIC) :])
        about = _fields(unknown[1][0])
        kind, fields = about[2][0].decode(), _fields(unknown[2][0])
        read: dict[str, Any] = {"apiVersion": about[1][0].decode(), "kind": kind}
        read["metadata"] = _metadata(fields[1][0])
        if kind == "Secret":
            read["data"] = {
                key: base64.b64encode(value).decode() for key, value in _map(fields.get(2, []))
            }
            read["type"] = (fields.get(3) or [b"Opaque"])[0].decode()
        elif kind == "ConfigMap":
            read["data"] = {key: value.decode() for key, value in _map(fields.get(2, []))}
            read["binaryData"] = {
                key: base64.b64encode(value).decode() for key, value in _map(fields.get(3, []))
            }
        elif kind != "Namespace":
            raise ValueError(f"a {kind}")
    except (ValueError, KeyError, IndexError) as error:
        raise Refusal(415, f"the emulated API reads this only as JSON ({error})") from None
    return read


def _metadata(body: bytes) -> dict[str, Any]:
    fields = _fields(body)
    texts = {"name": 1, "generateName": 2, "namespace": 3}
    read: dict[str, Any] = {
        key: fields[number][0].decode() for key, number in texts.items() if fields.get(number)
    }
    for key, number in (("labels", 11), ("annotations", 12)):
        if number in fields:
            read[key] = {name: value.decode() for name, value in _map(fields[number])}
    return {key: value for key, value in read.items() if value}


def _map(entries: list[bytes]) -> Iterator[tuple[str, bytes]]:
    for entry in entries:
        fields = _fields(entry)
        yield fields[1][0].decode(), fields.get(2, [b""])[0]


def _fields(body: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a message that have a length, by number; other types are passed over."""
    found: dict[int, list[bytes]] = {}
    position = 0
    while position < len(body):
        tag, position = _number(body, position)
        number, type_ = tag >> 3, tag & 7
        if type_ == 0:
            _, position = _number(body, position)
        elif type_ == 2:
            length, position = _number(body, position)
            if position + length > len(body):
                raise ValueError("cut off")
            found.setdefault(number, []).append(body[position : position + length])
            position += length
        elif type_ in (1, 5):
            position += 8 if type_ == 1 else 4
        else:
            raise ValueError(f"wire type {type_}")
    return found


def _number(body: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError("a number without an end")
