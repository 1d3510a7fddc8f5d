"""The cluster's API through the unmodified `kubernetes` client, with documents as plain data.

The client's models are not used, because they take seconds to load and lack JobSet.
"""

import json
import os
import random
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import urllib3
from kubernetes import config
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException

from ....errors import PodUnavailable, ProviderError, TPUBackendError
from ....job.sections import LaunchSettings
from ...manifests import names
from ...manifests.reading import at, mapping, sequence

INSTALL_JOBSET = (
    "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)


CANNOT_ANSWER = (429, 500, 503, 504)


class Unanswered(ProviderError):
    """No answer came, so that the call may or may not have taken effect."""


class NoKubeconfig(ProviderError):
    """This machine does not know a cluster."""


def status_of(error: ApiException) -> dict[str, Any]:
    """Return the Status object of an answer, or an empty one."""
    try:
        status: Any = json.loads(error.body or b"")
    except (ValueError, TypeError):
        return {}
    return dict(mapping(status))


def explain(error: Exception, *, server: str, doing: str) -> TPUBackendError:
    """Translate an error of the client library to tpukit's.

    Args:
        error: The library's error.
        server: The server's address.
        doing: The action, for example "create jobsets".
    """
    if isinstance(error, ApiException):
        return _refused(error, server, doing)
    reason: Any = getattr(error, "reason", None) or error
    if isinstance(reason, urllib3.exceptions.SSLError):
        return ProviderError(
            f"The certificate of the cluster at {server} cannot be trusted ({_short(reason)}); "
            "fetch its kubeconfig again (gcloud container clusters get-credentials)."
        )
    return Unanswered(
        f"The cluster at {server} cannot be reached ({_short(reason)}); check the network, the "
        "address in the kubeconfig, and that the cluster runs."
    )


def _refused(error: ApiException, server: str, doing: str) -> TPUBackendError:
    status = status_of(error)
    message = str(status.get("message") or error.reason)
    code = error.status or 0
    if code == 401:
        return ProviderError(
            f"The cluster at {server} does not accept the credentials (401). Sign in again "
            "(gcloud auth login), see that gke-gcloud-auth-plugin is installed, or choose another "
            "context (launch.context)."
        )
    if code == 403 and "exceeded quota" in message:
        return PodUnavailable(
            f"The namespace's quota is used up: {message}. Free some quota, or request more.",
            cause="quota",
        )
    if code == 403:
        return ProviderError(
            f"Not allowed to {doing} in the cluster at {server} (403): {message}. Ask for a role "
            "that may, or choose another namespace (launch.namespace)."
        )
    if code == 404 and at(status, "details", "kind") == "namespaces":
        name = at(status, "details", "name")
        return ProviderError(
            f"There is no namespace {name!r} in the cluster at {server}; set launch.namespace, or "
            f"make it: kubectl create namespace {name}."
        )
    if code == 404 and "could not find the requested resource" in message:
        return ProviderError(
            f"The cluster at {server} lacks what is needed to {doing}: install JobSet "
            f"({INSTALL_JOBSET}) and, for queues, Kueue."
        )
    if code in CANNOT_ANSWER:
        return Unanswered(f"The cluster at {server} cannot answer now ({code}): {message}.")
    return ProviderError(f"The cluster at {server} refused to {doing} ({code}): {message}.")


def _short(reason: object) -> str:
    text = str(reason)
    return text.rpartition(">: ")[2] or text.partition(":")[0]


Object = dict[str, Any]

CONNECT_S = 10.0
RECONNECT_S = 0.5  # for calls that reach nobody; a machine without network is told so soon
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
STREAM_S = 60.0  # a stream that is silent for so long is reopened
MOST_CONNECTIONS = 512

JOBSETS = f"/apis/{names.JOBSET_API}"
CORE = "/api/v1"


class ClusterApi:
    """Calls to one cluster, usable from any thread.

    Args:
        launch: Has the kubeconfig context, and optionally another address.
    """

    def __init__(self, launch: LaunchSettings) -> None:
        self.namespace = launch.namespace
        self._context, self._endpoint = launch.context, launch.endpoint
        self.timeout_s = launch.cluster_timeout_seconds
        self._lock = threading.Lock()
        self._client: ApiClient | None = None
        self._kueue: str | None = None

    @property
    def server(self) -> str:
        """The address of the cluster."""
        return self._endpoint or str(self._loaded().configuration.host)

    def get(self, path: str, **query: str) -> Object | None:
        """Return an object, or None if it does not exist.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
        """
        try:
            return self._call("GET", path, query=query)
        except ApiException as error:
            if error.status == 404 and at(status_of(error), "details", "name"):
                return None
            raise explain(error, server=self.server, doing=f"get {_what(path)}") from None

    def offers(self, path: str) -> bool:
        """Return whether the cluster has an API version, such as JobSet's.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
        """
        try:
            self._call("GET", path)
        except ApiException as error:
            if error.status == 404:
                return False
            raise explain(error, server=self.server, doing="read its kinds") from None
        return True

    @property
    def kueue(self) -> str | None:
        """The best version of Kueue's API that the cluster serves; None if Kueue is missing.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
        """
        if self._kueue is None:
            try:
                group = self._call("GET", f"/apis/{names.KUEUE_GROUP}")
            except ApiException as error:
                if error.status == 404:
                    return None
                raise explain(error, server=self.server, doing="read its kinds") from None
            served = {at(version, "version") for version in sequence(group.get("versions"))}
            self._kueue = next((one for one in names.KUEUE_VERSIONS if one in served), None)
        return self._kueue

    def list(self, path: str, **query: str) -> tuple[list[Object], str]:
        """Return all objects under a path, and the list's resource version.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
        """
        objects: list[Object] = []
        more = ""
        with self._explained(f"list {_what(path)}"):
            while True:
                page = self._call("GET", path, query={"limit": "500", **query, **_continue(more)})
                objects += page.get("items") or []
                metadata = page["metadata"]
                more = metadata.get("continue") or ""
                if not more:
                    return objects, str(metadata.get("resourceVersion", ""))

    def list_workloads(self) -> Sequence[Object]:
        """Return Kueue's Workloads in the namespace; none if Kueue is missing.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
        """
        if self.kueue is None:
            return []
        group = f"/apis/{names.KUEUE_GROUP}/{self.kueue}"
        return self.list(f"{group}/namespaces/{self.namespace}/workloads")[0]

    def create(self, path: str, body: Object, *, is_dry_run: bool = False) -> Object | None:
        """Create an object; return None if one of that name exists.

        The server refuses fields that it does not know, instead of dropping them.

        Args:
            path: Path of the list to which it is added.
            body: The object.
            is_dry_run: Whether the server only checks and completes the object.

        Raises:
            ProviderError: The cluster cannot be reached, or refuses the request.
            PodUnavailable: A quota is used up.
        """
        try:
            query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if is_dry_run else {})
            return self._call("POST", path, query=query, body=body)
        except ApiException as error:
            if error.status == 409:
                return None
            raise explain(error, server=self.server, doing=f"create {_what(path)}") from None

    def patch(self, path: str, body: Object) -> None:
        """Merge a change into an object; a missing object is no error."""
        try:
            self._call("PATCH", path, body=body, content_type="application/merge-patch+json")
        except ApiException as error:
            if error.status != 404:
                raise explain(error, server=self.server, doing=f"patch {_what(path)}") from None

    def delete(
        self, path: str, *, propagation: str = "Background", grace_s: int | None = None
    ) -> bool:
        """Delete an object, and return whether it existed; a missing object is no error."""
        options: Object = {"propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self._call("DELETE", path, body=options)
        except ApiException as error:
            if error.status != 404:
                raise explain(error, server=self.server, doing=f"delete {_what(path)}") from None
            return False
        return True

    def stream(self, path: str, **query: str) -> "Stream":
        """Open a streaming answer: a watch or a log.

        Raises:
            ApiException: The server refused the request.
            ProviderError: The cluster cannot be reached.
        """
        return Stream(self._send("GET", path, query=query, timeout_s=(CONNECT_S, STREAM_S)))

    def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            self._client.rest_client.pool_manager.clear()

    @contextmanager
    def _explained(self, doing: str) -> Generator[None]:
        try:
            yield
        except ApiException as error:
            raise explain(error, server=self.server, doing=doing) from None

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Make a call, and retry it if the server is busy, or if it is idempotent."""
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        is_idempotent = method in ("GET", "DELETE", "PATCH")
        while True:
            limit_s = self.timeout_s
            try:
                response = self._send(
                    method, path, query=query, body=body, content_type=content_type
                )
                text = response.data.decode("utf-8", errors="replace")
                return json.loads(text) if text else {}
            except urllib3.exceptions.HTTPError as error:
                failure = explain(error, server=self.server, doing=f"{method} {_what(path)}")
            except ApiException as error:
                if error.status not in CANNOT_ANSWER:
                    raise
                failure = error
                is_idempotent = is_idempotent or error.status == 429  # it was not begun
            except Unanswered as error:
                failure = error
                limit_s = min(limit_s, RECONNECT_S)
            if not is_idempotent or time.monotonic() + pause_s > began + limit_s:
                raise failure
            time.sleep(pause_s * random.uniform(0.7, 1.3))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        timeout_s: tuple[float, float] | None = None,
    ) -> urllib3.HTTPResponse:
        client = self._loaded()
        timeout_s = timeout_s or (CONNECT_S, self.timeout_s)
        request: Any = client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
            # Not part of the configuration, because the client rereads its address with its token.
            _host=self._endpoint,
        )
        try:
            answer: Any = client.call_api(*request, _request_timeout=timeout_s)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise explain(error, server=self.server, doing=f"{method} {_what(path)}") from None
        if not 200 <= answer.status <= 299:
            raise ApiException(
                status=answer.status, reason=answer.reason, body=answer.response.data
            )
        return answer.response

    def _loaded(self) -> ApiClient:
        with self._lock:
            if self._client is None:
                self._client = ApiClient(self._configuration())
            return self._client

    def _configuration(self) -> Configuration:
        """Load the kubeconfig, or the configuration of a Pod inside the cluster."""
        configuration = Configuration()
        failures: list[Exception] = []

        def load() -> None:
            try:
                if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                    config.load_incluster_config(client_configuration=configuration)
                else:
                    config.load_kube_config(
                        config_file=os.environ.get("KUBECONFIG") or None,
                        context=self._context,
                        client_configuration=configuration,
                        persist_config=False,
                    )
            except (config.ConfigException, OSError, TypeError, KeyError) as error:
                failures.append(error)

        # In a thread, because a credential plugin may wait for a server that does not answer.
        loading = threading.Thread(target=load, name="tpukit-kubeconfig", daemon=True)
        loading.start()
        loading.join(self.timeout_s)
        if loading.is_alive():
            raise ProviderError(
                f"The kubeconfig's plugin for credentials did not answer within {self.timeout_s:g} "
                "s; run gke-gcloud-auth-plugin by hand to see why, or raise "
                "launch.cluster_timeout_seconds."
            )
        if failures:
            raise NoKubeconfig(
                f"There is no usable kubeconfig ({failures[0]}); fetch one with gcloud container "
                "clusters get-credentials, and name it in KUBECONFIG or its context in "
                "launch.context."
            )
        configuration.retries = 0  # the caller decides on retries
        configuration.connection_pool_maxsize = MOST_CONNECTIONS
        return configuration


class Stream:
    """Lines of a streaming answer."""

    def __init__(self, response: urllib3.HTTPResponse) -> None:
        self._response = response

    def lines(self) -> Iterator[str]:
        """Yield lines as they come, until the answer ends or the connection breaks."""
        rest = b""
        try:
            for part in self._response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return  # a partial line is sent again later
        finally:
            self.close()
        if rest:
            yield rest.decode("utf-8", errors="replace")

    def interrupt(self) -> None:
        """End `lines` from another thread."""
        with suppress(OSError, ValueError, RuntimeError, urllib3.exceptions.HTTPError):
            self._response.shutdown()

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        self._response.release_conn()


def _what(path: str) -> str:
    parts = path.split("/")
    if "namespaces" in parts[:-2]:
        return parts[parts.index("namespaces") + 2]
    return parts[3] if path.startswith(CORE) else parts[4] if len(parts) > 4 else path


def _continue(token: str) -> dict[str, str]:
    return {"continue": token} if token else {}
