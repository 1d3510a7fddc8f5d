"""Pods as queued resources of the Cloud TPU API."""

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping

from google.api_core import exceptions
from google.cloud import tpu_v2, tpu_v2alpha1

from ....errors import ConfigError, PodUnavailable, ProviderError, TPUError, did_you_mean
from ....hardware import Slice, list_chips
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...pod import Host, Pod
from ..google import UnknownZone, not_offered
from ..protocol import Capabilities, Command, Gang, check_terms
from ..ssh.transport import SSHTransport, forget_hosts, known_hosts, learn_hosts, own_key
from .api import PAGE, CloudTPU
from .reading import as_requested, is_not_offered, node_key, node_names, read_pod
from .request import (
    CONFIG_TYPES,
    IP_ALIAS,
    NO_FLEX_START,
    NOT_THIS_API,
    SOURCE,
    accelerator_type,
    queued_resource,
    request_id,
    runtime_version,
)

logger = logging.getLogger(__name__)
INTERVAL_S = 60.0
"""Seconds between two queries of a zone; maintenance is announced days ahead."""
_TIMEOUT_S = 2.0

NodeKey = tuple[str, str]


class MaintenanceNotices:
    """Announced maintenance of nodes."""

    def __init__(self, api: CloudTPU) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._looked_at: dict[str, float] = {}
        self._notices: dict[NodeKey, str] = {}  # all nodes queried so far
        self._offered = True

    def look(self, nodes: Collection[NodeKey]) -> Mapping[NodeKey, str]:
        """Return a sentence for each node with announced maintenance.

        Args:
            nodes: Existing nodes. Their zones are queried every minute, and at once for a new node.
        """
        with self._lock:
            for zone in {zone for zone, _ in nodes}:
                here = {key for key in nodes if key[0] == zone}
                age_s = time.monotonic() - self._looked_at.get(zone, float("-inf"))
                if self._offered and (age_s > INTERVAL_S or not here <= self._notices.keys()):
                    self._refresh(zone, here)
            return {key: text for key, text in self._notices.items() if text}

    def _refresh(self, zone: str, here: set[NodeKey]) -> None:
        try:
            notices = self._ask(zone)
        except (exceptions.PermissionDenied, exceptions.MethodNotImplemented) as error:
            logger.warning("Maintenance cannot be queried (%s).", type(error).__name__)
            self._offered = False
            return
        except exceptions.GoogleAPICallError:
            # Keep the last answer; a failed query must not hide running pods.
            notices = {key: text for key, text in self._notices.items() if key[0] == zone}
        self._looked_at[zone] = time.monotonic()
        others = {key: text for key, text in self._notices.items() if key[0] != zone}
        # Lists may be outdated, so missing nodes are not waited for.
        self._notices = others | dict.fromkeys(here, "") | notices

    def _ask(self, zone: str) -> dict[NodeKey, str]:
        request = tpu_v2alpha1.ListNodesRequest(parent=self._api.parent(zone), page_size=PAGE)
        nodes = self._api.alpha.list_nodes(request, retry=None, timeout=_TIMEOUT_S)
        return {node_key(node.name): _notice(node) for node in nodes}


def _notice(node: tpu_v2alpha1.Node) -> str:
    window = node.upcoming_maintenance
    if not window.window_start_time:
        return ""
    return f"maintenance from {window.window_start_time} to {window.window_end_time}"


def find_obstacles(
    api: CloudTPU, config: PodConfig, zone_of: Callable[[PodConfig], str]
) -> list[DoctorFinding]:
    """Return findings until one prevents all further checks."""
    findings: list[DoctorFinding] = []
    try:
        findings.extend(_check(api, config, zone_of))
    except TPUError as error:
        text = str(error)
        findings.append(DoctorFinding("gcp-refused", "environment", "error", text, fix=text))
    return findings


