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

from ..hosts import EmulatedHosts
from ..machine_rehearsal import MachineRehearsal
from ..world import World
from .offers import ZONES
from .resources import MODELS
from .server import ComputeAPI


class ComputeEngineRehearsal(MachineRehearsal[ComputeAPI]):
    """An emulated Compute Engine whose machines run real processes here.

    Args:
        folder: Where keys and the homes of hosts are kept.
        world: What there is to be had; by default much of everything in a few real zones.
        port: Of the API; 0 for any that is free.
        control_port: Where the world is told what to do, over HTTP; 0 for any, None for nowhere.
        bulk_models: Provisioning models that groups in bulk mode may have.
    """

    provider = "gce"

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        port: int = 0,
        control_port: int | None = 0,
        bulk_models: Collection[str] = MODELS,
    ) -> None:
        world = world or World(ZONES)
        hosts = EmulatedHosts(folder / "machines")
        api = ComputeAPI(folder, world=world, machines=hosts, port=port, bulk_models=bulk_models)
        super().__init__(api, world, hosts, control_port=control_port)
