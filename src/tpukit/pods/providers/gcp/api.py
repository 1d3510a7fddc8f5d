"""The Cloud TPU client, with a deadline for every call and an explained error."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from google.api_core import exceptions
from google.cloud import tpu_v2, tpu_v2alpha1

from ....errors import ConfigError, ProviderError, TPUError
from ....job.sections import LaunchSettings
from ...pod import Host
from ..google import HOST_KEYS, GoogleProject
from .reading import explained, is_silence, node_key

ALL_ZONES = "-"
PAGE = 1000
T = TypeVar("T")


class CloudTPU(GoogleProject):
    """The Cloud TPU API for one project.

    Args:
        launch: Has the project, credentials and endpoint.
    """

    default_endpoint = tpu_v2.TpuClient.DEFAULT_ENDPOINT

    def __init__(self, launch: LaunchSettings) -> None:
        super().__init__(launch)
        self._lists_all_zones = True

    def parent(self, zone: str) -> str:
        """Return the API's resource name of a zone."""
        return f"projects/{self.project}/locations/{zone}"

    # Credentials are always passed explicitly, because the client would search for others.

    @cached_property
    def client(self) -> tpu_v2.TpuClient:
        """The client of version 2."""
        return tpu_v2.TpuClient(
            credentials=self.identity.credentials, client_options={"api_endpoint": self.endpoint}
        )

    @cached_property
    def alpha(self) -> tpu_v2alpha1.TpuClient:
        """The client of version 2alpha1, the only one with maintenance and reservations."""
        return tpu_v2alpha1.TpuClient(
            credentials=self.identity.credentials, client_options={"api_endpoint": self.endpoint}
        )

    def is_silence(self, error: Exception) -> bool:
        """Return whether no answer came."""
        return is_silence(error)

    def explain(self, error: Exception) -> TPUError:
        """Translate an error of the client to tpukit's."""
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
        """Return the existing nodes by `node_key`."""
        nodes: dict[tuple[str, str], tpu_v2.Node] = {}
        for name in names:

            def call(timeout_s: float, name: str = name) -> tpu_v2.Node | None:
                try:
                    return self.client.get_node(name=name, retry=None, timeout=timeout_s)
                except exceptions.NotFound:
                    return None

            node = self.ask(call)
            if node is not None:
                nodes[node_key(name)] = node
        return nodes

    def list_everywhere(
        self,
    ) -> tuple[list[tpu_v2.QueuedResource], dict[tuple[str, str], tpu_v2.Node]]:
        """Return all queued resources of the project, and all nodes by `node_key`."""
        if self._lists_all_zones:
            try:
                queued = self.list_queued(ALL_ZONES)
                return queued, self.list_nodes(ALL_ZONES) if queued else {}
            except ConfigError:
                # Google's other APIs accept "-" for all zones; this API does not document it.
                self._lists_all_zones = False
        zones = self.zones()
        with ThreadPoolExecutor(max_workers=len(zones) or 1) as pool:
            queued = [
                resource
                for resources in pool.map(self.list_queued, zones)
                for resource in resources
            ]
            used = {resource.name.split("/")[3] for resource in queued}
            nodes: dict[tuple[str, str], tpu_v2.Node] = {}
            for resources in pool.map(self.list_nodes, used):
                nodes.update(resources)
        return queued, nodes

    def list_queued(self, zone: str) -> list[tpu_v2.QueuedResource]:
        """Return all queued resources of a zone, or of all zones for "-".

        Raises:
            ProviderError: Some zones could not be listed, and their pods must not be taken for
                deleted.
        """

        def call(timeout_s: float) -> list[tpu_v2.QueuedResource]:
            resources: list[tpu_v2.QueuedResource] = []
            request = tpu_v2.ListQueuedResourcesRequest(parent=self.parent(zone), page_size=PAGE)
            pager = self.client.list_queued_resources(request, retry=None, timeout=timeout_s)
            for page in pager.pages:
                _check_reachable(page.unreachable)
                resources += page.queued_resources
            return resources

        return self.ask(call)

    def list_nodes(self, zone: str) -> dict[tuple[str, str], tpu_v2.Node]:
        """Return all nodes of a zone, or of all zones for "-", by `node_key`."""

        def call(timeout_s: float) -> dict[tuple[str, str], tpu_v2.Node]:
            nodes: dict[tuple[str, str], tpu_v2.Node] = {}
            request = tpu_v2.ListNodesRequest(parent=self.parent(zone), page_size=PAGE)
            pager = self.client.list_nodes(request, retry=None, timeout=timeout_s)
            for page in pager.pages:
                _check_reachable(page.unreachable)
                nodes.update({node_key(node.name): node for node in page.nodes})
            return nodes

        return self.ask(call)

    def host_keys(self, host: Host, *, zone: str) -> list[str]:
        """Return the ssh keys that a host has published in its guest attributes, if any."""
        node = f"{self.parent(zone)}/nodes/{host.name.rpartition('-w')[0]}"
        request = tpu_v2.GetGuestAttributesRequest(
            name=node, query_path=HOST_KEYS, worker_ids=[str(host.worker_id)]
        )

        def call(timeout_s: float) -> list[str]:
            try:
                reply = self.client.get_guest_attributes(request, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return []
            items = [
                item
                for attributes in reply.guest_attributes
                for item in attributes.query_value.items
            ]
            return [f"{item.key} {item.value}" for item in items]

        return self.ask(call)

    def types_in(self, zone: str) -> list[str]:
        """Return the accelerator types of a zone."""

        def call(timeout_s: float) -> list[str]:
            types = self.client.list_accelerator_types(
                parent=self.parent(zone), retry=None, timeout=timeout_s
            )
            return sorted(accelerator.type_ for accelerator in types)

        return self.ask(call)

    def zones(self) -> list[str]:
        """Return the zones that are available to the project."""

        def call(timeout_s: float) -> list[str]:
            reply = self.client.list_locations(
                {"name": f"projects/{self.project}"}, retry=None, timeout=timeout_s
            )
            return sorted(location.location_id for location in reply.locations)

        return self.ask(call)


def _check_reachable(unreachable: Iterable[str]) -> None:
    if missing := sorted(unreachable):
        raise ProviderError(
            f"Cloud TPU cannot list {', '.join(missing)} now, so its list is incomplete; try "
            "again later, or name the zones in launch.zones."
        )
