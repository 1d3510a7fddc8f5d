"""Groups and their machines as the API shows them at a stage of their life.

A group is there long before its machines are, and its machines run before they form a slice:
whoever wants to use a slice looks at all three.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..holding import Holding, Pace, Stage
from .offers import FAMILIES, region_of
from .operations import SITE
from .refusals import Json, quota_exceeded, stock_out
from .resources import Group, Instance
from .times import written

_TOPOLOGY = {
    Stage.STARTING: "ACTIVATING",
    Stage.RUNNING: "ACTIVE",
    Stage.ENDING: "DEACTIVATING",
}
_MACHINES = {
    Stage.RUNNING: ("RUNNING", "NONE"),
    Stage.ENDING: ("STOPPING", "DELETING"),
}
_TAKEN = {Stage.LEAVING: "STOPPING", Stage.LOST: "TERMINATED"}


@dataclass(frozen=True)
class Moment:
    """A group, what the world gave it, and when it is looked at."""

    group: Group
    held: Holding | None
    now: float
    pace: Pace

    @property
    def zone(self) -> str:
        """The zone's name."""
        return self.group.path.split("/")[3]

    def errors(self) -> Sequence[Json]:
        """Return why there are no machines."""
        group, held = self.group, self.held
        zone_path = "/".join(group.path.split("/")[:4])
        if group.over_quota is not None:
            family = FAMILIES[group.machine.generation]
            limit, spot = group.over_quota.limit, group.model == "SPOT"
            return [quota_exceeded(region_of(self.zone), family, limit, spot=spot)]
        if held is not None and held.stage is Stage.WAITING:
            return [stock_out(zone_path, group.machine.name)]
        if held is not None and held.stage is Stage.REFUSED:
            return [{"code": "INTERNAL_ERROR", "message": held.reason}]
        return []

    def state_of(self, instance: Instance) -> tuple[str | None, str]:
        """Return a machine's status, None while there is none, and what the group does to it."""
        held, struck = self.held, self.group.struck
        if held is None or held.stage in (Stage.NEW, Stage.WAITING, Stage.REFUSED):
            return None, "CREATING"
        if held.stage is Stage.STARTING:
            half_way = self.now >= held.since + self.pace.start_s / 2
            return ("RUNNING", "VERIFYING") if half_way else ("STAGING", "CREATING")
        if held.stage in _TAKEN and (struck is None or instance.worker in struck):
            deleted = self.group.scheduling.get("instanceTerminationAction") == "DELETE"
            gone = deleted and held.stage is Stage.LOST
            return None if gone else _TAKEN[held.stage], "NONE"
        return _MACHINES.get(held.stage, ("RUNNING", "NONE"))


def show_group(moment: Moment) -> Json:
    """Return a group."""
    group, held, errors = moment.group, moment.held, list(moment.errors())
    stage = None if held is None else held.stage
    pending = group.size > 0 and stage in (None, Stage.NEW, Stage.WAITING, Stage.STARTING)
    status: Json = {
        "isStable": not pending and stage not in (Stage.LEAVING, Stage.ENDING, Stage.REFUSED),
        "versionTarget": {"isReached": True},
    }
    if group.is_bulk:
        operation: Json = {"inProgress": pending}
        if pending or errors:
            operation["lastProgressCheck"] = {"timestamp": written(moment.now)} | (
                {"error": {"errors": errors}} if errors else {}
            )
        status["bulkInstanceOperation"] = operation
    if group.topology is not None:
        status["appliedAcceleratorTopologies"] = [
            {
                "acceleratorTopology": group.topology,
                "state": _TOPOLOGY.get(stage, "INCOMPLETE") if stage else "INCOMPLETE",
                "stateDetails": {"timestamp": written(held.since if held else moment.now)},
            }
        ]
    zone_path = "/".join(group.path.split("/")[:4])
    return group.to_body() | {
        "kind": "compute#instanceGroupManager",
        "zone": f"{SITE}/{zone_path}",
        "targetSize": group.size,
        "instanceGroup": f"{SITE}/{zone_path}/instanceGroups/{group.name}",
        "instanceTemplate": group.template.link,
        "currentActions": _actions(moment),
        "status": status,
    }


