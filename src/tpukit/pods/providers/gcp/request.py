"""What is sent to Cloud TPU for a pod: one queued resource with a node for each slice."""

import math
import uuid

from google.cloud import tpu_v2
from google.protobuf import duration_pb2

from ....errors import ConfigError
from ....hardware import Slice
from ....job.sections import LaunchSettings
from ...config import PodConfig
from ...pod import Tier, check_name
from ..google.labels import check_labels
from .runtimes import runtime_version

_REQUESTS = uuid.UUID("6f1d3c52-2f0e-5b0e-9d4a-5a8f0f7b7c11")
CONFIG_TYPES = {
    "v2": tpu_v2.AcceleratorConfig.Type.V2,
    "v3": tpu_v2.AcceleratorConfig.Type.V3,
    "v4": tpu_v2.AcceleratorConfig.Type.V4,
    "v5e": tpu_v2.AcceleratorConfig.Type.V5LITE_POD,
    "v5p": tpu_v2.AcceleratorConfig.Type.V5P,
    "v6e": tpu_v2.AcceleratorConfig.Type.V6E,
}
NOT_THIS_API = (
    "the Cloud TPU API ends with v6e, and Google gives TPU7x and later through GKE or Compute "
    "Engine alone"
)
NO_FLEX_START = "Google's client for this API has no field that asks for it; gke and gce have"
IP_ALIAS = (
    "TPU VMs always have addresses of the VPC network, and the API has no field to change that"
)


def request_id(project: str, zone: str, name: str, *, owner: str) -> str:
    """Return the id by which the API knows a repeated request of one owner for the same pod."""
    return str(uuid.uuid5(_REQUESTS, f"{project}/{zone}/{name}/{owner}"))


def queued_resource(
    name: str, config: PodConfig, launch: LaunchSettings, *, parent: str, ssh_key: str
) -> tpu_v2.QueuedResource:
    """Return the request for a pod.

    Args:
        name: Of the pod, its queued resource and its node; slices of several get `-0`, `-1`, ….
        config: What is asked for.
        launch: For the account that its hosts act as.
        parent: `projects/…/locations/…`.
        ssh_key: `user:public key`, for the hosts' metadata.

    Raises:
        ConfigError: The API cannot give that, or a label is not to its taste.
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
    asked = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    if config.tier is Tier.SPOT:
        asked.spot = tpu_v2.QueuedResource.Spot()
    elif config.tier is Tier.RESERVED:
        asked.guaranteed = tpu_v2.QueuedResource.Guaranteed()
        if config.reservation is not None:
            asked.reservation_name = _reservation(config.reservation, parent)
    asked.queueing_policy.valid_until_duration = duration_pb2.Duration(
        seconds=max(1, math.ceil(config.queue_timeout_s))
    )
    return asked


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
        # Hosts tell their own keys there, before anybody logs in.
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
        ConfigError: The API does not offer its generation.
    """
    if where.api_name is None or where.chip.name not in CONFIG_TYPES:
        raise ConfigError(f"{where}: {NOT_THIS_API}; use provider gke or gce.")
    return where.api_name


def _reservation(name: str, parent: str) -> str:
    return name if "/" in name else f"{parent}/reservations/{name}"
