"""Requests for a pod on Cloud TPU: one queued resource, with a node per slice."""

import math
import re
import uuid

from google.cloud import tpu_v2
from google.protobuf import duration_pb2

from ....errors import ConfigError
from ....hardware import Slice, list_chips
from ....job.sections import LaunchSettings
from ...config import PodConfig
from ...pod import Tier, check_name
from ..google import check_labels

SOURCE = "https://cloud.google.com/tpu/docs/runtimes (read 2026-11-16)"
_TENSORFLOW = re.compile(r"\d+\.\d+(\.\d+)?")


def runtime_version(where: Slice, software_version: str | None) -> str:
    """Return the API's runtime version for a slice.

    Args:
        where: The slice.
        software_version: A runtime version, or a bare number such as "2.8.0" for the image of that
            TensorFlow version (`tpu-vm-tf-2.8.0`, with `-pod` for slices of several hosts).
    """
    if software_version is None:
        if where.chip.tpu_api_image is None:
            raise ConfigError(f"{where}: the Cloud TPU API has no image for {where.chip.title}.")
        return where.chip.tpu_api_image
    if _TENSORFLOW.fullmatch(software_version):
        several = "-pod" if where.hosts > 1 else ""
        return f"tpu-vm-tf-{software_version}{several}"
    return software_version


_REQUESTS = uuid.UUID("6f1d3c52-2f0e-5b0e-9d4a-5a8f0f7b7c11")
CONFIG_TYPES = {
    chip.name: tpu_v2.AcceleratorConfig.Type[chip.tpu_api_type]
    for chip in list_chips()
    if chip.tpu_api_type is not None
}
NOT_THIS_API = (
    "the Cloud TPU API ends with v6e; Google offers TPU7x and later only through GKE and Compute "
    "Engine"
)
NO_FLEX_START = "Google's client for this API has no field for it; gke and gce have one"
IP_ALIAS = (
    "TPU VMs always have addresses of the VPC network, and the API has no field to change that"
)


def request_id(project: str, zone: str, name: str, *, owner: str) -> str:
    """Return the id by which the API recognizes an owner's repeated request for a pod."""
    return str(uuid.uuid5(_REQUESTS, f"{project}/{zone}/{name}/{owner}"))


def queued_resource(
    name: str, config: PodConfig, launch: LaunchSettings, *, parent: str, ssh_key: str
) -> tpu_v2.QueuedResource:
    """Return the request for a pod.

    Args:
        name: Name of the pod, its queued resource and its node; several slices get `-0`, `-1`, ….
        config: The request.
        launch: Has the service account of the hosts.
        parent: `projects/…/locations/…`.
        ssh_key: `user:public key` for the hosts' metadata.

    Raises:
        ConfigError: The API does not offer this, or a label is not valid.
    """
    check_name(name)
    where = config.slice
    name_of_type = accelerator_type(where)
    node = _node(where, config, launch, ssh_key)
    default = Slice.of(where.chip.name, chips=where.chips_per_slice)
    if where.topology == default.topology:
        node.accelerator_type = name_of_type
    else:
        node.accelerator_config = tpu_v2.AcceleratorConfig(
            type_=CONFIG_TYPES[where.chip.name], topology=where.gke_topology
        )
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=parent, node=node)
    if where.num_slices > 1:
        spec.multislice_params = tpu_v2.QueuedResource.Tpu.NodeSpec.MultisliceParams(
            node_count=where.num_slices, node_id_prefix=name
        )
    else:
        spec.node_id = name
    resource = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    if config.tier is Tier.SPOT:
        resource.spot = tpu_v2.QueuedResource.Spot()
    elif config.tier is Tier.RESERVED:
        resource.guaranteed = tpu_v2.QueuedResource.Guaranteed()
        if config.reservation is not None:
            resource.reservation_name = _reservation(config.reservation, parent)
    resource.queueing_policy.valid_until_duration = duration_pb2.Duration(
        seconds=max(1, math.ceil(config.queue_timeout_s))
    )
    return resource


def _node(where: Slice, config: PodConfig, launch: LaunchSettings, ssh_key: str) -> tpu_v2.Node:
    node = tpu_v2.Node(
        runtime_version=runtime_version(where, config.software_version),
        network_config=tpu_v2.NetworkConfig(
            network=config.network,
            enable_external_ips=launch.external_addresses,
        ),
        scheduling_config=tpu_v2.SchedulingConfig(
            spot=config.tier is Tier.SPOT, reserved=config.tier is Tier.RESERVED
        ),
        labels=check_labels(config.labels),
        # Hosts publish their ssh keys there before the first login.
        metadata={"ssh-keys": ssh_key, "enable-guest-attributes": "TRUE"},
    )
    if launch.service_account is not None:
        node.service_account = tpu_v2.ServiceAccount(
            email=launch.service_account, scope=["https://www.googleapis.com/auth/cloud-platform"]
        )
    return node


def accelerator_type(where: Slice) -> str:
    """Return the API's name of a slice.

    Raises:
        ConfigError: The API does not offer the generation.
    """
    if where.api_name is None or where.chip.name not in CONFIG_TYPES:
        raise ConfigError(f"{where}: {NOT_THIS_API}; use provider gke or gce.")
    return where.api_name


def _reservation(name: str, parent: str) -> str:
    return name if "/" in name else f"{parent}/reservations/{name}"
