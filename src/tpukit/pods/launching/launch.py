"""`launch`: run a job on a pod, supervised until it ends."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, PodUnavailable, TPUError
from ...job.hidden import HIDDEN, warn_of_literal_secrets
from ...job.job import Job
from ...job.reading import read_job
from ...runtime.calls import either_way
from ...runtime.files import private_folder, temporary_folder
from ...runtime.object_store import is_address
from ...runtime.progress import Progress, silent
from ...shown import Shown
from ..allocation import check_request, wait_until_gone
from ..causes import Cause
from ..config import PodConfig
from ..cost import zones_within_cap
from ..limits import Hold, unavailable
from ..manager import TpuManager
from ..observing import OWNER, Observer, OwnedProvider
from ..pod import Pod, as_name
from ..providers.protocol import Capabilities, Command, Provider, Rendered, Renders
from ..reconciler import KEEPERS
from ..store import Store, WantedPod
from ..store.locks import holding
from ..store.records import split_pod_name
from ..supervision.journal import SupervisionEvent
from ..supervision.policy import Policy, PreemptionHandler
from ..supervision.supervisor import Outcome, Supervisor
from ..supervision.zone_search import ending_of
from .bundle import JOB_FILE, Bundle, make_bundle, modules_not_shipped
from .environment import LockedEnvironment, lock_environment
from .trial import refuse_untrainable


class RecordedProvider(OwnedProvider):
    """A provider that reports every action to an observer.

    Args:
        inner: The provider.
        observer: Records the actions.
        run: Name of the run, whose pod is already wanted.
    """

    def __init__(self, inner: Provider, observer: Observer, run: str) -> None:
        super().__init__(inner, observer.store.owner)
        self._observer, self._run = observer, run

    @property
    def capabilities(self) -> Capabilities:
        """The provider's capabilities, with the run's zones; recently failed zones come last."""
        config = self._row().config
        zones = self._inner.capabilities.zones_for(config)
        allowed = zones_within_cap(config, zones, provider=self.name, book=self._observer.prices)
        store = self._observer.store
        ordered = store.history.order(self._observer.provider_id, config, allowed)
        # Only these zones; limits are checked when each zone is asked.
        return replace(self._inner.capabilities, zones=tuple(ordered), limits=())

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod in one zone."""
        zone = config.zones[0] if config.zones else ""
        row = replace(self._row(), attempt=split_pod_name(name)[1])
        there = map(Hold.of, self._inner.list()) if self._observer.limits else ()
        refusal = self._observer.record_request(replace(row, zone=None, config=config), zone, there)
        if refusal is not None:
            raise unavailable([refusal])
        try:
            pod = super().create(name, config, command=command)
        except PodUnavailable as error:
            self._observer.record_refusal(row, zone, Cause(error.cause), str(error))
            raise
        self._observer.record_state(self._row(), pod)
        return pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        pod = super().get(name, zone=zone)
        row = self._find()
        if row is not None and row.pod_name == name:
            if pod is not None and pod.state.is_lost and pod != row.pod:
                self._observer.record_loss(row, zone, ending_of(pod).cause, pod.reason)
            self._observer.record_state(row, pod)
        store, provider = self._observer.store, self._observer.provider_id
        store.wanted.keep(self._run)
        store.wanted.answered(provider, is_silent=False)
        if pod is not None:
            store.spend.seen(provider, name)
        return pod

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod."""
        super().delete(name, zone=zone)
        self._observer.record_deletion(self._run, zone=zone, pod=name)
        row = self._find()
        if row is not None and row.pod_name == name:
            self._observer.store.wanted.observe(self._run, None)

    def _find(self) -> WantedPod | None:
        """Return the wanted pod; None if `pods down` has already removed it."""
        return self._observer.store.wanted.find(self._run)

    def _row(self) -> WantedPod:
        row = self._find()
        assert row is not None, self._run  # `launch` adds it before and removes it after
        return row


RUNS = "runs"
BUNDLE = "bundle.tar"
LOCK = "lock"
"""Lock of the process that supervises a run in the background, taken before its log begins."""
_LONGEST_STEM = 26
_GONE_WITHIN_S = 30.0


@dataclass(frozen=True)
class Launch(Shown):
    """A job that passed all checks on this machine and can be launched.

    Attributes:
        name: Name of the run. Launching the same job under it again continues the run.
        bundle: Files for each host.
        notes: Remarks for the user.
        packages: Python environment that is shipped; None where hosts have one.
    """

    name: str
    job: Job
    manager: TpuManager
    config: PodConfig
    bundle: Bundle
    notes: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    packages: LockedEnvironment | None = None
    preemption: PreemptionHandler = field(default_factory=PreemptionHandler)

    @property
    def folder(self) -> Path:
        """Folder of the run's archive and log."""
        return run_folder(self.manager.store, self.name)

    def run(
        self,
        tell: Callable[[SupervisionEvent], None] | None = None,
        *,
        stopping: threading.Event | None = None,
        leaving: threading.Event | None = None,
    ) -> Outcome:
        """Supervise the job until it ends, and leave nothing at the provider.

        Args:
            tell: Called with every event.
            stopping: Event that tells the job to save and end.
            leaving: Event that ends the supervisor, and the job too unless the provider runs it.

        Raises:
            LeftRunning: `leaving` was set, and the provider goes on with the job.
            ConfigError: Another process already supervises this run.
            ProviderError: The provider cannot be reached, or rejects the credentials.
        """
        private_folder(self.folder)
        self.bundle.write(self.folder / BUNDLE)
        with self._as_keeper() as provider:
            supervisor = Supervisor(
                self.name,
                replace(self.config, zones=()),  # recently failed ones come last
                self._command(),
                provider,
                self.manager.store,
                policy=self._policy(),
                tell=tell,
            )
            with _stopped_by(supervisor, stopping, leaving):
                return supervisor.run()

    def render(self, progress: Progress = silent) -> Rendered | None:
        """Return the documents that would be submitted; None if the provider takes none.

        Args:
            progress: Told whether the provider has checked them.

        Raises:
            ConfigError: A setting contradicts another.
            ProviderError: The provider refuses them.
        """
        provider, store = self.manager.opened, self.manager.store
        if not isinstance(provider, Renders):
            return None
        number = len(store.attempts(self.name)) + 1
        labels = {OWNER: store.owner, "job": self.name, "attempt": str(number)}
        zone = self.config.zones[:1] or provider.capabilities.zones_for(self.config)[:1]
        config = replace(self.config.with_labels(**labels), zones=zone)
        with temporary_folder("tpukit-render-") as folder:
            self.bundle.write(folder / BUNDLE)
            command = replace(self._command(), bundle=folder / BUNDLE)
            return provider.render(f"{self.name}-a{number}", config, command, progress=progress)

    @contextmanager
    def _as_keeper(self) -> Generator[RecordedProvider]:
        """Act as the keeper of the run's pod during the block, and clean up afterwards."""
        store = self.manager.store
        with holding(store.folder / KEEPERS / self.name) as mine:
            if not mine:
                raise already_supervised(self.name)
            row = store.wanted.find(self.name)
            if row is not None and (row.is_released or row.config != self.config):
                store.wanted.release(self.name)
                wait_until_gone(self.manager.reconciler, self.name, _GONE_WITHIN_S)
            store.wanted.want(self.name, self.config, self.manager.record, keeper=self.name)
            provider = self.manager.opened
            observer = Observer(
                *(store, self.manager.record.id, provider.name, self.manager.prices),
                provider.capabilities.limits,
            )
            try:
                yield RecordedProvider(provider, observer, self.name)
            except BaseException:
                row = store.wanted.find(self.name)
                # Where the provider runs the job, it goes on without this supervisor.
                if not (provider.capabilities.runs_gangs and row and row.pod):
                    self._give_back()
                raise
            self._give_back()

    def _give_back(self) -> None:
        """Delete the run's pod, as far as the provider can be reached."""
        store = self.manager.store
        store.wanted.release(self.name)
        try:
            wait_until_gone(self.manager.reconciler, self.name, _GONE_WITHIN_S)
        except TPUError as error:
            store.note(self.name, "left", f"its pod could not be deleted yet: {error}")

    def _command(self) -> Command:
        launch = self.manager.settings
        python = sys.executable if self._is_local else launch.python or "python3"
        return Command(
            argv=(python, "-m", "tpukit", "train", JOB_FILE),
            environment=self.environment,
            bundle=self.folder / BUNDLE,
            python=None if self.packages is None else self.packages.order(self.folder),
            setup=launch.setup,
            heartbeat_s=launch.heartbeat_seconds,
            first_step_s=launch.first_step_timeout_seconds,
            step_s=launch.step_timeout_seconds,
        )

    def _policy(self) -> Policy:
        return self.preemption.policy(Policy.of(self.manager.settings))

    @property
    def _is_local(self) -> bool:
        return self.manager.opened.name == "local"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "slice": str(self.config.slice),
            "provider": self.manager.opened.name,
            "zones": list(self.config.zones),
            "tier": self.config.tier.value,
            "bundle": self.bundle.to_dict(),
            "packages": None if self.packages is None else self.packages.packages,
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        zones = ", ".join(self.config.zones) or "any zone"
        return Text.assemble(
            (self.name, "bold"),
            f": {self.config.slice} {self.config.tier} from {self.manager.opened.name} in {zones}\n"
            f"ships {', '.join(sorted(self.bundle.files))}",
        )