def _check(
    api: CloudTPU, config: PodConfig, zone_of: Callable[[PodConfig], str]
) -> Iterator[DoctorFinding]:
    if shutil.which("ssh") is None:
        yield DoctorFinding(
            *("gcp-ssh", "environment", "error", "ssh is not installed here"),
            fix="Install OpenSSH's client: hosts are reached through it.",
        )
    if not config.enable_ip_alias:
        seen = f"enable_ip_alias=False: {IP_ALIAS}"
        yield DoctorFinding("gcp-ip-alias", "environment", "error", seen, fix="Leave it out.")
    wanted, image = (
        accelerator_type(config.slice),
        runtime_version(config.slice, config.software_version),
    )
    zone = zone_of(config)
    parent = api.parent(zone)
    yield DoctorFinding(
        *("gcp-credentials", "environment", "ok"),
        f"Credentials of {api.identity.source}, project {api.project}",
    )
    types = api.types_in(zone)
    yield DoctorFinding("gcp-zone", "environment", "ok", f"{zone} answers, and grants access")
    yield _offered("gcp-type", f"{zone} offers {wanted}", wanted, types)
    versions = api.ask(
        lambda timeout_s: sorted(
            runtime.version
            for runtime in api.client.list_runtime_versions(
                parent=parent, retry=None, timeout=timeout_s
            )
        )
    )
    chosen = "" if config.software_version else f" (the default, by {SOURCE})"
    yield _offered("gcp-image", f"There is an image {image}{chosen}", image, versions)
    if config.reservation is not None:
        request = tpu_v2alpha1.ListReservationsRequest(parent=parent)
        names = api.ask(
            lambda timeout_s: [
                reservation.name.rsplit("/", 1)[1]
                for reservation in api.alpha.list_reservations(
                    request, retry=None, timeout=timeout_s
                )
            ]
        )
        name = config.reservation.rsplit("/", 1)[-1]
        yield _offered("gcp-reservation", f"There is a reservation {name}", name, names)
    yield DoctorFinding(
        *("gcp-network", "environment", "info"),
        f"Hosts will be in the VPC network {config.network!r} "
        f"{'with' if api.launch.external_addresses else 'without'} external addresses, which this "
        "API does not show: its firewall must allow ssh (port 22) from here, and all ports "
        "between hosts",
    )
    yield _quota(api, zone)


def _offered(id_: str, seen: str, wanted: str, known: list[str]) -> DoctorFinding:
    if wanted in known:
        return DoctorFinding(id_, "resources", "ok", seen)
    return DoctorFinding(
        *(id_, "resources", "error", f"Not so: {seen}"),
        fix=f"Choose another of {', '.join(known) or 'none'}.{did_you_mean(wanted, known)}",
    )


def _quota(api: CloudTPU, zone: str) -> DoctorFinding:
    """The API does not show quota, but pods that hold quota without use can be listed."""
    pods = [read_pod(resource, {}, notices={}) for resource in api.list_queued(zone)]
    lost = [pod for pod in pods if pod is not None and pod.state.is_lost]
    if not lost:
        return DoctorFinding(
            *("gcp-quota", "resources", "info"),
            "This API does not show quota; a request above it is refused at once, with the "
            "limit. Set your project's grant in launch.limits to have it enforced",
        )
    chips = sum(pod.slice.chips for pod in lost)
    return DoctorFinding(
        *("gcp-quota", "resources", "warning"),
        f"{len(lost)} lost pods in {zone} still hold quota for {chips} chips: "
        + ", ".join(pod.name for pod in lost[:5]),
        fix="Delete them: tpukit pods down NAME.",
    )


DEFAULT_USER = "tpukit"


