"""Requests for a pod on Compute Engine: a template, a workload policy, a group per slice.

The template is created first and deleted last. It has the pod's labels and the request, so it
identifies the owner as long as anything of a pod exists. Groups and policies have no labels.
"""

import math

from google.cloud import compute_v1

from ....errors import ConfigError
from ....hardware import Slice, list_chips
from ....job.sections import LaunchSettings
from ...config import PodConfig
from ...pod import Tier, check_name
from ..google import check_labels

SOURCE = "https://docs.cloud.google.com/tpu/docs/tpu-os-images (read 2026-11-16)"
_IMAGES = "projects/ubuntu-os-accelerator-images/global/images/family"
# Image families instead of dated images, which Google deprecates within weeks.
IMAGES = {
    chip.name: f"{_IMAGES}/{chip.gce_image_family}"
    for chip in list_chips()
    if chip.gce_image_family is not None
}
BOOT_DISK_GB = 200
"""The default of 10 GB is too small for the software of a training job."""
GENERATIONS = tuple(IMAGES)
TOO_OLD = (
    "Compute Engine makes slices of v5p, v6e and TPU7x; workload policies support no other TPUs "
    "(https://docs.cloud.google.com/compute/docs/instance-groups/about-workload-policies)"
)


def machine_type(where: Slice) -> str:
    """Return the machine type of a slice's hosts.

    Raises:
        ConfigError: Compute Engine has no machine with this TPU.
    """
    if where.chip.name not in GENERATIONS:
        raise ConfigError(f"{where}: {TOO_OLD}. Use provider gcp or gke.")
    suffix = f"-{where.chips_per_host}t"
    return next(name for name in where.chip.gke_machine_types if name.endswith(suffix))


def source_image(where: Slice, software_version: str | None) -> str:
    """Return the boot image of hosts.

    Args:
        where: The slice.
        software_version: An image (`projects/P/global/images/I` or `…/images/family/F`) or one of
            Google's image families; None uses the family that Google recommends.

    Raises:
        ConfigError: It is an image name of the Cloud TPU API.
    """
    if software_version is None:
        return IMAGES[where.chip.name]
    if software_version.startswith(("v2-alpha-", "tpu-")) or software_version[0].isdigit():
        raise ConfigError(
            f"software_version {software_version!r} is an image of the Cloud TPU API; Compute "
            f"Engine has its own, such as {IMAGES[where.chip.name].rsplit('/', 1)[1]!r}. Remove "
            "it, or name one."
        )
    return software_version if "/" in software_version else f"{_IMAGES}/{software_version}"


POD_LABEL = "tpukit-pod"
SLICE_KEY, ZONE_KEY = "tpukit-slice", "tpukit-zone"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LONGEST_RUN_S = 7 * 24 * 3600
"""Longest run of flex-start machines, the maximum of the API."""
IP_ALIAS = (
    "machines of Compute Engine always have addresses of the VPC network, and the API has no field "
    "to change that"
)


def group_name(name: str, index: int) -> str:
    """Return the group name of a pod's slice."""
    return f"{name}-s{index}"


def instance_template(
    name: str, config: PodConfig, launch: LaunchSettings, *, zone: str, ssh_key: str
) -> compute_v1.InstanceTemplate:
    """Return the template of a pod's machines.

    Args:
        name: Name of the pod and of the template.
        config: The request.
        launch: Has the service account of the hosts.
        zone: The zone.
        ssh_key: `user:public key` for the hosts' metadata.

    Raises:
        ConfigError: Compute Engine does not offer this, or a label is not valid.
    """
    check_name(name)
    where = config.slice
    machine, image = machine_type(where), source_image(where, config.software_version)
    facts = {
        "ssh-keys": ssh_key,
        "enable-guest-attributes": "TRUE",  # hosts publish their ssh keys there
        # With OS Login, a project ignores ssh keys in metadata.
        "enable-oslogin": "FALSE",
        SLICE_KEY: str(where),
        ZONE_KEY: zone,
    }
    properties = compute_v1.InstanceProperties(
        machine_type=machine,
        disks=[
            compute_v1.AttachedDisk(
                boot=True,
                auto_delete=True,
                initialize_params=compute_v1.AttachedDiskInitializeParams(
                    source_image=image,
                    disk_size_gb=BOOT_DISK_GB,
                    disk_type=where.chip.gce_boot_disk,
                ),
            )
        ],
        network_interfaces=[_interface(config.network, outside=launch.external_addresses)],
        service_accounts=[
            # Unlike on Cloud TPU, a machine has no service account unless one is named.
            compute_v1.ServiceAccount(email=launch.service_account or "default", scopes=[SCOPE])
        ],
        scheduling=_scheduling(config, launch.flex_start_seconds),
        labels={**check_labels(config.labels), POD_LABEL: name},
        metadata=compute_v1.Metadata(
            items=[compute_v1.Items(key=key, value=value) for key, value in facts.items()]
        ),
    )
    if config.tier is Tier.RESERVED:
        properties.reservation_affinity = _reservation(config.reservation)
    elif launch.flex_start_seconds is not None:
        properties.reservation_affinity = compute_v1.ReservationAffinity(
            consume_reservation_type="NO_RESERVATION"
        )
    return compute_v1.InstanceTemplate(
        name=name, description=f"pod {name} of tpukit: {where} in {zone}", properties=properties
    )


