"""Errors of the Kubernetes API in our words, with what to do next."""

import json
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException

from ....errors import PodUnavailable, ProviderError, TPUBackendError
from ...manifests.reading import at, mapping

INSTALL_JOBSET = (
    "kubectl apply --server-side -f "
    "https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)


CANNOT_ANSWER = (429, 500, 503, 504)


class Unanswered(ProviderError):
    """No answer came, so what was asked for may have been done or not."""


def status_of(error: ApiException) -> dict[str, Any]:
    """Return the Status that an answer carries; empty where it carries none."""
    try:
        said: Any = json.loads(error.body or b"")
    except (ValueError, TypeError):
        return {}
    return dict(mapping(said))


def explain(error: Exception, *, server: str, doing: str) -> TPUBackendError:
    """Return what to raise instead of an error of the client library.

    Args:
        error: What it raised.
        server: The address that was asked.
        doing: What was asked, for example "create jobsets".
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
            f"The namespace's quota is used up: {message}. Free some, or have it raised.",
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
            f"The cluster at {server} does not know what is needed to {doing}: install JobSet "
            f"({INSTALL_JOBSET}) and, for queues, Kueue."
        )
    if code in CANNOT_ANSWER:
        return Unanswered(f"The cluster at {server} cannot answer now ({code}): {message}.")
    return ProviderError(f"The cluster at {server} refused to {doing} ({code}): {message}.")


def _short(reason: object) -> str:
    text = str(reason)
    return text.rpartition(">: ")[2] or text.partition(":")[0]
