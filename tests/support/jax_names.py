"""What tests need of jax that has another name, or other parameters, from one version to the next.

Each is found by what is there, newest first; nothing here asks for a version.
"""

from importlib import import_module

import jax


def tpu_info():
    """Return jax's own table of what each generation of chips can do; it moved in 0.12."""
    try:
        return import_module("jax._src.tpu_info")
    except ModuleNotFoundError:
        return import_module("jax._src.pallas.mosaic.tpu_info")


def on_host(function):
    """Return a function that a host computes, its result again on the chip.

    Until 0.10 `compute_on` is a context; later it takes the function and where its results go.
    """
    module = import_module("jax.experimental.compute_on")
    if hasattr(module, "compute_on2"):
        return module.compute_on("device_host")(jax.jit(function))
    place = jax.memory.Space.Device
    return module.compute_on(jax.jit(function), compute_type="device_host", out_memory_spaces=place)
