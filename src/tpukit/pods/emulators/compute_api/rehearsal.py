"""A whole Compute Engine to rehearse on: the API, machines behind it, and a hand on its fate.

```python
with ComputeEngineRehearsal(folder) as cloud:
    provider = open_provider("gce", LaunchSettings(**cloud.settings))
    ...
    cloud.api.cloud.preempt("my-job-a1", notice_s=10)
```
"""

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..control import ControlPort
from ..hosts import EmulatedHosts
from ..world import World
from .offers import ZONES
from .resources import MODELS
from .server import ComputeAPI


class ComputeEngineRehearsal:
    """An emulated Compute Engine whose machines run real processes here.

    Args:
        folder: Where keys and the homes of hosts are kept.
        world: What there is to be had; by default much of everything in a few real zones.
        port: Of the API; 0 for any that is free.
        control_port: Where the world is told what to do, over HTTP; 0 for any, None for nowhere.
        bulk_models: Provisioning models that groups in bulk mode may have.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        port: int = 0,
        control_port: int | None = 0,
        bulk_models: Collection[str] = MODELS,
    ) -> None:
        self.world = world or World(ZONES)
        self.hosts = EmulatedHosts(folder / "machines")
        self.api = ComputeAPI(
            folder, world=self.world, machines=self.hosts, port=port, bulk_models=bulk_models
        )
        self.control = None
        if control_port is not None:
            self.control = ControlPort(self.api.cloud, self.api.faults, port=control_port)

    @property
    def settings(self) -> dict[str, Any]:
        """What a job's `launch:` section says to launch here."""
        return {
            "provider": "gce",
            "project": self.api.project,
            "zone": next(iter(self.world.zones)),
            "endpoint": self.api.endpoint,
            "credentials_file": str(self.api.owner.key_file),
            "ssh_config": str(self.hosts.ssh_config),
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a launch needs beside its settings: none."""
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
