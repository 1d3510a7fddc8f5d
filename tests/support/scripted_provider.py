"""A provider in memory that follows a script: it loses replies, refuses, takes pods back, and kills
whoever calls it."""

import contextlib
import os
import threading
from dataclasses import dataclass, field, replace

from tpukit.errors import PodUnavailable, ProviderError
from tpukit.pods import Capabilities, Host, Pod, PodState

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the stores of property tests are, as each example opens new ones: no disk is waited for."""


class Killed(BaseException):
    """The process that called has died here."""


@dataclass
class ScriptedProvider:
    """Pods by zone and name.

    Attributes:
        script: What happens at each call, one word each: "ok", "refuse" (an error before
            anything is done), "lose" (done, but the reply is lost), "late" (an error, and done
            when time has passed), "die" (killed before), "die after"; "ok" when it is used up.
        empty: Zones without capacity.
        granted: The state of a new pod.
        slow_delete: Whether a deleted pod stays for a while as DELETING.
    """

    name: str = "gcp"
    capabilities: Capabilities = field(default_factory=Capabilities)
    script: list = field(default_factory=list)
    empty: set = field(default_factory=set)
    granted: PodState = PodState.READY
    slow_delete: bool = False
    pods: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    under_way: list = field(default_factory=list)

    def __post_init__(self):
        self._lock = threading.Lock()

    def _call(self, what, effect):
        with self._lock:
            self.calls.append(what)
            now = self.script.pop(0) if self.script else "ok"
            if now == "die":
                raise Killed(what)
            if now == "refuse":
                raise ProviderError(f"{what}: cannot be reached")
            if now == "late":
                self.under_way.append(effect)
                raise ProviderError(f"{what}: no answer")
            result = effect()
            if now == "die after":
                raise Killed(what)
            if now == "lose":
                raise ProviderError(f"{what}: the reply was lost")
            return result

    def create(self, name, config, *, command=None):
        (zone,) = config.zones or ("",)

        def effect():
            if (zone, name) not in self.pods:
                if zone in self.empty:
                    raise PodUnavailable(f"no {config.slice} in {zone}", cause="stockout")
                hosts = (Host(f"{name}-0", "10.0.0.1"),)
                self.pods[zone, name] = Pod(
                    name=name,
                    provider=self.name,
                    slice=config.slice,
                    zone=zone,
                    state=self.granted,
                    tier=config.tier,
                    hosts=hosts if self.granted is PodState.READY else (),
                    labels=dict(config.labels),
                )
            return self.pods[zone, name]

        return self._call(f"create {name} in {zone}", effect)

    def get(self, name, *, zone):
        return self._call(f"get {name}", lambda: self.pods.get((zone, name)))

    def list(self, *, owner=None):
        def effect():
            return [p for p in self.pods.values() if owner in (None, p.labels.get("owner"))]

        return self._call("list", effect)

    def delete(self, name, *, zone):
        def effect():
            pod = self.pods.get((zone, name))
            if pod is not None and self.slow_delete:
                self.pods[zone, name] = pod.in_state(PodState.DELETING)
            else:
                self.pods.pop((zone, name), None)

        return self._call(f"delete {name}", effect)

    def start(self, pod, command, *, attempt):
        raise NotImplementedError

    def preflight(self, config):
        return []

    # --- what the world does ---------------------------------------------------------------

    def put(self, key, state, reason=""):
        """Bring a pod into another state."""
        self.pods[key] = self.pods[key].in_state(state, reason)

    def settle(self):
        """Let time pass: what was asked for is made or ready, what is being deleted goes."""
        for effect in self.under_way:
            with contextlib.suppress(PodUnavailable):
                effect()
        self.under_way.clear()
        for key, pod in [*self.pods.items()]:
            if pod.state is PodState.DELETING:
                del self.pods[key]
            elif pod.state in (PodState.WAITING, PodState.PROVISIONING):
                self.pods[key] = replace(
                    pod, state=PodState.READY, hosts=(Host(f"{pod.name}-0", "10.0.0.1"),)
                )

    def live(self, run=None):
        """Return the pods that are there or on their way, of one run or of all."""
        return [
            pod
            for pod in self.pods.values()
            if pod.state in (PodState.WAITING, PodState.PROVISIONING, PodState.READY)
            and run in (None, pod.labels.get("job"))
        ]