def prepare_launch(
    job: Job | str,
    *,
    on: str | None = None,
    provider: str | None = None,
    spot: bool | None = None,
    name: str | None = None,
    preemption: PreemptionHandler | None = None,
    variables: Mapping[str, str] | None = None,
    is_checked: bool = False,
    state: Store | None = None,
    progress: Progress = silent,
) -> Launch:
    """Check everything that can be wrong with a launch before a pod is requested.

    Args:
        job: A job, or the path of a job file.
        on: The slice; by default the job's own.
        provider: local, gcp, gke, gce or ssh; by default as `TpuManager` finds it.
        spot: Whether to request spot capacity.
        name: Name of the run; by default the job's name with a hash of the job.
        preemption: Sets the checkpoint interval, and whether the job continues after an eviction.
        variables: Environment variables of the job's processes; by default the job's own.
        is_checked: Whether `tpukit train` is known to accept the job, so that no trial is needed.
        state: The store that processes share; by default the user's own.
        progress: Called with the price and with remarks.

    Raises:
        ConfigError: The job, its files or its request are wrong.
        PodUnavailable: The price cap is below every price, or the provider has no such slice.
    """
    stem = Path(job).stem if isinstance(job, str) else str(job.model)
    read = read_job(job) if isinstance(job, str) else job
    read.refuse_parts("a launch")
    handler = preemption or PreemptionHandler()
    read = handler.apply(read)
    read = read if on is None else read.replace(on=on)
    changes = {} if spot is None else {"launch.spot": spot}
    read = read.replace(changes) if changes else read
    manager = _manager_of(read, provider, state)
    config = manager.complete(PodConfig(tpu_type=str(read.slice)))
    run = name or run_name(stem, read)
    read = _with_paths(read, run, is_local=manager.opened.name == "local")
    bundle = make_bundle(read)
    if variables is None:
        warn_of_literal_secrets(read)
        variables = read_variables(read.launch.environment)
    held = manager.store.wanted.holds(manager.record, besides=run)
    check_request(config, manager.opened, manager.prices, held=held, progress=progress)
    packages = None
    if manager.opened.capabilities.has_bare_hosts and manager.settings.python is None:
        packages = lock_environment(bundle, manager.settings.requirements, progress=progress)
    untried: list[str] = []
    if not is_checked:
        is_local = manager.opened.name == "local"
        untried = refuse_untrainable(read, bundle, variables, is_local=is_local, progress=progress)
    notes = (
        *_notes(read, manager.opened.name),
        *modules_not_shipped(bundle),
        *_history(run, manager.store),
        *untried,
    )
    for note in notes:
        progress(note)
    progress(f"{run}: ships {bundle}" + ("" if packages is None else f", and {packages}"))
    return Launch(run, read, manager, config, bundle, notes, variables, packages, handler)


