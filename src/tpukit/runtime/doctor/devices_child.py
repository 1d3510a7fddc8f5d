"""The child that opens this machine's devices with jax, so that a hang or an abort stays there."""

import time
from typing import Any

from ..child import serve_request


def open_devices(_: dict[str, Any]) -> dict[str, Any]:
    """Open the devices and say what they are."""
    import jax

    started = time.monotonic()
    devices = jax.devices()
    return {
        "jax": jax.__version__,
        "platform": "gpu"
        if devices[0].platform in ("gpu", "cuda", "rocm")
        else devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "open_s": time.monotonic() - started,
    }


if __name__ == "__main__":
    serve_request(open_devices)
