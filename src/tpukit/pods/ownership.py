"""The guard between a store and its provider: a store touches only pods with its own owner label.

Two stores may ask one project for pods of the same name, for example when two people launch the
same job file. Providers know pods by name alone, so every reply is compared with the store's label
here: another store's pod is never adopted and never deleted.
"""

from collections.abc import Sequence

from ..errors import ConfigError
from ..runtime.doctor.finding import DoctorFinding
from .config import PodConfig
from .pod import Pod
from .providers.protocol import Capabilities, Command, Gang, Provider

OWNER = "owner"


class OwnedProvider:
    """Passes calls to a provider on behalf of one store.

    Args:
        inner: The provider.
        owner: The store's label.
    """

    def __init__(self, inner: Provider, owner: str) -> None:
        self._inner, self._owner = inner, owner
        self.name = inner.name

    @property
    def capabilities(self) -> Capabilities:
        """What the provider offers."""
        return self._inner.capabilities

    def is_ours(self, pod: Pod) -> bool:
        """Whether the store asked for a pod."""
        return pod.labels.get(OWNER) == self._owner

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod with the store's label.

        Raises:
            ConfigError: Another store, or a person, has a pod of that name there.
        """
        owned = config.with_labels(**{OWNER: self._owner})
        pod = self._inner.create(name, owned, command=command)
        if not self.is_ours(pod):
            raise ConfigError(
                f"A pod named {name!r} exists in {pod.zone or 'this place'} already and belongs to "
                f"{pod.labels.get(OWNER) or 'an unknown owner'}, not to this store; choose another "
                "name (--name)."
            )
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the store's pod of that name, or None where there is none."""
        pod = self._inner.get(name, zone=zone)
        return pod if pod is not None and self.is_ours(pod) else None

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods, or those with an owner's label."""
        return self._inner.list(owner=owner)

    def delete(self, name: str, *, zone: str) -> None:
        """Delete the store's pod of that name, and what is left of one whose creation failed."""
        pod = self._inner.get(name, zone=zone)
        if pod is None or self.is_ours(pod):
            self._inner.delete(name, zone=zone)

    def delete_seen(self, pod: Pod) -> None:
        """Delete a pod that the provider has just shown, without asking for it once more."""
        assert self.is_ours(pod), pod.name
        self._inner.delete(pod.name, zone=pod.zone)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host."""
        return self._inner.start(pod, command, attempt=attempt)

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Return what would stand in the way of a pod."""
        return self._inner.preflight(config)