class CloudTPUProvider:
    """Creates and deletes pods with google-cloud-tpu, and reaches their hosts by ssh.

    The queued resource and its nodes have the pod's name. `launch.endpoint` replaces Google's API,
    for example by an emulator.
    """

    name = "gcp"

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._api = CloudTPU(launch)
        self._notices = MaintenanceNotices(self._api)
        self._user = launch.ssh_user or DEFAULT_USER
        self.capabilities = Capabilities(
            generations=tuple(CONFIG_TYPES),
            has_bare_hosts=True,
            refused={
                **{
                    chip.name: NOT_THIS_API
                    for chip in list_chips()
                    if chip.rules and chip.name not in CONFIG_TYPES
                },
                "enable_ip_alias": IP_ALIAS,
                "flex_start": NO_FLEX_START,
                "flex_start_seconds": NO_FLEX_START,
            },
        ).within(launch)

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod; return an existing pod of that name unchanged."""
        check_terms(self.name, self.capabilities, config)
        zone = self._zone_of(config)
        parent = self._api.parent(zone)
        ssh_key = own_key().metadata_line(self._user)
        request = queued_resource(name, config, self._launch, parent=parent, ssh_key=ssh_key)
        full_name = f"{parent}/queuedResources/{name}"
        key = request_id(self._api.project, zone, name, owner=config.labels.get("owner", ""))
        return self._create(full_name, request, key, config.slice)

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        queued = self._api.get(f"{self._api.parent(zone)}/queuedResources/{name}")
        return None if queued is None else self._read(queued)

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods of the project in every zone, or those with an owner's label."""
        queued, nodes = self._api.list_everywhere()
        notices = self._notices.look(nodes)
        pods = (read_pod(resource, nodes, notices=notices) for resource in queued)
        return [
            pod
            for pod in pods
            if pod is not None and (owner is None or pod.labels.get("owner") == owner)
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Delete a pod in any state; a missing pod is no error."""
        full_name = f"{self._api.parent(zone)}/queuedResources/{name}"
        request = tpu_v2.DeleteQueuedResourceRequest(name=full_name, force=True)

        def call(timeout_s: float) -> None:
            try:
                self._api.client.delete_queued_resource(request, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return
            except exceptions.FailedPrecondition:
                # By the API's message, it is already being deleted.
                there = self._api.get(full_name)
                if there is not None and not _is_deleting(there):
                    raise

        self._api.ask(call)
        forget_hosts(name)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host of a ready pod, over ssh."""
        if not pod.is_ready:
            raise ProviderError(f"Pod {pod.name} is {pod.state}, so nothing can run on it.")
        return ProcessGang(pod.hosts, command, self._transport(pod), attempt=attempt)

    def login(self, pod: Pod, host: Host) -> "list[str]":
        """Return the command that logs in to a host, as an argument list."""
        return self._transport(pod).login(host)

    def _transport(self, pod: Pod) -> SSHTransport:
        return SSHTransport(
            pod.name,
            user=self._user,
            key_file=own_key().private_file,
            known_hosts=known_hosts(pod.name, pod.created_at or 0.0),
            told_hosts=learn_hosts(pod, lambda host: self._api.host_keys(host, zone=pod.zone)),
            config=self._launch.ssh_config,
            connect_s=self._launch.connect_timeout_seconds,
            silent_s=self._launch.network_timeout_seconds,
        )

    def preflight(self, config: PodConfig) -> "list[DoctorFinding]":
        """Return what would prevent a pod from being allocated, without requesting one."""
        return find_obstacles(self._api, config, self._zone_of)

    def _zone_of(self, config: PodConfig) -> str:
        zones = config.zones or tuple(filter(None, (self._launch.zone, *self._launch.zones)))
        if not zones:
            raise ConfigError("No zone is set; set launch.zone, for example us-east5-b.")
        return zones[0]

    def _read(self, queued: tpu_v2.QueuedResource) -> Pod:
        nodes = self._api.nodes(node_names(queued)) if _has_nodes(queued) else {}
        pod = read_pod(queued, nodes, notices=self._notices.look(nodes))
        if pod is None:
            raise ProviderError(
                f"{queued.name} exists, but is not a pod of tpukit: it has "
                f"{len(queued.tpu.node_spec)} node specs. Use another name, or delete it."
            )
        return pod

    def _not_offered(self, error: PodUnavailable, where: Slice) -> PodUnavailable:
        wanted = accelerator_type(where)
        return not_offered(
            str(error),
            zones=self._api.zones,
            has_it=lambda zone: wanted in self._api.types_in(zone),
        )

    def _create(
        self, full_name: str, request: tpu_v2.QueuedResource, key: str, where: Slice
    ) -> Pod:
        """Create a queued resource, or return the existing one.

        After a lost reply the call is repeated with the same request id. If that id belongs to a
        pod deleted since, nothing is created, and another id is used.
        """
        deadline = time.monotonic() + self._launch.request_timeout_seconds
        for attempt_key in (key, str(uuid.uuid4())):
            try:
                is_under_way = self._send(full_name, request, attempt_key, deadline)
            except UnknownZone as error:
                raise error.among(self._api.zones()) from error
            except PodUnavailable as error:
                if is_not_offered(error):
                    raise self._not_offered(error, where) from error
                raise
            if is_under_way:
                # A query now would show nothing more, and would cost API quota.
                return self._read(as_requested(full_name, request))
            if (queued := self._api.get(full_name, deadline=deadline)) is not None:
                return self._read(queued)
        raise ProviderError(
            f"Cloud TPU accepted the request for {full_name}, but does not show it."
        )

    def _send(
        self, full_name: str, asked: tpu_v2.QueuedResource, key: str, deadline: float
    ) -> bool:
        """Send a request; return whether the pod is now being created."""
        parent, _, queued_id = full_name.rpartition("/queuedResources/")
        request = tpu_v2.CreateQueuedResourceRequest(
            parent=parent, queued_resource_id=queued_id, queued_resource=asked, request_id=key
        )

        def call(timeout_s: float) -> bool:
            try:
                # The operation is not awaited, because the queued resource itself shows its
                # progress.
                begun = self._api.client.create_queued_resource(
                    request, retry=None, timeout=timeout_s
                )
            except exceptions.AlreadyExists:
                return False
            return not begun.operation.done

        return self._api.ask(call, deadline=deadline)


def _has_nodes(queued: tpu_v2.QueuedResource) -> bool:
    return queued.state.state.name in ("PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED")


def _is_deleting(queued: tpu_v2.QueuedResource) -> bool:
    return queued.state.state.name == "DELETING"
