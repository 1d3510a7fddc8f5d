"""Pods as managed instance groups of Compute Engine."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

from google.api_core import exceptions
from google.cloud import compute_v1

from ....errors import (
    CommunicationTimeout,
    ConfigError,
    PodUnavailable,
    ProviderError,
    TPUError,
    did_you_mean,
)
from ....hardware import Slice, list_chips
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...causes import Cause
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...pod import Pod
from ..google import UnknownZone, not_offered
from ..protocol import Capabilities, Command, Gang, check_terms
from ..ssh.transport import SSHTransport, forget_hosts, known_hosts, learn_hosts, own_key
from .api import ComputeEngine
from .reading import Asked, read_pod, read_template
from .request import (
    GENERATIONS,
    IP_ALIAS,
    POD_LABEL,
    SOURCE,
    TOO_OLD,
    group_name,
    instance_group,
    instance_template,
    machine_type,
    source_image,
    workload_policy,
)

ADDRESSES = "IN_USE_ADDRESSES"


def find_obstacles(
    api: ComputeEngine,
    config: PodConfig,
    zone_of: Callable[[PodConfig], str],
    list_pods: Callable[[], list[Pod]],
) -> list[DoctorFinding]:
    """Return findings until one prevents all further checks."""
    findings: list[DoctorFinding] = []
    try:
        findings.extend(_check(api, config, zone_of, list_pods))
    except TPUError as error:
        text = str(error)
        findings.append(DoctorFinding("gce-refused", "environment", "error", text, fix=text))
    return findings


def _check(
    api: ComputeEngine,
    config: PodConfig,
    zone_of: Callable[[PodConfig], str],
    list_pods: Callable[[], list[Pod]],
) -> Iterator[DoctorFinding]:
    if shutil.which("ssh") is None:
        yield DoctorFinding(
            *("gce-ssh", "environment", "error", "ssh is not installed here"),
            fix="Install OpenSSH's client: hosts are reached through it.",
        )
    if not config.enable_ip_alias:
        seen = f"enable_ip_alias=False: {IP_ALIAS}"
        yield DoctorFinding("gce-ip-alias", "environment", "error", seen, fix="Leave it out.")
    wanted = machine_type(config.slice)
    image = source_image(config.slice, config.software_version)
    zone = zone_of(config)
    yield DoctorFinding(
        *("gce-credentials", "environment", "ok"),
        f"Credentials of {api.identity.source}, project {api.project}",
    )
    request = compute_v1.ListMachineTypesRequest(zone=zone)
    types = sorted(
        machine.name
        for machine in api.list_all(api.machine_types.list, request)
        if machine.name.startswith(("ct", "tpu"))
    )
    yield DoctorFinding("gce-zone", "environment", "ok", f"{zone} answers, and grants access")
    seen = f"{zone} offers {config.slice.hosts} × {wanted} for {config.slice}"
    yield _offered("gce-machine-type", seen, wanted, types)
    chosen = "" if config.software_version else f" (the default, by {SOURCE})"
    yield DoctorFinding("gce-image", "resources", "info", f"Hosts boot from {image}{chosen}")
    if config.reservation is not None:
        name = config.reservation.rsplit("/", 1)[-1]
        request = compute_v1.ListReservationsRequest(zone=zone)
        names = sorted(
            reservation.name for reservation in api.list_all(api.reservations.list, request)
        )
        yield _offered("gce-reservation", f"There is a reservation {name}", name, names)
    if api.launch.external_addresses:
        yield from _addresses(api, zone, config.slice.hosts)
    yield _quota(zone, list_pods())


def _offered(id_: str, seen: str, wanted: str, known: list[str]) -> DoctorFinding:
    if wanted in known:
        return DoctorFinding(id_, "resources", "ok", seen)
    return DoctorFinding(
        *(id_, "resources", "error", f"Not so: {seen}"),
        fix="Choose another; the zone has "
        f"{', '.join(known) or 'none'}.{did_you_mean(wanted, known)}",
    )


def _addresses(api: ComputeEngine, zone: str, hosts: int) -> Iterator[DoctorFinding]:
    """Every host needs an external address, and a region has a quota for these."""
    region = api.find(api.regions.get, region=zone.rpartition("-")[0])
    if region is None:
        return
    for quota in region.quotas:
        if quota.metric != ADDRESSES:
            continue
        left = quota.limit - quota.usage
        seen = f"{left:g} of {quota.limit:g} external addresses are left in {region.name}"
        if left >= hosts:
            yield DoctorFinding("gce-addresses", "resources", "ok", seen)
        else:
            yield DoctorFinding(
                *("gce-addresses", "resources", "error", f"{seen}; {hosts} are needed"),
                fix="Ask for more quota (IN_USE_ADDRESSES), or choose a smaller slice.",
            )


def _quota(zone: str, pods: list[Pod]) -> DoctorFinding:
    """No API shows TPU quota per family, but pods that hold quota without use can be listed."""
    lost = [pod for pod in pods if pod.state.is_lost and pod.zone == zone]
    if not lost:
        return DoctorFinding(
            *("gce-quota", "resources", "info"),
            "Compute Engine does not show quota for TPUs (TPUS_PER_TPU_FAMILY); a request above "
            "it is refused with the limit",
        )
    chips = sum(pod.slice.chips for pod in lost)
    return DoctorFinding(
        *("gce-quota", "resources", "warning"),
        f"{len(lost)} lost pods in {zone} may still hold quota for {chips} chips: "
        + ", ".join(pod.name for pod in lost[:5]),
        fix="Delete them: tpukit pods down NAME.",
    )


DEFAULT_USER = "tpukit"
DELETE_S = 30.0
"""How long a deletion waits for machines to go; the next call handles the rest."""


class ComputeEngineProvider:
    """Creates and deletes pods with google-cloud-compute, and reaches their hosts by ssh.

    A pod is an instance template, one managed instance group per slice, and a workload policy if
    slices have several hosts. All have the pod's name. `launch.endpoint` replaces Google's API, for
    example by an emulator.
    """

    name = "gce"

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._api = ComputeEngine(launch)
        self._user = launch.ssh_user or DEFAULT_USER
        elsewhere = [chip.name for chip in list_chips() if chip.tpu_api_type]
        older = dict.fromkeys(
            [name for name in elsewhere if name not in GENERATIONS],
            f"{TOO_OLD}; use provider gcp or gke",
        )
        self.capabilities = Capabilities(
            generations=GENERATIONS,
            has_bare_hosts=True,
            refused={
                **older,
                "enable_ip_alias": IP_ALIAS,
                "flex_start": "set launch.flex_start_seconds here instead",
            },
        ).within(launch)

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod; return an existing pod of that name unchanged."""
        check_terms(self.name, self.capabilities, config)
        zone, where = self._zone_of(config), config.slice
        key_line = own_key().metadata_line(self._user)
        template = instance_template(name, config, self._launch, zone=zone, ssh_key=key_line)
        there = self._find_template(name)
        if there is None:
            self._check_offer(zone, where)
        elif there.zone != zone:
            raise ConfigError(
                f"A pod {name!r} already exists in {there.zone}, and Compute Engine shares names "
                "between zones; delete it, or choose another name."
            )
        is_ours = False
        try:
            is_ours = self._begin_template(template)
            self._make_rest(name, there.slice if there else where, zone)
            pod = self._read(self._find_template(name))
            if is_ours and pod.cause is Cause.QUOTA:
                raise PodUnavailable(
                    f"Compute Engine has no capacity: {pod.reason}", cause=Cause.QUOTA.value
                )
        except TPUError:
            if is_ours:  # no other call creates it
                with contextlib.suppress(TPUError):
                    self.delete(name, zone=zone)
            raise
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        template = self._find_template(name)
        return None if template is None or template.zone != zone else self._read(template)

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods of the project in every zone, or those with an owner's label."""
        listed = self._api.list_all(
            self._api.templates.list, compute_v1.ListInstanceTemplatesRequest()
        )
        templates = [template for template in map(read_template, listed) if template is not None]
        mine = [
            template
            for template in templates
            if owner is None or template.labels.get("owner") == owner
        ]
        if not mine:
            return []
        groups: dict[tuple[str, str], compute_v1.InstanceGroupManager] = {}
        request = compute_v1.AggregatedListInstanceGroupManagersRequest()
        for zone, scoped in self._api.list_all(self._api.groups.aggregated_list, request):
            here = zone.removeprefix("zones/")
            groups |= {(here, group.name): group for group in scoped.instance_group_managers}
        machines: dict[str, list[compute_v1.Instance]] = {}
        all_machines = compute_v1.AggregatedListInstancesRequest(filter=f"labels.{POD_LABEL}:*")
        for _, scoped in self._api.list_all(self._api.instances.aggregated_list, all_machines):
            for machine in scoped.instances:
                machines.setdefault(machine.labels[POD_LABEL], []).append(machine)
        return [
            self._described(
                template,
                {
                    name: groups[template.zone, name]
                    for name in _group_names(template)
                    if (template.zone, name) in groups
                },
                machines.get(template.name, []),
            )
            for template in mine
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Delete a pod in any state; a missing pod is no error.

        Groups are deleted first, because they depend on the rest. The template is last, because it
        identifies the owner.
        """
        template = self._find_template(name)
        if template is None or template.zone != zone:
            return
        api, deadline = self._api, time.monotonic() + DELETE_S
        begun = [
            api.begin(
                api.groups.delete_unary,
                compute_v1.DeleteInstanceGroupManagerRequest(
                    zone=zone, instance_group_manager=group
                ),
            )
            for group in _group_names(template)
        ]
        with contextlib.suppress(CommunicationTimeout):
            for operation in begun:
                api.finish(operation, within_s=max(0.0, deadline - time.monotonic()))
            if workload_policy(name, template.slice) is not None:
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
            connect_s=self._launch.connect_timeout_seconds,
            silent_s=self._launch.network_timeout_seconds,
        )
        return ProcessGang(pod.hosts, command, transport, attempt=attempt)

    def preflight(self, config: PodConfig) -> "list[DoctorFinding]":
        """Return what would prevent a pod from being allocated, without requesting one."""
        return find_obstacles(self._api, config, self._zone_of, self.list)

    def _zone_of(self, config: PodConfig) -> str:
        zones = config.zones or tuple(filter(None, (self._launch.zone, *self._launch.zones)))
        if not zones:
            raise ConfigError("No zone is set; set launch.zone, for example us-east5-a.")
        return zones[0]

    def _check_offer(self, zone: str, where: Slice) -> None:
        """Check that a zone exists and has such machines, before anything is created."""
        wanted = machine_type(where)

        def has_it(zone: str) -> bool:
            types = self._api.machine_types
            return self._api.find(types.get, zone=zone, machine_type=wanted) is not None

        def zones() -> Sequence[str]:
            listed = self._api.list_all(self._api.zones.list, compute_v1.ListZonesRequest())
            return [zone.name for zone in listed]

        try:
            is_there = has_it(zone)
        except UnknownZone as error:
            raise error.among(zones()) from error
        if not is_there:
            message = f"{zone} has no machines {wanted} for {where}"
            raise not_offered(message, zones=zones, has_it=has_it)

    def _begin_template(self, template: compute_v1.InstanceTemplate) -> bool:
        """Create the template that stands for a pod; return whether this call created it."""
        request = compute_v1.InsertInstanceTemplateRequest(instance_template_resource=template)
        begun = self._api.begin(self._api.templates.insert_unary, request)
        self._api.finish(begun)
        return begun is not None

    def _make_rest(self, name: str, where: Slice, zone: str) -> None:
        """Create the missing parts of a pod."""
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
        """Start to create a group with all machines at once, or one by one if that is not offered.

        Versions of Google's page on bulk mode differ on whether it covers spot and standard
        machines.
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

    def _find_template(self, name: str) -> Asked | None:
        """Return the request in a pod's template, or None if there is no such pod.

        Raises:
            ProviderError: A template of that name exists, and is not tpukit's.
        """
        template = self._api.find(self._api.templates.get, instance_template=name)
        if template is None:
            return None
        request = read_template(template)
        if request is None:
            raise ProviderError(
                f"An instance template {name!r} exists, but does not belong to a pod; use another "
                "name, or delete it."
            )
        return request

    def _read(self, template: Asked | None) -> Pod:
        if template is None:
            raise ProviderError(
                "Compute Engine accepted the request, but shows no template for it."
            )
        api = self._api
        groups: dict[str, compute_v1.InstanceGroupManager] = {}
        for name in _group_names(template):
            group = api.find(api.groups.get, zone=template.zone, instance_group_manager=name)
            if group is not None:
                groups[name] = group
        request = compute_v1.ListInstancesRequest(
            zone=template.zone, filter=f'labels.{POD_LABEL} = "{template.name}"'
        )
        return self._described(template, groups, api.list_all(api.instances.list, request))

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
        """Return why a group's machines were not created at the last try."""
        request = compute_v1.ListManagedInstancesInstanceGroupManagersRequest(
            zone=zone, instance_group_manager=group
        )
        managed = self._api.list_all(self._api.groups.list_managed_instances, request)
        return [error for machine in managed for error in machine.last_attempt.errors.errors]

    def _events(self, template: Asked) -> "list[compute_v1.Operation]":
        """Return Google's operations on a pod's machines."""
        request = compute_v1.ListZoneOperationsRequest(
            zone=template.zone, filter=f'targetLink eq ".*/instances/{template.name}-s[0-9]+-.*"'
        )
        return self._api.list_all(self._api.zone_operations.list, request)


def _group_names(template: Asked) -> "list[str]":
    return [group_name(template.name, index) for index in range(template.slice.num_slices)]


def _region_of(zone: str) -> str:
    return zone.rpartition("-")[0]
