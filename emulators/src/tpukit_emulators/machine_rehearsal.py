"""What the rehearsals of clouds that give machines have in common: hosts reached by ssh."""

from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from .control import Cloud, ControlPort
from .faults import Faults
from .hosts import EmulatedHosts
from .identity import Account
from .world import World


class MachineAPI(Protocol):
    """An emulated API that gives machines."""

    project: str
    endpoint: str
    owner: Account
    faults: Faults

    @property
    def cloud(self) -> Cloud:
        """What it gives and takes."""
        ...

    def close(self) -> None:
        """End it."""
        ...


USUAL = "v6e"
API = TypeVar("API", bound=MachineAPI)


class MachineRehearsal(Generic[API]):
    """An emulated API whose machines run real processes here.

    Args:
        api: The API.
        world: What there is to be had.
        hosts: The machines behind it.
        control_port: Where the world is told what to do, over HTTP; 0 for any, None for nowhere.
    """

    provider: ClassVar[str]

    def __init__(
        self, api: API, world: World, hosts: EmulatedHosts, *, control_port: int | None
    ) -> None:
        self.api, self.world, self.hosts = api, world, hosts
        self.control = None
        if control_port is not None:
            self.control = ControlPort(api.cloud, api.faults, port=control_port)

    @property
    def zones(self) -> list[str]:
        """Its zones, first those with the generation that examples ask for."""
        return sorted(
            self.world.zones, key=lambda name: USUAL not in self.world.zones[name].capacity
        )

    @property
    def offers(self) -> list[str]:
        """What each zone has, in words."""
        return [f"{name}: {', '.join(self.world.zones[name].capacity)}" for name in self.zones]

    @property
    def settings(self) -> dict[str, Any]:
        """What a job's `launch:` section says to launch here."""
        return {
            "provider": self.provider,
            "project": self.api.project,
            "zone": self.zones[0],
            "endpoint": self.api.endpoint,
            "credentials_file": str(self.api.owner.key_file),
            "ssh_config": str(self.hosts.ssh_config),
            "connect_timeout_seconds": 20.0,  # emulated hosts boot at once
            "python": "python3",  # the interpreter that runs the emulator
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a launch needs beside its settings."""
        return {}

    def close(self) -> None:
        """End the API and all machines with what runs on them."""
        if self.control is not None:
            self.control.close()
        self.api.close()
        self.world.clock.close()
        self.hosts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
