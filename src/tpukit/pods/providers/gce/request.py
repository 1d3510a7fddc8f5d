"""What is sent to Compute Engine for a pod: a template, a workload policy, a group a slice.

The template comes first and goes last. It carries the pod's labels and what was asked for, so as
long as anything of a pod is left, its template tells whose it is: groups and policies have no
labels.
"""

import math

from google.cloud import compute_v1

from ....errors import ConfigError
from ....hardware import Slice
from ....job.sections import LaunchSettings
from ...config import PodConfig
from ...pod import Tier, check_name
from ..google.labels import check_labels
from .machines import BOOT_DISK_GB, BOOT_DISKS, machine_type, source_image

POD_LABEL = "tpukit-pod"
SLICE_KEY, ZONE_KEY = "tpukit-slice", "tpukit-zone"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LONGEST_RUN_S = 7 * 24 * 3600
"""Of machines that start flexibly, which is the most there is."""
IP_ALIAS = (
    "machines of Compute Engine always have addresses of the VPC network, and the API has no field "
    "to change that"
)


def group_name(name: str, index: int) -> str:
    """Return the name of the group that is a pod's slice."""
    return f"{name}-s{index}"


def instance_template(
    name: str, config: PodConfig, launch: LaunchSettings, *, zone: str, ssh_key: str
) -> compute_v1.InstanceTemplate:
    """Return the template of a pod's machines.

    Args:
        name: Of the pod, and of the template.
        config: What is asked for.
        launch: For the account that its hosts act as.
        zone: Where.
        ssh_key: `user:public key`, for the hosts' metadata.

    Raises:
        ConfigError: Compute Engine cannot give that, or a label is not to its taste.
    """
    check_name(name)
    where = config.slice
    machine, image = machine_type(where), source_image(where, config.software_version)
    facts = {
        "ssh-keys": ssh_key,
        "enable-guest-attributes": "TRUE",  # where hosts tell their own keys
        # Where a project lets people in by OS Login, keys in metadata would be ignored.
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
                    disk_type=BOOT_DISKS[where.chip.name],
                ),
            )
        ],
        network_interfaces=[_interface(config.network, outside=launch.external_addresses)],
        service_accounts=[
            # Unlike Cloud TPU's, a machine that names no account has none.
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
    """Return the policy that joins machines into a slice; None for slices of one machine."""
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
        name: Of the pod.
        index: Which slice.
        where: All slices.
        project: Whose.
        region: Where the workload policy is.
        bulk: Whether all machines are made at once or none.
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
        # Lost machines are not made again one by one: the pod is lost, and another one asked for.
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
            f"launch.flex_start_seconds and {config.tier} are two ways to get machines; choose one."
        )
    if flex_start_s > LONGEST_RUN_S:
        raise ConfigError(
            f"launch.flex_start_seconds is {flex_start_s:g}; machines that start flexibly run "
            f"{LONGEST_RUN_S} s (7 days) at most."
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
