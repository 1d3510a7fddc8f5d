"""v2 and v2alpha1 of the API: one store of v2 messages, shown in the words of either.

The versions number their fields differently and call several slices by other names, so messages
are translated by the names of their fields.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from google.cloud import tpu_v2, tpu_v2alpha1
from google.protobuf import json_format

_RENAMED = {"multislice_params": "multi_node_params"}  # v2: v2alpha1


@dataclass(frozen=True)
class Version:
    """A version of the API."""

    name: str
    module: ModuleType

    def message(self, name: str) -> Any:
        """Return the protobuf class of a message."""
        return getattr(self.module, name).pb()

    def show(self, message: Any) -> Any:
        """Return a v2 message as this version's message of the same name."""
        if self.name == "v2" or not message.DESCRIPTOR.full_name.startswith("google.cloud.tpu."):
            return message
        return _translate(message, self.message(message.DESCRIPTOR.name), _RENAMED)

    def read(self, message: Any) -> Any:
        """Return a message of this version as v2's; one that v2 does not have stays as it is."""
        kind = getattr(tpu_v2, message.DESCRIPTOR.name, None)
        if self.name == "v2" or kind is None:
            return message
        return _translate(message, kind.pb(), {new: old for old, new in _RENAMED.items()})


V2 = Version("v2", tpu_v2)
V2ALPHA1 = Version("v2alpha1", tpu_v2alpha1)
VERSIONS = (V2, V2ALPHA1)


def _translate(message: Any, target: Any, renamed: dict[str, str]) -> Any:
    plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json_format.ParseDict(_rename(plain, renamed), target(), ignore_unknown_fields=True)


def _rename(value: Any, renamed: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {renamed.get(key, key): _rename(inner, renamed) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rename(inner, renamed) for inner in value]
    return value
