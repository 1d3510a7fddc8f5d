"""Which TPU VM image a slice gets: the one that Google recommends for jax, or the one asked for."""

import re

from ....errors import ConfigError
from ....hardware import Slice

SOURCE = "https://cloud.google.com/tpu/docs/runtimes (read 2026-11-16)"
# What that page says for PyTorch and JAX; v4 and older share one.
DEFAULTS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_TENSORFLOW = re.compile(r"\d+\.\d+(\.\d+)?")


def runtime_version(where: Slice, software_version: str | None) -> str:
    """Return the API's name of the image for a slice.

    Args:
        where: The slice.
        software_version: Such a name; or a bare number such as "2.8.0", which means the image of
            that TensorFlow, as it did before images had names (`tpu-vm-tf-2.8.0`, with `-pod` for
            slices of several hosts).
    """
    if software_version is None:
        if where.chip.name not in DEFAULTS:
            raise ConfigError(f"{where}: the Cloud TPU API has no image for {where.chip.title}.")
        return DEFAULTS[where.chip.name]
    if _TENSORFLOW.fullmatch(software_version):
        several = "-pod" if where.hosts > 1 else ""
        return f"tpu-vm-tf-{software_version}{several}"
    return software_version
