"""Log in to the hosts of a pod."""

from collections.abc import Callable, Sequence

from ..errors import ConfigError, PodUnavailable, TPUValidationError, did_you_mean
from .providers.protocol import Provider, Reachable
from .providers.registry import open_provider
from .store import ProviderRecord, Store


def ssh_command(
    store: Store,
    name: str,
    host: int,
    *,
    opener: Callable[[ProviderRecord], Provider] | None = None,
) -> Sequence[str]:
    """Return the command that logs in to a host of a pod, as an argument list without a shell.

    Args:
        store: The store that lists the pod.
        name: Name of the run or the pod.
        host: Number of the host, from 0.
        opener: Opens a provider from its record.

    Raises:
        TPUValidationError: There is no such pod or host.
        PodUnavailable: The pod is not ready.
        ConfigError: The provider has no ssh access to its hosts.
    """
    row = store.wanted.find_by_any_name(name)
    if row is None:
        known = [row.name for row in store.wanted.all()]
        raise TPUValidationError(
            f"There is no pod {name!r}; the store has {', '.join(known) or 'none'}."
            + did_you_mean(name, known)
        )
    record = store.wanted.providers()[row.provider]
    provider = opener(record) if opener else open_provider(record.name, record.launch)
    if not isinstance(provider, Reachable):
        raise ConfigError(
            f"Hosts of {record.name!r} have no ssh access, because they are processes of this "
            "machine."
            if record.name == "local"
            else f"Hosts of {record.name!r} have no ssh access."
        )
    pod = None if row.zone is None else provider.get(row.pod_name, zone=row.zone)
    if pod is None or not pod.is_ready:
        raise PodUnavailable(f"{row.pod_name} is not ready; see its state with tpukit pods ls.")
    if host >= len(pod.hosts):
        raise TPUValidationError(
            f"{pod.name} has no host {host}; it has 0 to {len(pod.hosts) - 1}."
        )
    return provider.login(pod, pod.hosts[host])
