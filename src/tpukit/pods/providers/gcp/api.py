"""Google's client with our patience: every call has a deadline, and every error a way out."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud import tpu_v2, tpu_v2alpha1

from ....errors import ConfigError, ProviderError, TPUError
from ....job.sections import LaunchSettings
from ...pod import Host
from ..google.project import HOST_KEYS, GoogleProject
from .failures import explained, is_silence
from .reading import node_key

PATIENCE_S = 4.0
"""How long one question may take with all its calls: errors come within 5 s."""
PAUSES_S = (0.1, 0.3, 0.6)
"""Before each further try, where nobody answered."""
ALL_ZONES = "-"
PAGE = 1000
T = TypeVar("T")


class CloudTPU(GoogleProject):
    """The Cloud TPU API for one project.

    Args:
        launch: Project, credentials and endpoint.
    """

    default_endpoint = tpu_v2.TpuClient.DEFAULT_ENDPOINT

    def __init__(self, launch: LaunchSettings) -> None:
        super().__init__(launch)
        self._lists_all_zones = True

    def parent(self, zone: str) -> str:
        """Return the API's name of a zone."""
        return f"projects/{self.project}/locations/{zone}"

    # Credentials are passed by hand, always: without them the client would look for some.

    @cached_property
    def client(self) -> tpu_v2.TpuClient:
        """The client of version 2."""
        return tpu_v2.TpuClient(
            credentials=self.identity.credentials, client_options={"api_endpoint": self.endpoint}
        )

    @cached_property
    def alpha(self) -> tpu_v2alpha1.TpuClient:
        """The client of version 2alpha1, which alone shows maintenance and reservations."""
        return tpu_v2alpha1.TpuClient(
            credentials=self.identity.credentials, client_options={"api_endpoint": self.endpoint}
        )

    def ask(self, call: Callable[[float], T], *, deadline: float | None = None) -> T:
        """Make a call that may be made twice, and make it again where nobody answers.

        Args:
            call: Takes the seconds it may last.
            deadline: By `time.monotonic()`; `PATIENCE_S` from now where none is given.

        Raises:
            ProviderError: Nobody answers, or whoever asks is refused.
        """
        deadline = time.monotonic() + PATIENCE_S if deadline is None else deadline
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                return call(max(0.2, deadline - time.monotonic()))
            except exceptions.GoogleAPICallError as error:
                pause_s = next(pauses_s, None) if is_silence(error) else None
                if pause_s is None or time.monotonic() + pause_s > deadline:
                    raise self._explained(error) from error
            except auth_exceptions.GoogleAuthError as error:
                raise self._explained(error) from error
            time.sleep(pause_s)

    def _explained(self, error: Exception) -> TPUError:
        return explained(error, source=self.identity.source, endpoint=self.endpoint)

    def get(self, name: str, *, deadline: float | None = None) -> tpu_v2.QueuedResource | None:
        """Return a queued resource by its full name, or None."""

        def call(timeout_s: float) -> tpu_v2.QueuedResource | None:
            try:
                return self.client.get_queued_resource(name=name, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return None

        return self.ask(call, deadline=deadline)

    def nodes(self, names: Iterable[str]) -> dict[tuple[str, str], tpu_v2.Node]:
        """Return those nodes that are there, by `node_key`."""
        found: dict[tuple[str, str], tpu_v2.Node] = {}
        for name in names:

            def call(timeout_s: float, name: str = name) -> tpu_v2.Node | None:
                try:
                    return self.client.get_node(name=name, retry=None, timeout=timeout_s)
                except exceptions.NotFound:
                    return None

            node = self.ask(call)
            if node is not None:
                found[node_key(name)] = node
        return found

    def list_everywhere(
        self,
    ) -> tuple[list[tpu_v2.QueuedResource], dict[tuple[str, str], tpu_v2.Node]]:
        """Return all queued resources of the project, and all nodes by `node_key`."""
        if self._lists_all_zones:
            try:
                queued = self.list_queued(ALL_ZONES)
                return queued, self.list_nodes(ALL_ZONES) if queued else {}
            except ConfigError:
                # Other APIs of Google take "-" for all zones; of this one it is not documented.
                self._lists_all_zones = False
        zones = self.zones()
        with ThreadPoolExecutor(max_workers=len(zones) or 1) as pool:
            queued = [one for found in pool.map(self.list_queued, zones) for one in found]
            used = {one.name.split("/")[3] for one in queued}
            nodes: dict[tuple[str, str], tpu_v2.Node] = {}
            for found in pool.map(self.list_nodes, used):
                nodes.update(found)
        return queued, nodes

    def list_queued(self, zone: str) -> list[tpu_v2.QueuedResource]:
        """Return all queued resources of a zone, or of all zones for "-".

        Raises:
            ProviderError: Some zones could not be seen: what is there must not be taken for gone.
        """

        def call(timeout_s: float) -> list[tpu_v2.QueuedResource]:
            found: list[tpu_v2.QueuedResource] = []
            request = tpu_v2.ListQueuedResourcesRequest(parent=self.parent(zone), page_size=PAGE)
            pager = self.client.list_queued_resources(request, retry=None, timeout=timeout_s)
            for page in pager.pages:
                _check_reachable(page.unreachable)
                found += page.queued_resources
            return found

        return self.ask(call)

    def list_nodes(self, zone: str) -> dict[tuple[str, str], tpu_v2.Node]:
        """Return all nodes of a zone, or of all zones for "-", by `node_key`."""

        def call(timeout_s: float) -> dict[tuple[str, str], tpu_v2.Node]:
            found: dict[tuple[str, str], tpu_v2.Node] = {}
            request = tpu_v2.ListNodesRequest(parent=self.parent(zone), page_size=PAGE)
            pager = self.client.list_nodes(request, retry=None, timeout=timeout_s)
            for page in pager.pages:
                _check_reachable(page.unreachable)
                found.update({node_key(node.name): node for node in page.nodes})
            return found

        return self.ask(call)

    def host_keys(self, host: Host, *, zone: str) -> list[str]:
        """Return the ssh keys that a host has published in its guest attributes; none before."""
        node = f"{self.parent(zone)}/nodes/{host.name.rpartition('-w')[0]}"
        request = tpu_v2.GetGuestAttributesRequest(
            name=node, query_path=HOST_KEYS, worker_ids=[str(host.worker_id)]
        )

        def call(timeout_s: float) -> list[str]:
            try:
                reply = self.client.get_guest_attributes(request, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return []
            items = [item for one in reply.guest_attributes for item in one.query_value.items]
            return [f"{item.key} {item.value}" for item in items]

        return self.ask(call)

    def types_in(self, zone: str) -> list[str]:
        """Return the accelerator types of a zone."""

        def call(timeout_s: float) -> list[str]:
            found = self.client.list_accelerator_types(
                parent=self.parent(zone), retry=None, timeout=timeout_s
            )
            return sorted(one.type_ for one in found)

        return self.ask(call)

    def zones(self) -> list[str]:
        """Return the zones in which the project may ask."""

        def call(timeout_s: float) -> list[str]:
            reply = self.client.list_locations(
                {"name": f"projects/{self.project}"}, retry=None, timeout=timeout_s
            )
            return sorted(one.location_id for one in reply.locations)

        return self.ask(call)


def _check_reachable(unreachable: Iterable[str]) -> None:
    if missing := sorted(unreachable):
        raise ProviderError(
            f"Cloud TPU cannot see {', '.join(missing)} now, so its list is not whole; ask again "
            "later, or name the zones in launch.zones."
        )
