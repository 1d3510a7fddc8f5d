"""The methods of the API over the store: each takes a call and returns a body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .cloud import Cloud
from .listing import aggregated, asks_only_for, listed, matches
from .methods import Method
from .offers import machine_types, region_of
from .operations import SITE, Operation
from .refusals import Json, Refused, invalid, not_found
from .resources import Group, Resource, check_fields, check_name, check_policy, check_template
from .showing import show_errors, show_group, show_instance, show_managed

# Quotas that `regions.get` shows. Those of TPUs by family are not among them: they have more
# dimensions than a region, and users find out by trying.
QUOTAS = {"IN_USE_ADDRESSES": 1000.0, "INSTANCE_GROUP_MANAGERS": 1000.0, "SSD_TOTAL_GB": 100_000.0}


@dataclass(frozen=True)
class Call:
    """One call, once it is known who calls."""

    method: Method
    variables: Mapping[str, str]
    query: Mapping[str, str]
    user: str
    body: Json = field(default_factory=dict[str, "object"])

    def folder(self, kind: str) -> str:
        """Return the path of the folder that a call is about."""
        scope = "global"
        for one in ("zone", "region"):
            if one in self.variables:
                scope = f"{one}s/{self.variables[one]}"
        return f"projects/{self.variables['project']}/{scope}/{kind}"


class ComputeService:
    """What the API does for one project."""

    def __init__(self, cloud: Cloud, project: str) -> None:
        self._cloud, self._project = cloud, project
        self._handlers: dict[tuple[str, str], Callable[[Call], Json]] = {
            ("ResourcePolicies", "insert"): self._insert_policy,
            ("ResourcePolicies", "get"): self._get_policy,
            ("ResourcePolicies", "list"): self._list_policies,
            ("ResourcePolicies", "delete"): self._delete_policy,
            ("InstanceTemplates", "insert"): self._insert_template,
            ("InstanceTemplates", "get"): self._get_template,
            ("InstanceTemplates", "list"): self._list_templates,
            ("InstanceTemplates", "delete"): self._delete_template,
            ("InstanceGroupManagers", "insert"): self._insert_group,
            ("InstanceGroupManagers", "get"): self._get_group,
            ("InstanceGroupManagers", "list"): self._list_groups,
            ("InstanceGroupManagers", "aggregated_list"): self._list_all_groups,
            ("InstanceGroupManagers", "delete"): self._delete_group,
            ("InstanceGroupManagers", "resize"): self._resize_group,
            ("InstanceGroupManagers", "list_managed_instances"): self._list_managed,
            ("InstanceGroupManagers", "list_errors"): self._list_errors,
            ("Instances", "get"): self._get_instance,
            ("Instances", "get_guest_attributes"): self._get_guest_attributes,
            ("Instances", "list"): self._list_instances,
            ("Instances", "aggregated_list"): self._list_all_instances,
            ("Zones", "get"): self._get_zone,
            ("Zones", "list"): self._list_zones,
            ("Regions", "get"): self._get_region,
            ("Regions", "list"): self._list_regions,
            ("Reservations", "list"): self._list_reservations,
            ("MachineTypes", "get"): self._get_machine_type,
            ("MachineTypes", "list"): self._list_machine_types,
        }
        for scope in ("Global", "Region", "Zone"):
            self._handlers |= {
                (f"{scope}Operations", "get"): self._get_operation,
                (f"{scope}Operations", "wait"): self._wait_operation,
                (f"{scope}Operations", "list"): self._list_operations,
            }

    def answer(self, call: Call) -> Json:
        """Carry out a call.

        Raises:
            Refused: As the API refuses it.
        """
        handler = self._handlers.get((call.method.service, call.method.name))
        if handler is None:
            raise Refused(501, "notImplemented", f"{call.method.full_name} is not emulated")
        self._check_place(call.variables)
        if call.method.name == "wait":
            return handler(call)
        with self._cloud.world.lock:
            return handler(call)

    def _check_place(self, variables: Mapping[str, str]) -> None:
        zones = self._cloud.world.zones
        if variables["project"] != self._project:
            raise not_found(f"projects/{variables['project']}")
        zone, region = variables.get("zone"), variables.get("region")
        if zone is not None and zone not in zones:
            raise invalid("zone", zone, "Unknown zone.")
        if region is not None and region not in map(region_of, zones):
            raise invalid("region", region, "Unknown region.")

    # Workload policies and instance templates.

    def _insert_policy(self, call: Call) -> Json:
        check_fields("ResourcePolicy", call.body)
        check_policy(call.body)
        return self._insert(call, "resourcePolicies", self._plain)

    def _get_policy(self, call: Call) -> Json:
        return _show_policy(self._named(call, "resourcePolicies", "resource_policy"))

    def _list_policies(self, call: Call) -> Json:
        found = self._cloud.inside(call.folder("resourcePolicies"))
        return listed("resourcePolicyList", [_show_policy(one) for one in found], call.query)

    def _delete_policy(self, call: Call) -> Json:
        return self._delete(call, "resourcePolicies", "resource_policy")

    def _insert_template(self, call: Call) -> Json:
        check_fields("InstanceTemplate", call.body)
        check_template(call.body)
        return self._insert(call, "instanceTemplates", self._plain)

    def _get_template(self, call: Call) -> Json:
        return self._named(call, "instanceTemplates", "instance_template").to_body()

    def _list_templates(self, call: Call) -> Json:
        found = self._cloud.inside(call.folder("instanceTemplates"))
        return listed("instanceTemplateList", [one.to_body() for one in found], call.query)

    def _delete_template(self, call: Call) -> Json:
        return self._delete(call, "instanceTemplates", "instance_template")

    # Groups.

    def _insert_group(self, call: Call) -> Json:
        check_fields("InstanceGroupManager", call.body)
        return self._insert(call, "instanceGroupManagers", self._new_group)

    def _new_group(self, path: str, body: Json) -> Group:
        zone = path.split("/")[3]
        versions = body.get("versions") or [{"instanceTemplate": body.get("instanceTemplate", "")}]
        template = self._cloud.get(_path_of(versions[0].get("instanceTemplate", "")))
        wanted = body.get("resourcePolicies", {}).get("workloadPolicy")
        policy = None if wanted is None else self._cloud.get(_path_of(wanted))
        machine = template.body["properties"]["machineType"].rsplit("/", 1)[-1]
        offered = machine_types(self._cloud.world.zones[zone])
        if machine not in offered:
            raise not_found(f"projects/{self._project}/zones/{zone}/machineTypes/{machine}")
        plain = self._plain(path, body)
        return Group(
            **vars(plain),
            template=template,
            policy=policy,
            machine=offered[machine],
            size=int(body.get("targetSize", 0)),
        )

    def _get_group(self, call: Call) -> Json:
        return show_group(self._cloud.moment(self._group(call)))

    def _list_groups(self, call: Call) -> Json:
        folder = call.folder("instanceGroupManagers")
        found = [one for one in self._cloud.inside(folder) if isinstance(one, Group)]
        shown = [show_group(self._cloud.moment(one)) for one in found]
        return listed("instanceGroupManagerList", shown, call.query)

    def _list_all_groups(self, call: Call) -> Json:
        shown = [show_group(self._cloud.moment(one)) for one in self._cloud.groups()]
        zones = sorted(self._cloud.world.zones)
        kind = "instanceGroupManagerAggregatedList"
        return aggregated(kind, "instanceGroupManagers", shown, zones, call.query)

    def _delete_group(self, call: Call) -> Json:
        return self._delete(call, "instanceGroupManagers", "instance_group_manager")

    def _resize_group(self, call: Call) -> Json:
        path, size = self._group(call).path, int(call.query["size"])
        return self._once(call, path, lambda: self._cloud.resize(path, size, call.user))

    def _list_managed(self, call: Call) -> Json:
        shown = show_managed(self._cloud.moment(self._group(call)))
        page = listed("managedInstances", shown, call.query)
        return {"managedInstances": page.pop("items"), **page}

    def _list_errors(self, call: Call) -> Json:
        shown = show_errors(self._cloud.moment(self._group(call)))
        return listed("instanceManagedByIgmErrors", shown, call.query)

    # Machines.

    def _get_instance(self, call: Call) -> Json:
        path = f"{call.folder('instances')}/{call.variables['instance']}"
        for one in self._instances(zone=call.variables["zone"]):
            if one["selfLink"] == f"{SITE}/{path}":
                return one
        raise not_found(path)

    def _get_guest_attributes(self, call: Call) -> Json:
        facts = self._get_instance(call)["metadata"]["items"]
        is_enabled = {"key": "enable-guest-attributes", "value": "TRUE"} in facts
        keys = self._cloud.host_keys() if is_enabled else []
        if not keys:
            raise not_found(call.query.get("queryPath", ""))
        items = [{"namespace": "hostkeys", "key": kind, "value": text} for kind, text in keys]
        return {
            "kind": "compute#guestAttributes",
            "queryPath": call.query.get("queryPath", ""),
            "queryValue": {"items": items},
        }

    def _list_instances(self, call: Call) -> Json:
        wanted = call.query.get("filter", "")
        shown = self._instances(zone=call.variables["zone"], wanted=wanted)
        return listed("instanceList", shown, call.query)

    def _list_all_instances(self, call: Call) -> Json:
        zones = sorted(self._cloud.world.zones)
        kind = "instanceAggregatedList"
        return aggregated(kind, "instances", self._instances(), zones, call.query)

    def _instances(self, *, zone: str | None = None, wanted: str = "") -> list[Json]:
        """Return machines; a filter by labels, which all of a group share, spares most work."""
        by_labels = bool(wanted) and asks_only_for("labels", wanted)
        shown: list[Json] = []
        for group in self._cloud.groups():
            labels = group.template.body["properties"].get("labels", {})
            elsewhere = zone not in (None, group.path.split("/")[3])
            if elsewhere or (by_labels and not matches({"labels": labels}, wanted)):
                continue
            moment = self._cloud.moment(group)
            shown += [
                show_instance(moment, instance)
                for instance in sorted(group.instances, key=lambda one: one.name)
                if moment.state_of(instance)[0] is not None
            ]
        return shown

    # Where things are.

    def _get_zone(self, call: Call) -> Json:
        return self._zone(call.variables["zone"])

    def _list_zones(self, call: Call) -> Json:
        shown = [self._zone(one) for one in sorted(self._cloud.world.zones)]
        return listed("zoneList", shown, call.query)

    def _zone(self, zone: str) -> Json:
        path = f"projects/{self._project}/zones/{zone}"
        region = f"{SITE}/projects/{self._project}/regions/{region_of(zone)}"
        return {"name": zone, "status": "UP", "region": region, "selfLink": f"{SITE}/{path}"}

    def _get_region(self, call: Call) -> Json:
        return self._region(call.variables["region"])

    def _list_regions(self, call: Call) -> Json:
        names = sorted({region_of(zone) for zone in self._cloud.world.zones})
        return listed("regionList", [self._region(one) for one in names], call.query)

    def _region(self, region: str) -> Json:
        here = [one for one in self._cloud.groups() if region_of(one.path.split("/")[3]) == region]
        addresses = sum(bool(one.address) for group in here for one in group.instances)
        used = {"IN_USE_ADDRESSES": addresses, "INSTANCE_GROUP_MANAGERS": len(here)}
        return {
            "name": region,
            "status": "UP",
            "selfLink": f"{SITE}/projects/{self._project}/regions/{region}",
            "zones": [
                self._zone(zone)["selfLink"]
                for zone in sorted(self._cloud.world.zones)
                if region_of(zone) == region
            ],
            "quotas": [
                {"metric": metric, "limit": limit, "usage": float(used.get(metric, 0))}
                for metric, limit in QUOTAS.items()
            ],
        }

    def _get_machine_type(self, call: Call) -> Json:
        name = call.variables["machine_type"]
        for one in self._list_machine_types(call)["items"]:
            if one["name"] == name:
                return one
        raise not_found(f"{call.folder('machineTypes')}/{name}")

    def _list_machine_types(self, call: Call) -> Json:
        zone = call.variables["zone"]
        offered = machine_types(self._cloud.world.zones[zone])
        shown = [
            {
                "name": one.name,
                "zone": zone,
                "selfLink": f"{SITE}/{call.folder('machineTypes')}/{one.name}",
            }
            for one in offered.values()
        ]
        return listed("machineTypeList", shown, call.query)

    def _list_reservations(self, call: Call) -> Json:
        zone = call.variables["zone"]
        shown: list[Json] = []
        for name, one in self._cloud.world.zones[zone].reservations.items():
            path = f"{call.folder('reservations')}/{name}"
            shown.append({"name": name, "status": "READY", "selfLink": f"{SITE}/{path}"})
            machine = next(
                kind
                for kind in machine_types(self._cloud.world.zones[zone]).values()
                if kind.generation == one.kind and one.amount % kind.chips == 0
            )
            shown[-1]["specificReservation"] = {
                "count": str(one.amount // machine.chips),
                "instanceProperties": {"machineType": machine.name},
            }
        return listed("reservationList", shown, call.query)

    # Operations.

    def _get_operation(self, call: Call) -> Json:
        return self._cloud.operations.get(_operation_path(call)).to_body()

    def _wait_operation(self, call: Call) -> Json:
        return self._cloud.operations.wait(_operation_path(call)).to_body()

    def _list_operations(self, call: Call) -> Json:
        scope = call.folder("operations").rsplit("/", 1)[0]
        shown = [one.to_body() for one in self._cloud.operations.inside(scope)]
        return listed("operationList", shown, call.query)

    # What several methods share.

    def _plain(self, path: str, body: Json) -> Resource:
        return Resource(path, body, self._cloud.new_number(), self._cloud.world.clock.now())

    def _insert(self, call: Call, kind: str, make: Callable[[str, Json], Resource]) -> Json:
        path = f"{call.folder(kind)}/{check_name(call.body.get('name', ''))}"
        return self._once(call, path, lambda: self._cloud.insert(make(path, call.body), call.user))

    def _delete(self, call: Call, kind: str, variable: str) -> Json:
        path = self._named(call, kind, variable).path
        return self._once(call, path, lambda: self._cloud.delete(path, call.user))

    def _once(self, call: Call, path: str, begin: Callable[[], Operation]) -> Json:
        request_id = call.query.get("requestId", "")
        return self._cloud.once(call.method.full_name, path, request_id, begin).to_body()

    def _named(self, call: Call, kind: str, variable: str) -> Resource:
        return self._cloud.get(f"{call.folder(kind)}/{call.variables[variable]}")

    def _group(self, call: Call) -> Group:
        name = call.variables["instance_group_manager"]
        return self._cloud.get_group(f"{call.folder('instanceGroupManagers')}/{name}")


def _show_policy(policy: Resource) -> Json:
    status = "DELETING" if policy.is_leaving else "READY" if policy.is_ready else "CREATING"
    return policy.to_body() | {"kind": "compute#resourcePolicy", "status": status}


def _operation_path(call: Call) -> str:
    return f"{call.folder('operations')}/{call.variables['operation']}"


def _path_of(link: str) -> str:
    """Return the path of a link, which may be an address or a path already."""
    return link[link.find("projects/") :] if "projects/" in link else link
