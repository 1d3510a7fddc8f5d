"""An emulated cluster with its API: started, pointed to by a kubeconfig, and ended.

```python
with KubernetesEmulator([tpu_pool("v6e-16", name="a")]) as cluster:
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    …  # kubectl, the Python client, tpukit launch --provider gke
    cluster.mishaps.shut_down("gke-a-0")
```
"""

import contextlib
import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tpukit.pods.manifests.reading import NodePool
from tpukit.runtime.files import temporary_folder

from ..clock import Clock, RealClock
from ..faults import Faults
from ..identity import Authority, write_secret
from .cluster import Cluster, Pace, tpu_pool
from .http.server import ApiServer, Role
from .kinds import Installed
from .mishaps import Mishaps

__all__ = ["Installed", "KubernetesEmulator", "Pace", "Role", "tpu_pool"]


class KubernetesEmulator:
    """A cluster on this machine that unmodified clients speak to.

    Args:
        pools: Its node pools.
        folder: Where its certificate, its kubeconfig and its processes' files are.
        clock: What its time is; by default the real one.
        pace: How long things take in it.
        installed: Versions of its extensions.
        history: How many changes a watch can go back, before it is told 410.
        bookmark_s: How often watches get a bookmark.
        port: Where it listens; 0: anywhere.
    """

    def __init__(
        self,
        pools: Sequence[NodePool] = (),
        *,
        folder: Path | None = None,
        clock: Clock | None = None,
        pace: Pace | None = None,
        installed: Installed | None = None,
        history: int = 4096,
        bookmark_s: float = 30.0,
        port: int = 0,
    ) -> None:
        self._own = contextlib.ExitStack()
        self.folder = folder or self._own.enter_context(temporary_folder("tpukit-k8s-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.faults = Faults()
        self.cluster = Cluster(
            pools,
            clock=clock or RealClock(),
            folder=self.folder / "pods",
            pace=pace,
            installed=installed,
            history=history,
        )
        authority = Authority(self.folder / "ca")
        self.token = secrets.token_urlsafe(16)
        self.server = ApiServer(
            self.cluster,
            tls=_tls(authority, self.folder),
            tokens={self.token: Role.ADMIN},
            faults=self.faults,
            bookmark_s=bookmark_s,
            port=port,
        )
        self._root_file = authority.root_file
        self.kubeconfig = self.write_kubeconfig("kubeconfig", {"token": self.token})

    @property
    def mishaps(self) -> Mishaps:
        """Takes Pods and nodes away."""
        return self.cluster.mishaps

    @property
    def address(self) -> str:
        """Where the API is."""
        return self.server.address

    def add_token(self, role: Role) -> str:
        """Return a new token of a bearer who may do this."""
        token = secrets.token_urlsafe(16)
        self.server.tokens[token] = role
        return token

    def write_kubeconfig(self, name: str, user: dict[str, Any]) -> Path:
        """Write a kubeconfig of that name, and return its path.

        Args:
            name: Of the file.
            user: How whoever uses it proves who they are, as kubeconfigs state it.
        """
        path = self.folder / name
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "emulated",
            "clusters": [
                {
                    "name": "emulated",
                    "cluster": {
                        "server": self.address,
                        "certificate-authority": str(self._root_file),
                    },
                }
            ],
            "users": [{"name": "emulated", "user": user}],
            "contexts": [
                {
                    "name": "emulated",
                    "context": {
                        "cluster": "emulated",
                        "user": "emulated",
                        "namespace": "default",
                    },
                }
            ],
        }
        write_secret(path, yaml.safe_dump(content).encode())
        return path

    def close(self) -> None:
        """End the server, the controllers and all processes."""
        self.server.close()
        self.cluster.close()
        self._own.close()

    def __enter__(self) -> "KubernetesEmulator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _tls(authority: Authority, folder: Path) -> ssl.SSLContext:
    key, chain = authority.certify_loopback()
    key_file, chain_file = folder / "server.key", folder / "server.pem"
    write_secret(key_file, key)
    chain_file.write_bytes(chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain_file, key_file)
    return context
