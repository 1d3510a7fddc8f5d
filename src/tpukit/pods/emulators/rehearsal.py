"""A whole Cloud TPU to rehearse on: the API, machines behind it, and a hand on its fate.

```python
with CloudTPURehearsal(folder) as cloud:
    os.environ.update(cloud.environment)
    provider = open_provider("gcp", LaunchSettings(**cloud.settings))
    ...
    cloud.api.cloud.preempt("my-job-a1", notice_s=10)
```
"""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .control import ControlPort
from .hosts import EmulatedHosts
from .identity import Authority
from .tpu_api.server import TPUAPI, ZONES
from .world import World


class CloudTPURehearsal:
    """An emulated Cloud TPU API whose pods run real processes on this machine.

    Args:
        folder: Where keys, certificates and the homes of hosts are kept.
        world: What there is to be had; by default much of everything in a few real zones.
        port: Of the API; 0 for any that is free.
        control_port: Where the world is told what to do, over HTTP; 0 for any, None for nowhere.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        authority: Authority | None = None,
        port: int = 0,
        control_port: int | None = 0,
    ) -> None:
        self.world = world or World(ZONES)
        self.hosts = EmulatedHosts(folder / "machines")
        self.api = TPUAPI(
            folder, authority=authority, world=self.world, machines=self.hosts, port=port
        )
        self.control = None
        if control_port is not None:
            self.control = ControlPort(self.api.cloud, self.api.faults, port=control_port)

    @property
    def settings(self) -> dict[str, Any]:
        """What a job's `launch:` section says to launch here."""
        return {
            "provider": "gcp",
            "project": self.api.project,
            "zone": next(iter(self.world.zones)),
            "endpoint": self.api.endpoint,
            "credentials_file": str(self.api.owner.key_file),
            "ssh_config": str(self.hosts.ssh_config),
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables that have Google's client trust the emulator; set before it first connects."""
        return {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(self.api.root_file)}

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
