"""Pods as managed instance groups of Compute Engine."""

import contextlib
import time
from collections.abc import Sequence

from google.api_core import exceptions
from google.cloud import compute_v1

from ....errors import (
    CommunicationTimeout,
    ConfigError,
    PodUnavailable,
    ProviderError,
    TPUError,
)
from ....hardware import Slice
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...causes import Cause
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...pod import Pod
from ..google.zones import UnknownZone, not_offered
from ..protocol import Capabilities, Command, Gang
from ..ssh.keys import forget_hosts, known_hosts, learn_hosts, own_key
from ..ssh.transport import SSHTransport
from ..terms import check_terms
from .api import ComputeEngine
from .machines import GENERATIONS, TOO_OLD, machine_type
from .preflight import find_obstacles
from .reading import Asked, read_pod, read_template
from .request import (
    IP_ALIAS,
    POD_LABEL,
    group_name,
    instance_group,
    instance_template,
    workload_policy,
)

DEFAULT_USER = "tpukit"
DELETE_S = 30.0
"""How long deleting waits for machines to go; what is left then is left to the next call."""


class ComputeEngineProvider:
    """Gives and takes pods by google-cloud-compute, and reaches their hosts by ssh.

    A pod is an instance template with its name, a workload policy with its name where slices have
    several hosts, and a managed instance group for each slice. `launch.endpoint` chooses another
    API than Google's, such as an emulator.
    """

    name = "gce"

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._api = ComputeEngine(launch)
        self._user = launch.ssh_user or DEFAULT_USER
        older = dict.fromkeys(("v2", "v3", "v4", "v5e"), f"{TOO_OLD}; use provider gcp or gke")
        self.capabilities = Capabilities(
            generations=GENERATIONS,
            refused={
                **older,
                "enable_ip_alias": IP_ALIAS,
                "flex_start": "here one says for how long as well (launch.flex_start_seconds)",
            },
        ).within(launch)

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod; a pod of that name that is there already is returned as it is."""
        check_terms(self.name, self.capabilities, config)
        zone, where = self._zone_of(config), config.slice
        key_line = own_key().metadata_line(self._user)
        template = instance_template(name, config, self._launch, zone=zone, ssh_key=key_line)
        there = self._asked(name)
        if there is None:
            self._check_offer(zone, where)
        elif there.zone != zone:
            raise ConfigError(
                f"A pod {name!r} is in {there.zone} already, and names are for all zones on "
                "Compute Engine; delete it, or choose another name."
            )
        is_ours = False
        try:
            is_ours = self._begin_template(template)
            self._make_rest(name, there.slice if there else where, zone)
            pod = self._read(self._asked(name))
            if is_ours and pod.cause is Cause.QUOTA:
                raise PodUnavailable(
                    f"Compute Engine has none to give: {pod.reason}", cause=Cause.QUOTA.value
                )
        except TPUError:
            if is_ours:  # nobody else's call makes it
                with contextlib.suppress(TPUError):
                    self.delete(name, zone=zone)
            raise
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        asked = self._asked(name)
        return None if asked is None or asked.zone != zone else self._read(asked)

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods of the project, in every zone, or those with an owner's label."""
        found = self._api.list_all(
            self._api.templates.list, compute_v1.ListInstanceTemplatesRequest()
        )
        asked = [one for one in map(read_template, found) if one is not None]
        mine = [one for one in asked if owner is None or one.labels.get("owner") == owner]
        if not mine:
            return []
        groups: dict[tuple[str, str], compute_v1.InstanceGroupManager] = {}
        request = compute_v1.AggregatedListInstanceGroupManagersRequest()
        for zone, scoped in self._api.list_all(self._api.groups.aggregated_list, request):
            here = zone.removeprefix("zones/")
            groups |= {(here, one.name): one for one in scoped.instance_group_managers}
        machines: dict[str, list[compute_v1.Instance]] = {}
        all_machines = compute_v1.AggregatedListInstancesRequest(filter=f"labels.{POD_LABEL}:*")
        for _, scoped in self._api.list_all(self._api.instances.aggregated_list, all_machines):
            for one in scoped.instances:
                machines.setdefault(one.labels[POD_LABEL], []).append(one)
        return [
            self._described(
                one,
                {
                    name: groups[one.zone, name]
                    for name in _group_names(one)
                    if (one.zone, name) in groups
                },
                machines.get(one.name, []),
            )
            for one in mine
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod in whatever state it is; one that is not there is no error.

        Groups first, as they need the rest, and the template last, as it tells whose they are.
        """
        asked = self._asked(name)
        if asked is None or asked.zone != zone:
            return
        api, deadline = self._api, time.monotonic() + DELETE_S
        begun = [
            api.begin(
                api.groups.delete_unary,
                compute_v1.DeleteInstanceGroupManagerRequest(
                    zone=zone, instance_group_manager=group
                ),
            )
            for group in _group_names(asked)
        ]
        with contextlib.suppress(CommunicationTimeout):
            for operation in begun:
                api.finish(operation, within_s=max(0.0, deadline - time.monotonic()))
            if workload_policy(name, asked.slice) is not None:
                request = compute_v1.DeleteResourcePolicyRequest(
                    region=_region_of(zone), resource_policy=name
                )
                api.finish(api.begin(api.policies.delete_unary, request))
            last = compute_v1.DeleteInstanceTemplateRequest(instance_template=name)
            api.finish(api.begin(api.templates.delete_unary, last))
        forget_hosts(name)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host of a ready pod, over ssh."""
        if not pod.is_ready:
            raise ProviderError(f"Pod {pod.name} is {pod.state}, so nothing can run on it.")
        transport = SSHTransport(
            pod.name,
            user=self._user,
            key_file=own_key().private_file,
            known_hosts=known_hosts(pod.name, pod.created_at or 0.0),
            told_hosts=learn_hosts(pod, lambda host: self._api.host_keys(host, zone=pod.zone)),
            config=self._launch.ssh_config,
        )
        return ProcessGang(pod.hosts, command, transport, attempt=attempt)

    def preflight(self, config: PodConfig) -> "list[DoctorFinding]":
        """Say what would stand in the way of a pod, without asking for one."""
        return find_obstacles(self._api, config, self._zone_of, self.list)

    def _zone_of(self, config: PodConfig) -> str:
        zones = config.zones or tuple(filter(None, (self._launch.zone, *self._launch.zones)))
        if not zones:
            raise ConfigError("Say in which zone to ask: launch.zone, such as us-east5-a.")
        return zones[0]

    def _check_offer(self, zone: str, where: Slice) -> None:
        """Find out before anything is made whether a zone is there and has such machines."""
        wanted = machine_type(where)

        def has_it(zone: str) -> bool:
            types = self._api.machine_types
            return self._api.find(types.get, zone=zone, machine_type=wanted) is not None

        def zones() -> Sequence[str]:
            found = self._api.list_all(self._api.zones.list, compute_v1.ListZonesRequest())
            return [one.name for one in found]

        try:
            is_there = has_it(zone)
        except UnknownZone as error:
            raise error.among(zones()) from error
        if not is_there:
            said = f"{zone} has no machines {wanted} for {where}"
            raise not_offered(said, zones=zones, has_it=has_it)

    def _begin_template(self, template: compute_v1.InstanceTemplate) -> bool:
        """Make a pod's template, which stands for the pod; tell whether this call made it."""
        request = compute_v1.InsertInstanceTemplateRequest(instance_template_resource=template)
        begun = self._api.begin(self._api.templates.insert_unary, request)
        self._api.finish(begun)
        return begun is not None

    def _make_rest(self, name: str, where: Slice, zone: str) -> None:
        """Make those other parts of a pod that are not there."""
        api = self._api
        if (policy := workload_policy(name, where)) is not None:
            needed = compute_v1.InsertResourcePolicyRequest(
                region=_region_of(zone), resource_policy_resource=policy
            )
            api.finish(api.begin(api.policies.insert_unary, needed))
        for operation in [
            self._make_group(name, index, where, zone) for index in range(where.num_slices)
        ]:
            api.finish(operation)

    def _make_group(
        self, name: str, index: int, where: Slice, zone: str
    ) -> compute_v1.Operation | None:
        """Begin to make a group: all machines at once, or one by one where that is not offered.

        Google's page on bulk mode has been read with and without spot and standard machines.
        """

        def send(*, bulk: bool) -> compute_v1.Operation | None:
            group = instance_group(
                name, index, where, project=self._api.project, region=_region_of(zone), bulk=bulk
            )
            return self._api.begin(
                self._api.groups.insert_unary,
                compute_v1.InsertInstanceGroupManagerRequest(
                    zone=zone, instance_group_manager_resource=group
                ),
            )

        if workload_policy(name, where) is None:
            return send(bulk=False)
        try:
            return send(bulk=True)
        except ConfigError as error:
            refused = isinstance(error.__cause__, exceptions.BadRequest)
            if not refused or "targetSizePolicy" not in str(error):
                raise
            return send(bulk=False)

    def _asked(self, name: str) -> Asked | None:
        """Return what a pod's template says, or None where there is no such pod.

        Raises:
            ProviderError: There is a template of that name, and it is not tpukit's.
        """
        template = self._api.find(self._api.templates.get, instance_template=name)
        if template is None:
            return None
        asked = read_template(template)
        if asked is None:
            raise ProviderError(
                f"An instance template {name!r} is there and is not of a pod; use another name, "
                "or delete it."
            )
        return asked

    def _read(self, asked: Asked | None) -> Pod:
        if asked is None:
            raise ProviderError("Compute Engine took the request and shows no template of it.")
        api = self._api
        groups: dict[str, compute_v1.InstanceGroupManager] = {}
        for name in _group_names(asked):
            group = api.find(api.groups.get, zone=asked.zone, instance_group_manager=name)
            if group is not None:
                groups[name] = group
        request = compute_v1.ListInstancesRequest(
            zone=asked.zone, filter=f'labels.{POD_LABEL} = "{asked.name}"'
        )
        return self._described(asked, groups, api.list_all(api.instances.list, request))

    def _described(
        self,
        asked: Asked,
        groups: dict[str, compute_v1.InstanceGroupManager],
        instances: Sequence[compute_v1.Instance],
    ) -> Pod:
        return read_pod(
            asked,
            groups,
            instances,
            errors=lambda group: self._errors(asked.zone, group),
            events=self._events,
        )

    def _errors(self, zone: str, group: str) -> "list[compute_v1.Errors]":
        """Return why a group's machines were not made at the last try."""
        request = compute_v1.ListManagedInstancesInstanceGroupManagersRequest(
            zone=zone, instance_group_manager=group
        )
        managed = self._api.list_all(self._api.groups.list_managed_instances, request)
        return [error for one in managed for error in one.last_attempt.errors.errors]

    def _events(self, asked: Asked) -> "list[compute_v1.Operation]":
        """Return what was done to a pod's machines."""
        request = compute_v1.ListZoneOperationsRequest(
            zone=asked.zone, filter=f'targetLink eq ".*/instances/{asked.name}-s[0-9]+-.*"'
        )
        return self._api.list_all(self._api.zone_operations.list, request)


def _group_names(asked: Asked) -> "list[str]":
    return [group_name(asked.name, index) for index in range(asked.slice.num_slices)]


def _region_of(zone: str) -> str:
    return zone.rpartition("-")[0]
