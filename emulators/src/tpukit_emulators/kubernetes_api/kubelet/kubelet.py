"""The kubelets of all nodes: they start the containers of Pods, stop them, and report them.

A Pod's status says why it ended; where somebody other than its program ended it, it says who.
"""

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.pods.manifests.reading import at, sequence

from ...clock import Clock, Later
from ..controllers.work import Worker, no_keys
from ..kinds import POD
from ..recording import record
from ..store import Change, Key, Object, Store, set_condition
from .environment import Addresses, ConfigError, Environment
from .processes import Process, Processes

RETRY_S = 1.0
SIGKILL_STATUS = 128 + signal.SIGKILL
START_ERROR_STATUS = 128

# Edits a Pod's status when it has ended: who ended it, and why.
Verdict = Callable[[Object], None]


@dataclass
class _Running:
    """A Pod whose containers run."""

    pod: Object
    folder: Path
    processes: dict[str, Process] = field(default_factory=dict[str, Process])
    finished: dict[str, Object] = field(default_factory=dict[str, Object])
    verdict: Verdict | None = None
    oom_killed: bool = False
    killing: Later | None = None
    restarts: dict[str, int] = field(default_factory=dict[str, int])


class Kubelet:
    """Runs what the scheduler has bound.

    Attributes:
        bad_images: Images that cannot be pulled.
        rejects: Names of nodes whose device plugin refuses Pods.
    """

    def __init__(self, store: Store, clock: Clock, folder: Path) -> None:
        self._store = store
        self._clock = clock
        self._folder = folder
        self.addresses = Addresses(store)
        self._environment = Environment(store, self.addresses)
        self.processes = Processes()
        self._running: dict[str, _Running] = {}  # by uid
        self.bad_images: set[str] = set()
        self.rejects: set[str] = set()
        self.worker: Worker | None = None

    def wants(self, change: Change) -> Sequence[Key]:
        """Look at Pods that changed."""
        if change.kind is not POD:
            return no_keys()
        metadata = change.object["metadata"]
        if change.type == "DELETED":
            self._forget(metadata["uid"])
            return no_keys()
        return [(metadata["namespace"], metadata["name"])] if _node_of(change.object) else no_keys()

    def reconcile(self, key: Key) -> None:
        """Start, stop or leave a Pod."""
        pod = self._store.find(POD, *key)
        if pod is None or not _node_of(pod) or _is_over(pod):
            return
        running = self._running.get(pod["metadata"]["uid"])
        if pod["metadata"].get("deletionTimestamp"):
            if running is None:
                self._finish_unstarted(pod)
            else:
                self.stop(pod, grace_s=pod["metadata"]["deletionGracePeriodSeconds"])
        elif running is None and at(pod, "status", "phase") == "Pending":
            self._start(pod)

    def log_of(self, pod: Object, container: str) -> Path:
        """Return the file of a container's log."""
        return self._folder / pod["metadata"]["uid"] / f"{container}.log"

    def stop(
        self, pod: Object, *, grace_s: float, verdict: Verdict | None = None, oom: bool = False
    ) -> None:
        """End a Pod's processes: SIGTERM now, SIGKILL after the grace; at once where that is 0."""
        running = self._running.get(pod["metadata"]["uid"])
        if running is None:
            return
        running.verdict = running.verdict or verdict
        running.oom_killed = running.oom_killed or oom
        if grace_s <= 0:
            for process in running.processes.values():
                process.kill()
            return
        if running.killing is None:
            for process in running.processes.values():
                process.ask_to_end()
            running.killing = self._clock.call_later(grace_s, lambda: self._kill(running))

    def command_in(
        self, pod: Object, container: str, argv: Sequence[str]
    ) -> tuple[list[str], dict[str, str], Path]:
        """Return a command as it runs in a container: its words, its variables and its folder."""
        folder = self._folder / pod["metadata"]["uid"]
        one = next(one for one in pod["spec"]["containers"] if one["name"] == container)
        variables = self._environment.variables(pod, one, folder)
        asked: Object = {**one, "command": list(argv), "args": []}
        return self._environment.arguments(pod, asked, variables, folder), variables, folder

    def send_signal(self, pod: Object, number: int) -> None:
        """Send a signal to a Pod's processes."""
        if running := self._running.get(pod["metadata"]["uid"]):
            for process in running.processes.values():
                process.kill(number)

    def lose(self, node: str) -> None:
        """End the processes of a node that is gone; nobody is left to report them."""
        with self._store.lock:
            for uid, running in list(self._running.items()):
                if _node_of(running.pod) == node:
                    del self._running[uid]
                    self._kill(running)

    def close(self) -> None:
        """End all processes and remove their files."""
        self.processes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Starting.

    def _start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if _node_of(pod) in self.rejects:
            message = "Pod was rejected: Allocate failed due to no healthy google.com/tpu devices"
            self._fail(pod, "UnexpectedAdmissionError", message)
            return
        containers = sequence(at(pod, "spec", "containers"))
        for container in containers:
            if container.get("image") in self.bad_images:
                message = f'Back-off pulling image "{container["image"]}"'
                self._wait(pod, "ImagePullBackOff", message)
                return
        running = _Running(pod, self._folder / pod["metadata"]["uid"])
        running.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._environment.write_volumes(pod, running.folder)
            for container in containers:
                self._run(running, container)
        except ConfigError as error:
            self._kill(running)
            self._wait(pod, "CreateContainerConfigError", str(error))
            self._later(pod)
            return
        except OSError as error:
            self._kill(running)
            self._fail_to_start(pod, f"failed to start container of {name}: {error}")
            return
        self._running[pod["metadata"]["uid"]] = running
        self._report(running)
        record(self._store, pod, "Started", "Started container", component="kubelet")

    def _run(self, running: _Running, container: Object) -> None:
        variables = self._environment.variables(running.pod, container, running.folder)
        argv = self._environment.arguments(running.pod, container, variables, running.folder)
        running.processes[container["name"]] = self.processes.start(
            argv,
            environment=variables,
            folder=running.folder,
            log=running.folder / f"{container['name']}.log",
            on_exit=lambda process: self._ended(running, container, process),
        )

    # Ending.

    def _ended(self, running: _Running, container: Object, process: Process) -> None:
        with self._store.lock:
            if self._running.get(running.pod["metadata"]["uid"]) is not running:
                return  # nobody reports it any more
            name, status = container["name"], process.status or 0
            running.processes.pop(name, None)
            running.finished[name] = {
                "exitCode": status,
                "reason": "OOMKilled"
                if running.oom_killed and status == SIGKILL_STATUS
                else "Error"
                if status
                else "Completed",
                "finishedAt": self._store.stamp(),
            }
            policy = at(running.pod, "spec", "restartPolicy")
            is_stopping = running.killing is not None or running.verdict is not None
            if not is_stopping and (policy == "Always" or (policy == "OnFailure" and status)):
                running.restarts[name] = running.restarts.get(name, 0) + 1
                self._clock.call_later(RETRY_S, lambda: self._restart(running, container))
                self._report(running)
                return
            if running.processes:
                self._report(running)
                return
            self._over(running)

    def _restart(self, running: _Running, container: Object) -> None:
        with self._store.lock:
            if running.pod["metadata"]["uid"] in self._running and running.killing is None:
                running.finished.pop(container["name"], None)
                self._run(running, container)
                self._report(running)

    def _over(self, running: _Running) -> None:
        uid = running.pod["metadata"]["uid"]
        if running.killing:
            running.killing.cancel()
        failed = any(one["exitCode"] for one in running.finished.values())

        def edit(pod: Object) -> None:
            self._describe(pod, running)
            pod["status"]["phase"] = "Failed" if failed else "Succeeded"
            for type_ in ("Ready", "ContainersReady"):
                set_condition(pod, type_, "False", "PodCompleted", "", self._store.stamp())
            if running.verdict:
                running.verdict(pod)

        self._running.pop(uid, None)
        changed = self._store.change(POD, running.pod, edit)
        if changed and changed["metadata"].get("deletionTimestamp"):
            self._store.finish(POD, changed)

    def _finish_unstarted(self, pod: Object) -> None:
        def edit(after: Object) -> None:
            after["status"]["phase"] = "Failed"

        self._store.change(POD, pod, edit)

    def _kill(self, running: _Running) -> None:
        for process in list(running.processes.values()):
            process.kill()

    def _forget(self, uid: str) -> None:
        """Drop what is left of a Pod whose object is gone: its processes, and its logs."""
        if running := self._running.pop(uid, None):
            self._kill(running)
        shutil.rmtree(self._folder / uid, ignore_errors=True)

    # Reporting.

    def _report(self, running: _Running) -> None:
        def edit(pod: Object) -> None:
            now = self._store.stamp()
            self._describe(pod, running)
            pod["status"]["phase"] = "Running"
            pod["status"].setdefault("startTime", now)
            ready = "True" if not running.finished else "False"
            for type_ in ("Initialized", "Ready", "ContainersReady"):
                set_condition(pod, type_, ready, "", "", now)
            metadata, spec = pod["metadata"], pod["spec"]
            address = self.addresses.of(
                metadata["namespace"],
                str(spec.get("hostname") or metadata["name"]),
                str(spec.get("subdomain") or ""),
            )
            pod["status"] |= {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "127.0.0.1"}

        changed = self._store.change(POD, running.pod, edit)
        running.pod = changed or running.pod

    def _describe(self, pod: Object, running: _Running) -> None:
        before = {one["name"]: one for one in sequence(at(pod, "status", "containerStatuses"))}
        now = self._store.stamp()
        said: list[Object] = []
        for container in pod["spec"]["containers"]:
            name = container["name"]
            began = at(before.get(name), "state", "running", "startedAt") or now
            state = (
                {"terminated": {"startedAt": began, **running.finished[name]}}
                if name in running.finished
                else {"running": {"startedAt": began}}
            )
            said.append(
                {
                    "name": name,
                    "image": container.get("image", ""),
                    "imageID": "",
                    "ready": name not in running.finished,
                    "restartCount": running.restarts.get(name, 0),
                    "state": state,
                }
            )
        pod["status"]["containerStatuses"] = said

    def _wait(self, pod: Object, reason: str, message: str) -> None:
        state: Object = {"waiting": {"reason": reason, "message": message}}
        self._store.change(POD, pod, lambda after: _set_state(after, state))
        record(self._store, pod, "Failed", message, type_="Warning", component="kubelet")

    def _fail_to_start(self, pod: Object, message: str) -> None:
        now = self._store.stamp()
        state: Object = {
            "terminated": {
                "exitCode": START_ERROR_STATUS,
                "reason": "StartError",
                "message": message,
                "startedAt": now,
                "finishedAt": now,
            }
        }

        def edit(after: Object) -> None:
            _set_state(after, state)
            after["status"]["phase"] = "Failed"

        self._store.change(POD, pod, edit)
        record(self._store, pod, "Failed", message, type_="Warning", component="kubelet")

    def _fail(self, pod: Object, reason: str, message: str) -> None:
        def edit(after: Object) -> None:
            after["status"] |= {"phase": "Failed", "reason": reason, "message": message}

        self._store.change(POD, pod, edit)

    def _later(self, pod: Object) -> None:
        metadata = pod["metadata"]
        if self.worker:
            worker = self.worker
            self._clock.call_later(
                RETRY_S, lambda: worker.enqueue(self, (metadata["namespace"], metadata["name"]))
            )


def _set_state(pod: Object, state: Object) -> None:
    pod["status"]["containerStatuses"] = [
        {
            "name": one["name"],
            "image": one.get("image", ""),
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": state,
        }
        for one in pod["spec"]["containers"]
    ]


def _node_of(pod: Object) -> str | None:
    return at(pod, "spec", "nodeName")


def _is_over(pod: Object) -> bool:
    return at(pod, "status", "phase") in ("Succeeded", "Failed")