@either_way
def launch(
    job: Job | str,
    *,
    on: str | None = None,
    provider: str | None = None,
    spot: bool | None = None,
    name: str | None = None,
    preemption: PreemptionHandler | None = None,
    tell: Callable[[SupervisionEvent], None] | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Run a job on a pod, release the pod, and return how the job ended.

    The arguments are those of `prepare_launch`; `tell` is called with every event.

    Raises:
        ConfigError: The job, its files or its request are wrong.
        PodUnavailable: The price cap is below every price, or the provider has no such slice.
        ProviderError: The provider cannot be reached, or rejects the credentials.
    """
    ready = prepare_launch(
        job,
        on=on,
        provider=provider,
        spot=spot,
        name=name,
        preemption=preemption,
        progress=progress,
    )
    return ready.run(tell)


def read_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job's processes, with "$NAME" read from the environment.

    With "$NAME" a job file needs to contain no token.

    Raises:
        ConfigError: A named variable is not set here, or the value is the mark of a hidden value.
    """
    values: dict[str, str] = {}
    for name, value in variables.items():
        if value == HIDDEN:
            raise ConfigError(
                f"launch.environment.{name} is {HIDDEN}, the mark of a hidden value; write "
                f"{name}: ${name} and set the variable here, or write the value."
            )
        source = value.removeprefix("$")
        if value.startswith("$") and source not in os.environ:
            raise ConfigError(
                f"launch.environment.{name} refers to ${source}, but that variable is not set here."
            )
        values[name] = os.environ[source] if value.startswith("$") else value
    return values


def run_name(stem: str, job: Job) -> str:
    """Return a name that changes only when the job does."""
    text = json.dumps(job.to_dict(with_variables=True), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:5]
    return f"{as_name(stem)[:_LONGEST_STEM].strip('-')}-{digest}"


def already_supervised(name: str) -> ConfigError:
    """Return the error for a second supervisor of one run."""
    return ConfigError(
        f"Run {name!r} is already supervised by another process; follow it with tpukit pods logs "
        f"{name}, or choose another name."
    )


def run_folder(store: Store, name: str) -> Path:
    """Return the folder of a run's archive and log."""
    return store.folder / RUNS / name


def _manager_of(job: Job, provider: str | None, state: Store | None) -> TpuManager:
    from ..settings import PodSettings

    section = job.launch.model_dump(exclude_unset=True)
    origins = {key: job.origin_of(f"launch.{key}") for key in section}
    settings = PodSettings.gather(section, {"provider": provider}, origins=origins)
    return TpuManager(gathered=settings, state=state).build()


def _with_paths(job: Job, run: str, *, is_local: bool) -> Job:
    """Return the job with paths that are valid wherever its processes run.

    Every attempt must find the checkpoints of the one before. On this machine each pod has folders
    of its own, so paths become absolute.
    """
    run_dir = job.train.run_dir or f"runs/{run}"
    changes = {"train.run_dir": run_dir}
    if is_local and not is_address(run_dir):
        changes["train.run_dir"] = str(Path(run_dir).resolve())
    if is_local:
        for key in ("data", "eval_data"):
            path = getattr(job.train, key)
            if path and "://" not in path and Path(path).exists():
                changes[f"train.{key}"] = str(Path(path).resolve())
    return job.replace(changes)


def _notes(job: Job, provider: str) -> list[str]:
    notes: list[str] = []
    kept = job.train.checkpoint_dir or job.train.run_dir or ""
    if provider != "local" and "://" not in kept and not kept.startswith("/"):
        notes.append(
            f"checkpoints go to {kept} on each host's own disk, and are lost with the pod. Set "
            "train.run_dir to a bucket (gs://…), or to the absolute path of a disk that all hosts "
            "and the next pod mount."
        )
    if not job.train.checkpoint_every:
        notes.append(
            "train.checkpoint_every is 0: after an interruption the job starts from the beginning."
        )
    return notes


def _history(run: str, store: Store) -> list[str]:
    """Return a line on the run's earlier attempts, if there are any."""
    attempts = store.attempts(run)
    ending = attempts[-1].ending if attempts else None
    if not attempts:
        return []
    if ending is not None and ending.cause is Cause.DONE:
        return [f"{run} is already finished; use another name to run it again (--name)."]
    return [f"{run} continues from attempt {attempts[-1].number}, step {attempts[-1].last_step}."]


@contextmanager
def _stopped_by(
    supervisor: Supervisor, stopping: threading.Event | None, leaving: threading.Event | None
) -> Generator[None]:
    """Stop or end a supervisor when an event is set."""
    over = threading.Event()

    def wait() -> None:
        while not over.wait(0.05):
            if stopping is not None and stopping.is_set():
                supervisor.stop()
                return
            if leaving is not None and leaving.is_set():
                supervisor.leave()
                return

    if stopping is not None or leaving is not None:
        threading.Thread(target=wait, name="tpukit-stop", daemon=True).start()
    try:
        yield
    finally:
        over.set()
