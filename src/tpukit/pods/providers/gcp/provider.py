"""Pods as queued resources of the Cloud TPU API."""

import time
import uuid

from google.api_core import exceptions
from google.cloud import tpu_v2

from ....errors import ConfigError, PodUnavailable, ProviderError
from ....hardware import Slice
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...pod import Host, Pod
from ..google.zones import UnknownZone, not_offered
from ..protocol import Capabilities, Command, Gang
from ..ssh.keys import forget_hosts, known_hosts, learn_hosts, own_key
from ..ssh.transport import SSHTransport
from ..terms import check_terms
from .api import PATIENCE_S, CloudTPU
from .failures import is_not_offered
from .maintenance import MaintenanceNotices
from .preflight import find_obstacles
from .reading import as_asked, node_names, read_pod
from .request import (
    CONFIG_TYPES,
    IP_ALIAS,
    NO_FLEX_START,
    NOT_THIS_API,
    accelerator_type,
    queued_resource,
    request_id,
)

DEFAULT_USER = "tpukit"


class CloudTPUProvider:
    """Gives and takes pods by google-cloud-tpu, and reaches their hosts by ssh.

    Pods keep their name: the queued resource has it, and so have its nodes. `launch.endpoint`
    chooses another API than Google's, such as an emulator.
    """

    name = "gcp"

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._api = CloudTPU(launch)
        self._notices = MaintenanceNotices(self._api)
        self._user = launch.ssh_user or DEFAULT_USER
        self.capabilities = Capabilities(
            generations=tuple(CONFIG_TYPES),
            refused={
                "7x": NOT_THIS_API,
                "enable_ip_alias": IP_ALIAS,
                "flex_start": NO_FLEX_START,
                "flex_start_seconds": NO_FLEX_START,
            },
        ).within(launch)

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod; a pod of that name that is there already is returned as it is."""
        check_terms(self.name, self.capabilities, config)
        zone = self._zone_of(config)
        parent = self._api.parent(zone)
        ssh_key = own_key().metadata_line(self._user)
        asked = queued_resource(name, config, self._launch, parent=parent, ssh_key=ssh_key)
        full_name = f"{parent}/queuedResources/{name}"
        key = request_id(self._api.project, zone, name, owner=config.labels.get("owner", ""))
        return self._create(full_name, asked, key, config.slice)

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        queued = self._api.get(f"{self._api.parent(zone)}/queuedResources/{name}")
        return None if queued is None else self._read(queued)

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods of the project, in every zone, or those with an owner's label."""
        queued, nodes = self._api.list_everywhere()
        notices = self._notices.look(nodes)
        pods = (read_pod(one, nodes, notices=notices) for one in queued)
        return [
            pod
            for pod in pods
            if pod is not None and (owner is None or pod.labels.get("owner") == owner)
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod in whatever state it is; one that is not there is no error."""
        full_name = f"{self._api.parent(zone)}/queuedResources/{name}"
        request = tpu_v2.DeleteQueuedResourceRequest(name=full_name, force=True)

        def call(timeout_s: float) -> None:
            try:
                self._api.client.delete_queued_resource(request, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return
            except exceptions.FailedPrecondition:
                # Someone deletes it already, as far as the API's words can be trusted.
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
        """Return the argument list that logs in to a host."""
        return self._transport(pod).login(host)

    def _transport(self, pod: Pod) -> SSHTransport:
        return SSHTransport(
            pod.name,
            user=self._user,
            key_file=own_key().private_file,
            known_hosts=known_hosts(pod.name, pod.created_at or 0.0),
            told_hosts=learn_hosts(pod, lambda host: self._api.host_keys(host, zone=pod.zone)),
            config=self._launch.ssh_config,
        )

    def preflight(self, config: PodConfig) -> "list[DoctorFinding]":
        """Say what would stand in the way of a pod, without asking for one."""
        return find_obstacles(self._api, config, self._zone_of)

    def _zone_of(self, config: PodConfig) -> str:
        zones = config.zones or tuple(filter(None, (self._launch.zone, *self._launch.zones)))
        if not zones:
            raise ConfigError("Say in which zone to ask: launch.zone, such as us-east5-b.")
        return zones[0]

    def _read(self, queued: tpu_v2.QueuedResource) -> Pod:
        nodes = self._api.nodes(node_names(queued)) if _has_nodes(queued) else {}
        pod = read_pod(queued, nodes, notices=self._notices.look(nodes))
        if pod is None:
            raise ProviderError(
                f"{queued.name} is there and is no pod of tpukit's: it has "
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

    def _create(self, full_name: str, asked: tpu_v2.QueuedResource, key: str, where: Slice) -> Pod:
        """Create a queued resource, or return the one that is there.

        A lost reply is asked for again with the same key, which the API knows. A key that it knows
        from a pod that was deleted since gives nothing, and then another one is used.
        """
        deadline = time.monotonic() + PATIENCE_S
        for attempt_key in (key, str(uuid.uuid4())):
            try:
                is_under_way = self._send(full_name, asked, attempt_key, deadline)
            except UnknownZone as error:
                raise error.among(self._api.zones()) from error
            except PodUnavailable as error:
                if is_not_offered(error):
                    raise self._not_offered(error, where) from error
                raise
            if is_under_way:
                # Nothing more can be seen of it now, and a quota of calls is not spent on looking.
                return self._read(as_asked(full_name, asked))
            if (queued := self._api.get(full_name, deadline=deadline)) is not None:
                return self._read(queued)
        raise ProviderError(f"Cloud TPU took the request for {full_name} and does not show it.")

    def _send(
        self, full_name: str, asked: tpu_v2.QueuedResource, key: str, deadline: float
    ) -> bool:
        """Send a request; tell whether the pod is being made, and not there or gone already."""
        parent, _, queued_id = full_name.rpartition("/queuedResources/")
        request = tpu_v2.CreateQueuedResourceRequest(
            parent=parent, queued_resource_id=queued_id, queued_resource=asked, request_id=key
        )

        def call(timeout_s: float) -> bool:
            try:
                # Not waited for: what it does is seen at the queued resource itself.
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