def _actions(moment: Moment) -> dict[str, int]:
    return Counter(moment.state_of(one)[1].lower() for one in moment.group.instances)


def show_managed(moment: Moment) -> list[Json]:
    """Return the machines of a group, with what the group does to them."""
    shown: list[Json] = []
    for instance in moment.group.instances:
        status, action = moment.state_of(instance)
        one: Json = {
            "id": str(instance.number),
            "name": instance.name,
            "instance": f"{SITE}/{instance_path(moment.group, instance)}",
            "currentAction": action,
            "version": {"instanceTemplate": moment.group.template.link},
        }
        if status is not None:
            one["instanceStatus"] = status
        errors = list(moment.errors())
        if errors and not moment.group.is_bulk:
            one["lastAttempt"] = {"errors": {"errors": errors}}
        shown.append(one)
    return shown


def show_errors(moment: Moment) -> list[Json]:
    """Return what went wrong in a group, newest first."""
    return [
        {
            "error": error,
            "instanceActionDetails": {
                "action": "CREATING",
                "instance": f"{SITE}/{instance_path(moment.group, instance)}",
                "version": {"instanceTemplate": moment.group.template.link},
            },
            "timestamp": written(moment.now),
        }
        for error in moment.errors()
        for instance in moment.group.instances[:1]
    ]


def instance_path(group: Group, instance: Instance) -> str:
    """Return the path of a machine."""
    return f"{'/'.join(group.path.split('/')[:4])}/instances/{instance.name}"


def show_instance(moment: Moment, instance: Instance) -> Json:
    """Return a machine as `instances.get` does."""
    group, held = moment.group, moment.held
    properties = group.template.body["properties"]
    zone_path = "/".join(group.path.split("/")[:4])
    status, _ = moment.state_of(instance)
    shown: Json = {
        "kind": "compute#instance",
        "id": str(instance.number),
        "name": instance.name,
        "status": status,
        "zone": f"{SITE}/{zone_path}",
        "machineType": f"{SITE}/{zone_path}/machineTypes/{group.machine.name}",
        "selfLink": f"{SITE}/{instance_path(group, instance)}",
        "creationTimestamp": written(group.created_at),
        "labels": properties.get("labels", {}),
        "scheduling": properties.get("scheduling", {}),
        "networkInterfaces": [_interface(one, instance) for one in properties["networkInterfaces"]],
        "metadata": {"items": [*_asked_metadata(group), *_slice_metadata(group, instance)]},
        "resourceStatus": {},
    }
    if held is not None and held.maintenance is not None:
        shown["resourceStatus"]["upcomingMaintenance"] = {
            "type": "SCHEDULED",
            "windowStartTime": written(held.maintenance.starts_at),
            "latestWindowStartTime": written(held.maintenance.starts_at),
            "windowEndTime": written(held.maintenance.ends_at),
            "maintenanceStatus": "ONGOING" if held.stage is Stage.LEAVING else "PENDING",
            "maintenanceReasons": ["PLANNED_UPDATE"],
            "canReschedule": False,
        }
    return shown


def _interface(asked: Json, instance: Instance) -> Json:
    outside = [
        one | {"natIP": instance.address, "name": "External NAT"}
        for one in asked.get("accessConfigs", [])
    ]
    return asked | {"name": "nic0", "networkIP": instance.address, "accessConfigs": outside}


def _asked_metadata(group: Group) -> list[Json]:
    return group.template.body["properties"].get("metadata", {}).get("items", [])


def _slice_metadata(group: Group, instance: Instance) -> list[Json]:
    """Return what tells a machine its place in the slice.

    As jax reads it (jax/_src/clusters/cloud_tpu_cluster.py) and as it was seen in
    GoogleCloudPlatform/cluster-toolkit#6351.
    """
    names = ",".join(one.name for one in sorted(group.instances, key=lambda one: one.worker))
    environment = {"TPU_WORKER_ID": instance.worker, "TOPOLOGY": group.topology or ""}
    values = {
        "agent-worker-number": str(instance.worker),
        "worker-network-endpoints": names,
        "tpu-env": "\n".join(f"{key}: '{value}'" for key, value in environment.items()),
    }
    return [{"key": key, "value": value} for key, value in values.items()]
