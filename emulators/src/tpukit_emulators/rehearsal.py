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

from .hosts import EmulatedHosts
from .identity import Authority
from .machine_rehearsal import MachineRehearsal
from .tpu_api.server import TPUAPI, ZONES
from .world import World


class CloudTPURehearsal(MachineRehearsal[TPUAPI]):
    """An emulated Cloud TPU API whose pods run real processes on this machine.

    Args:
        folder: Where keys, certificates and the homes of hosts are kept.
        world: What there is to be had; by default much of everything in a few real zones.
        port: Of the API; 0 for any that is free.
        control_port: Where the world is told what to do, over HTTP; 0 for any, None for nowhere.
    """

    provider = "gcp"

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        authority: Authority | None = None,
        port: int = 0,
        control_port: int | None = 0,
    ) -> None:
        world = world or World(ZONES)
        hosts = EmulatedHosts(folder / "machines")
        api = TPUAPI(folder, authority=authority, world=world, machines=hosts, port=port)
        super().__init__(api, world, hosts, control_port=control_port)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that have Google's client trust the emulator; set before it first connects."""
        return {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(self.api.root_file)}
