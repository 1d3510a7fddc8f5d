"""The devices of a slice as libtpu describes them, which a program on that slice would see.

libtpu runs in a child process. Its answer for a slice never changes, so it is cached with the
compiles.
"""

import hashlib
import json
from typing import Any

from ..compiler.cache import CompileCache
from ..compiler.program.request import compiler_versions
from ..compiler.worker import describe_topology
from ..hardware import Slice
from ..runtime.child import run_child, serve_request

_MODULE = __spec__.name if __spec__ is not None else __name__
_TIMEOUT_S = 300.0


def devices_of_slice(target: Slice) -> list[dict[str, Any]]:
    """Return kind, coordinates, core, slice and process of each device, in the order of their ids.

    Raises:
        ChildError: libtpu does not support the topology.
        MissingExtraError: libtpu is not installed.
    """
    request = {"topology": target.libtpu_topology, "topology_options": dict(target.libtpu_options)}
    identity = json.dumps([request, sorted(compiler_versions().items())], sort_keys=True)
    key = f"devices-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    cache = CompileCache.default()
    known = cache.load_json(key)
    if known is None:
        known = run_child(_MODULE, request, timeout_s=_TIMEOUT_S)
        cache.store_json(key, known)
    return known["devices"]


def _describe(request: dict[str, Any]) -> dict[str, Any]:
    topology = describe_topology(request)
    return {
        "devices": [
            {
                "kind": device.device_kind,
                "coords": list(device.coords),
                "core": getattr(device, "core_on_chip", 0) or 0,
                "slice": getattr(device, "slice_index", 0) or 0,
                "process": device.process_index,
            }
            for device in sorted(topology.devices, key=lambda device: device.id)
        ]
    }


if __name__ == "__main__":
    serve_request(_describe)
