"""The methods of service `Tpu`, over the cloud: each takes a v2 request and returns a message.

Methods have the API's names. Those that only v2alpha1 has (maintenance, reservations) take and
return its messages.
"""

# ruff: noqa: D102  the methods are the API's, and documented there

import datetime
import re
from collections.abc import Callable
from typing import Any

import grpc
from google.cloud.location import locations_pb2
from google.protobuf import empty_pb2

from ..holding import Holding, Stage
from .cloud import Cloud
from .offers import RUNTIME_VERSIONS, topology_of, types_in
from .operations import Operations
from .paging import page_of
from .resources import Node, Queued, Refused, invalid, show_node, show_queued
from .versions import V2, V2ALPHA1, Version

_PARENT = re.compile(r"projects/([^/]+)/locations/([^/]+)")


class TPUService:
    """What the API does for one project, once it knows who calls."""

    def __init__(self, cloud: Cloud, operations: Operations, project: str) -> None:
        self._cloud, self._operations, self._project = cloud, operations, project
        self._creations: dict[tuple[str, str], Any] = {}  # by name and request id

    # Queued resources.

    def CreateQueuedResource(self, request: Any, version: Version) -> Any:
        self._zone(request.parent)
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        key = (name, request.request_id)
        with self._cloud.world.lock:
            if request.request_id and key in self._creations:
                # https://google.aip.dev/155: the reply of the first request with this id.
                return self._operations.show(self._creations[key])
            self._cloud.create(
                request.parent,
                request.queued_resource_id,
                request.queued_resource,
                request.request_id,
            )

            def created() -> Any:
                held = self._cloud.world.get(name)
                if held is None:
                    return request.queued_resource
                return None if held.stage is Stage.NEW else show_queued(*self._cloud.get(name))

            begun = self._operations.begin("create", name, version, created)
            if request.request_id:
                self._creations[key] = begun
            return self._operations.show(begun)

    def GetQueuedResource(self, request: Any, version: Version) -> Any:
        with self._cloud.world.lock:
            return show_queued(*self._cloud.get(request.name))

    def ListQueuedResources(self, request: Any, version: Version) -> Any:
        self._zone(request.parent, or_all=True)
        with self._cloud.world.lock:
            names, token = page_of(
                self._cloud.names(request.parent), request.page_size, request.page_token
            )
            shown = [show_queued(*self._cloud.get(name)) for name in names]
        reply = V2.message("ListQueuedResourcesResponse")
        return reply(queued_resources=shown, next_page_token=token)

    def DeleteQueuedResource(self, request: Any, version: Version) -> Any:
        name = request.name
        with self._cloud.world.lock:
            self._cloud.delete(name, force=request.force)
            last = show_queued(*self._cloud.get(name))

        def deleted() -> Any:
            if self._cloud.world.get(name) is not None:
                return None
            return last if version is V2ALPHA1 else empty_pb2.Empty()

        return self._operations.show(self._operations.begin("delete", name, version, deleted))

    def ResetQueuedResource(self, request: Any, version: Version) -> Any:
        name = request.name
        self._cloud.reset(name)
        return self._at_once("reset", name, version, lambda: show_queued(*self._cloud.get(name)))

    # Nodes.

    def GetNode(self, request: Any, version: Version) -> Any:
        with self._cloud.world.lock:
            return self._show_node(*self._cloud.get_node(request.name), version)

    def GetGuestAttributes(self, request: Any, version: Version) -> Any:
        with self._cloud.world.lock:
            keys = self._cloud.host_keys(request.name)
        items = [{"namespace": "hostkeys", "key": kind, "value": text} for kind, text in keys]
        one = {"query_path": request.query_path, "query_value": {"items": items}}
        count = max(1, len(request.worker_ids))
        return version.message("GetGuestAttributesResponse")(guest_attributes=[one] * count)

    def ListNodes(self, request: Any, version: Version) -> Any:
        self._zone(request.parent, or_all=True)
        with self._cloud.world.lock:
            names, token = page_of(
                self._cloud.node_names(request.parent), request.page_size, request.page_token
            )
            shown = [self._show_node(*self._cloud.get_node(name), version) for name in names]
        return version.message("ListNodesResponse")(nodes=shown, next_page_token=token)

    def _show_node(self, node: Node, queued: Queued, held: Holding, version: Version) -> Any:
        shown = version.show(show_node(node, queued, held))
        if version is V2ALPHA1 and held.maintenance is not None:
            window = shown.upcoming_maintenance
            window.type_ = type(window).MaintenanceType.Value("SCHEDULED")
            pending = self._cloud.world.clock.now() < held.maintenance.starts_at
            window.maintenance_status = type(window).MaintenanceStatus.Value(
                "PENDING" if pending else "ONGOING"
            )
            window.can_reschedule = pending
            window.window_start_time = _written(held.maintenance.starts_at)
            window.window_end_time = _written(held.maintenance.ends_at)
            window.latest_window_start_time = _written(held.maintenance.starts_at)
        return shown

    # Maintenance and reservations: v2alpha1 alone.

    def PerformMaintenance(self, request: Any, version: Version) -> Any:
        return self.SimulateMaintenanceEvent(request, version)

    def PerformMaintenanceQueuedResource(self, request: Any, version: Version) -> Any:
        name = request.name
        self._maintain(name)
        return self._at_once(
            "maintenance", name, version, lambda: show_queued(*self._cloud.get(name))
        )

    def SimulateMaintenanceEvent(self, request: Any, version: Version) -> Any:
        name = request.name
        self._maintain(self._cloud.get_node(name)[1].name)

        def shown() -> Any:
            return self._show_node(*self._cloud.get_node(name), V2)

        return self._at_once("maintenance", name, version, shown)

    def _maintain(self, name: str) -> None:
        if not self._cloud.world.preempt(name, reason="maintenance"):
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"'{name}' is not ACTIVE")

    def ListReservations(self, request: Any, version: Version) -> Any:
        zone = self._zone(request.parent)
        kind = version.message("Reservation")
        shown = [
            kind(
                name=f"{request.parent}/reservations/{name}",
                standard={"size": one.amount, "resource_type": one.kind},
            )
            for name, one in sorted(self._cloud.world.zones[zone].reservations.items())
        ]
        return version.message("ListReservationsResponse")(reservations=shown)

    # What is offered.

    def ListAcceleratorTypes(self, request: Any, version: Version) -> Any:
        offered = types_in(self._cloud.world.zones[self._zone(request.parent)])
        names, token = page_of(sorted(offered), request.page_size, request.page_token)
        kind = V2.message("AcceleratorType")
        shown = [
            kind(
                name=f"{request.parent}/acceleratorTypes/{name}",
                type_=name,
                accelerator_configs=[{"topology": topology_of(offered[name])}],
            )
            for name in names
        ]
        reply = V2.message("ListAcceleratorTypesResponse")
        return reply(accelerator_types=shown, next_page_token=token)

    def GetAcceleratorType(self, request: Any, version: Version) -> Any:
        parent, _, name = request.name.rpartition("/acceleratorTypes/")
        if name not in types_in(self._cloud.world.zones[self._zone(parent)]):
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Resource '{request.name}' was not found")
        return V2.message("AcceleratorType")(name=request.name, type_=name)

    def ListRuntimeVersions(self, request: Any, version: Version) -> Any:
        self._zone(request.parent)
        kind = V2.message("RuntimeVersion")
        names, token = page_of(RUNTIME_VERSIONS, request.page_size, request.page_token)
        shown = [
            kind(name=f"{request.parent}/runtimeVersions/{name}", version=name) for name in names
        ]
        reply = V2.message("ListRuntimeVersionsResponse")
        return reply(runtime_versions=shown, next_page_token=token)

    def GetRuntimeVersion(self, request: Any, version: Version) -> Any:
        parent, _, name = request.name.rpartition("/runtimeVersions/")
        self._zone(parent)
        if name not in RUNTIME_VERSIONS:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Resource '{request.name}' was not found")
        return V2.message("RuntimeVersion")(name=request.name, version=name)

    def ListLocations(self, request: Any, version: Version) -> Any:
        names, token = page_of(
            sorted(self._cloud.world.zones), request.page_size, request.page_token
        )
        shown = [self._location(request.name, zone) for zone in names]
        return locations_pb2.ListLocationsResponse(locations=shown, next_page_token=token)

    def GetLocation(self, request: Any, version: Version) -> Any:
        zone = self._zone(request.name)
        return self._location(request.name.split("/locations/")[0], zone)

    def _location(self, project: str, zone: str) -> locations_pb2.Location:
        return locations_pb2.Location(name=f"{project}/locations/{zone}", location_id=zone)

    def _at_once(self, verb: str, name: str, version: Version, outcome: Callable[[], Any]) -> Any:
        return self._operations.show(self._operations.begin(verb, name, version, outcome))

    def _zone(self, parent: str, *, or_all: bool = False) -> str:
        """Return the zone of a parent that exists.

        Raises:
            Refused: The project is not ours, or there is no such zone.
        """
        found = _PARENT.fullmatch(parent)
        if found is None:
            raise invalid(f"Invalid parent '{parent}'")
        project, zone = found.groups()
        if project != self._project:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"Permission denied on resource project {project}.",
            )
        if zone not in self._cloud.world.zones and not (or_all and zone == "-"):
            # What Google's APIs say of a zone that is not there.
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"Permission denied on 'locations/{zone}' (or it may not exist).",
            )
        return zone


def _written(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat()
