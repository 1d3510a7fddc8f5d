"""Which machine type and image a slice is made of on Compute Engine."""

from ....errors import ConfigError
from ....hardware import Slice

SOURCE = "https://docs.cloud.google.com/tpu/docs/tpu-os-images (read 2026-11-16)"
_IMAGES = "projects/ubuntu-os-accelerator-images/global/images/family"
# By family, not by dated name: Google deprecates an image within weeks.
IMAGES = {
    "v5p": f"{_IMAGES}/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "v6e": f"{_IMAGES}/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "7x": f"{_IMAGES}/ubuntu-accel-2404-amd64-tpu-tpu7x",
}
# The newer machines take no Persistent Disk.
BOOT_DISKS = {"v5p": "pd-balanced", "v6e": "hyperdisk-balanced", "7x": "hyperdisk-balanced"}
BOOT_DISK_GB = 200
"""The default of 10 GB is less than the software of a training job."""
GENERATIONS = tuple(IMAGES)
TOO_OLD = (
    "Compute Engine makes slices of v5p, v6e and TPU7x; workload policies know no other TPUs "
    "(https://docs.cloud.google.com/compute/docs/instance-groups/about-workload-policies)"
)


def machine_type(where: Slice) -> str:
    """Return the machine type of a slice's hosts.

    Raises:
        ConfigError: Compute Engine has none with such a TPU.
    """
    if where.chip.name not in GENERATIONS:
        raise ConfigError(f"{where}: {TOO_OLD}. Use provider gcp or gke.")
    suffix = f"-{where.chips_per_host}t"
    return next(one for one in where.chip.gke_machine_types if one.endswith(suffix))


def source_image(where: Slice, software_version: str | None) -> str:
    """Return the image that hosts boot from.

    Args:
        where: The slice.
        software_version: An image (`projects/P/global/images/I`, or `…/images/family/F`) or the
            name of a family of Google's own; None: the family that Google recommends.

    Raises:
        ConfigError: It is the name of an image of the Cloud TPU API.
    """
    if software_version is None:
        return IMAGES[where.chip.name]
    if software_version.startswith(("v2-alpha-", "tpu-")) or software_version[0].isdigit():
        raise ConfigError(
            f"software_version {software_version!r} is an image of the Cloud TPU API; Compute "
            f"Engine has its own, such as {IMAGES[where.chip.name].rsplit('/', 1)[1]!r}. Leave it "
            "out, or name one."
        )
    return software_version if "/" in software_version else f"{_IMAGES}/{software_version}"