def workload_policy(name: str, where: Slice) -> compute_v1.ResourcePolicy | None:
    """Return the policy that joins machines into a slice; None for single-machine slices."""
    if where.hosts == where.num_slices:
        return None
    return compute_v1.ResourcePolicy(
        name=name,
        description=f"pod {name} of tpukit",
        workload_policy=compute_v1.ResourcePolicyWorkloadPolicy(
            type_="HIGH_THROUGHPUT",
            accelerator_topology=where.gke_topology,
            accelerator_topology_mode="AUTO_CONNECT",
        ),
    )


def instance_group(
    name: str, index: int, where: Slice, *, project: str, region: str, bulk: bool
) -> compute_v1.InstanceGroupManager:
    """Return the group of one slice of a pod.

    Args:
        name: Name of the pod.
        index: Index of the slice.
        where: The pod's slices.
        project: The project.
        region: Region of the workload policy.
        bulk: Whether to create all machines at once or none.
    """
    group = compute_v1.InstanceGroupManager(
        name=group_name(name, index),
        base_instance_name=group_name(name, index),
        description=f"pod {name} of tpukit, slice {index}",
        versions=[
            compute_v1.InstanceGroupManagerVersion(
                instance_template=f"projects/{project}/global/instanceTemplates/{name}"
            )
        ],
        target_size=where.hosts // where.num_slices,
        target_size_policy=compute_v1.InstanceGroupManagerTargetSizePolicy(
            mode="BULK" if bulk else "INDIVIDUAL"
        ),
        # Lost machines are not recreated one by one; the whole pod is replaced.
        instance_lifecycle_policy=compute_v1.InstanceGroupManagerInstanceLifecyclePolicy(
            default_action_on_failure="DO_NOTHING"
        ),
    )
    if workload_policy(name, where) is not None:
        group.resource_policies = compute_v1.InstanceGroupManagerResourcePolicies(
            workload_policy=f"projects/{project}/regions/{region}/resourcePolicies/{name}"
        )
    return group


def _scheduling(config: PodConfig, flex_start_s: float | None) -> compute_v1.Scheduling:
    scheduling = compute_v1.Scheduling(
        provisioning_model="STANDARD", on_host_maintenance="TERMINATE", automatic_restart=False
    )
    if config.tier is Tier.SPOT:
        scheduling.provisioning_model = "SPOT"
        scheduling.instance_termination_action = "STOP"
    elif config.tier is Tier.RESERVED and config.reservation is not None:
        scheduling.provisioning_model = "RESERVATION_BOUND"
        scheduling.instance_termination_action = "STOP"
    if flex_start_s is None:
        return scheduling
    if config.tier is not Tier.ON_DEMAND:
        raise ConfigError(
            f"launch.flex_start_seconds and {config.tier} exclude each other; set only one."
        )
    if flex_start_s > LONGEST_RUN_S:
        raise ConfigError(
            f"launch.flex_start_seconds is {flex_start_s:g}; flex-start machines run at most "
            f"{LONGEST_RUN_S} s (7 days)."
        )
    scheduling.provisioning_model = "FLEX_START"
    scheduling.instance_termination_action = "DELETE"
    scheduling.max_run_duration = compute_v1.Duration(seconds=math.ceil(flex_start_s))
    return scheduling


def _reservation(name: str | None) -> compute_v1.ReservationAffinity:
    if name is None:
        return compute_v1.ReservationAffinity(consume_reservation_type="ANY_RESERVATION")
    return compute_v1.ReservationAffinity(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=[name],
    )


def _interface(network: str, *, outside: bool) -> compute_v1.NetworkInterface:
    nat = compute_v1.AccessConfig(type_="ONE_TO_ONE_NAT", name="External NAT")
    interface = compute_v1.NetworkInterface(
        nic_type="GVNIC", access_configs=[nat] if outside else []
    )
    if "subnetworks/" in network:
        interface.subnetwork = network
    else:
        interface.network = network if "/" in network else f"global/networks/{network}"
    return interface
