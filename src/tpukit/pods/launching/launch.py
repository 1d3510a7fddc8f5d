"""`launch`: a job on a pod, supervised until it ends."""

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

from ...errors import ConfigError, TPUError
from ...job.hidden import HIDDEN, warn_of_literal_secrets
from ...job.job import Job
from ...job.reading import read_job
from ...runtime.calls import either_way
from ...runtime.files import private_folder
from ...runtime.progress import Progress, silent
from ...shown import Shown
from ..allocation import check_request, wait_until_gone
from ..causes import Cause
from ..config import PodConfig
from ..manager import TpuManager
from ..observing import Observer
from ..pod import as_name
from ..providers.protocol import Command
from ..reconciler import KEEPERS
from ..store import Store
from ..store.locks import holding
from ..supervision.events import SupervisionEvent
from ..supervision.policy import Policy
from ..supervision.preemption import PreemptionHandler
from ..supervision.supervisor import Outcome, Supervisor
from .bundle import JOB_FILE, Bundle, make_bundle, modules_not_shipped
from .recorded import RecordedProvider
from .trial import refuse_untrainable

RUNS = "runs"
BUNDLE = "bundle.tar"
LOCK = "lock"
"""Held by the process that supervises a run in the background, from before its log begins."""
_LONGEST_STEM = 26
_GONE_WITHIN_S = 30.0


@dataclass(frozen=True)
class Launch(Shown):
    """A job, ready to be launched: everything that can be wrong on this machine was looked at.

    Attributes:
        name: Of the run; launching the same job again under it goes on where it was.
        bundle: What is shipped to each host.
        notes: What whoever launches it should know.
    """

    name: str
    job: Job
    manager: TpuManager
    config: PodConfig
    bundle: Bundle
    notes: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    preemption: PreemptionHandler = field(default_factory=PreemptionHandler)

    @property
    def folder(self) -> Path:
        """Where the run's archive and log are kept."""
        return run_folder(self.manager.store, self.name)

    def run(
        self,
        tell: Callable[[SupervisionEvent], None] | None = None,
        *,
        stopping: threading.Event | None = None,
    ) -> Outcome:
        """Supervise the job until it has ended; nothing of it is left at the provider then.

        Args:
            tell: Called with everything that happens.
            stopping: Set by whoever wants the job to save and end.

        Raises:
            ConfigError: Another process supervises this run already.
            ProviderError: The provider cannot be reached, or refuses who asks.
        """
        private_folder(self.folder)
        self.bundle.write(self.folder / BUNDLE)
        with self._kept() as provider:
            supervisor = Supervisor(
                self.name,
                replace(self.config, zones=()),  # the provider says which, those that fail last
                self._command(),
                provider,
                self.manager.store,
                policy=self._policy(),
                tell=tell,
            )
            with _stopped_by(supervisor, stopping):
                return supervisor.run()

    @contextmanager
    def _kept(self) -> Generator[RecordedProvider]:
        """Be the keeper of the run's pod for the block, and leave nothing behind."""
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
            finally:
                store.wanted.release(self.name)
                try:
                    wait_until_gone(self.manager.reconciler, self.name, _GONE_WITHIN_S)
                except TPUError as error:
                    store.note(self.name, "left", f"its pod could not be deleted yet: {error}")

    def _command(self) -> Command:
        launch = self.manager.settings
        python = sys.executable if self._is_local else "python3"
        return Command(
            argv=(python, "-m", "tpukit", "train", JOB_FILE),
            environment=self.environment,
            bundle=self.folder / BUNDLE,
            setup=launch.setup,
        )

    def _policy(self) -> Policy:
        return self.preemption.policy(Policy.of(self.manager.settings))

    @property
    def _is_local(self) -> bool:
        return self.manager.opened.name == "local"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "slice": str(self.config.slice),
            "provider": self.manager.opened.name,
            "zones": list(self.config.zones),
            "tier": self.config.tier.value,
            "bundle": self.bundle.to_dict(),
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
    """Look at everything that can be wrong with a launch before anybody is asked for a pod.

    Args:
        job: A job, or the path of a job file.
        on: The slice; by default the job's own.
        provider: local, gcp, gke, gce or ssh; by default as `TpuManager` finds it.
        spot: Whether to take capacity that may be taken away.
        name: Of the run; by default the job's, with a few letters that change when the job does.
        preemption: How often the job saves, and whether it goes on after an eviction.
        variables: Of the job's processes; by default as the job says.
        is_checked: Whether `tpukit train` is known to accept the job, so that it is not tried here.
        state: What is remembered between processes; by default the user's own store.
        progress: Told what it costs and what to know.

    Raises:
        ConfigError: The job, its files or what it asks for are wrong.
        PodUnavailable: The price cap is below every price, or the provider has no such slice.
    """
    stem = Path(job).stem if isinstance(job, str) else str(job.model)
    read = read_job(job) if isinstance(job, str) else job
    read.refuse_parts("a launch")
    handler = preemption or PreemptionHandler()
    read = handler.apply(read)
    read = read if on is None else read.replace(on=on)
    said = {} if spot is None else {"launch.spot": spot}
    read = read.replace(said) if said else read
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
    progress(f"{run}: ships {bundle}")
    return Launch(run, read, manager, config, bundle, notes, variables, handler)


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
    """Run a job on a pod, and return how it ended; its pod is given back then.

    The arguments are those of `prepare_launch`, and `tell` is called with everything that happens.

    Raises:
        ConfigError: The job, its files or what it asks for are wrong.
        PodUnavailable: The price cap is below every price, or the provider has no such slice.
        ProviderError: The provider cannot be reached, or refuses who asks.
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


def read_variables(asked: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job's processes, with "$NAME" read from this process.

    So a token need not stand in a job file.

    Raises:
        ConfigError: A variable that is named is not set here, or a value was left out of a report.
    """
    found: dict[str, str] = {}
    for name, value in asked.items():
        if value == HIDDEN:
            raise ConfigError(
                f"launch.environment.{name} is {HIDDEN}, which stands for a value that was not "
                f"shown; write {name}: ${name} and set the variable here, or write the value."
            )
        source = value.removeprefix("$")
        if value.startswith("$") and source not in os.environ:
            raise ConfigError(
                f"launch.environment.{name} is to be taken from ${source}, which is not set here."
            )
        found[name] = os.environ[source] if value.startswith("$") else value
    return found


def run_name(stem: str, job: Job) -> str:
    """Return a name for a run that stays the same as long as the job does."""
    said = json.dumps(job.to_dict(with_variables=True), sort_keys=True, default=str)
    digest = hashlib.sha256(said.encode()).hexdigest()[:5]
    return f"{as_name(stem)[:_LONGEST_STEM].strip('-')}-{digest}"


def already_supervised(name: str) -> ConfigError:
    """Return the error of a second supervisor of one run."""
    return ConfigError(
        f"Run {name!r} is supervised by another process already; follow it with "
        f"tpukit pods logs {name}, or choose another name."
    )


def run_folder(store: Store, name: str) -> Path:
    """Return where the archive and the log of a run are kept."""
    return store.folder / RUNS / name


def _manager_of(job: Job, provider: str | None, state: Store | None) -> TpuManager:
    from ..settings import PodSettings

    section = job.launch.model_dump(exclude_unset=True)
    origins = {key: job.origin_of(f"launch.{key}") for key in section}
    settings = PodSettings.gather(section, {"provider": provider}, origins=origins)
    return TpuManager(gathered=settings, state=state).build()


def _with_paths(job: Job, run: str, *, is_local: bool) -> Job:
    """Return the job with paths that hold wherever its processes run.

    Every attempt must find the checkpoints of the one before it. On this machine processes run in
    folders of their own that go with the pod, so there paths are absolute.
    """
    run_dir = job.train.run_dir or f"runs/{run}"
    changes = {"train.run_dir": run_dir}
    if is_local:
        changes["train.run_dir"] = str(Path(run_dir).resolve())
        for key in ("data", "eval_data"):
            path = getattr(job.train, key)
            if path and "://" not in path and Path(path).exists():
                changes[f"train.{key}"] = str(Path(path).resolve())
    return job.replace(changes)


def _notes(job: Job, provider: str) -> list[str]:
    told: list[str] = []
    kept = job.train.checkpoint_dir or job.train.run_dir or ""
    if provider != "local" and "://" not in kept and not kept.startswith("/"):
        told.append(
            f"checkpoints go to {kept} on each host's own disk, and are lost with the pod. Set "
            "train.checkpoint_dir to a bucket (gs://…), or train.run_dir to the absolute path of a "
            "disk that all hosts and the next pod mount."
        )
    if not job.train.checkpoint_every:
        told.append("train.checkpoint_every is 0: after an interruption the job begins anew.")
    return told


def _history(run: str, store: Store) -> list[str]:
    """Say what became of the run so far."""
    attempts = store.attempts(run)
    ending = attempts[-1].ending if attempts else None
    if not attempts:
        return []
    if ending is not None and ending.cause is Cause.DONE:
        return [f"{run} is finished already; another name runs it anew (--name)."]
    return [f"{run} goes on from attempt {attempts[-1].number}, step {attempts[-1].last_step}."]


@contextmanager
def _stopped_by(supervisor: Supervisor, stopping: threading.Event | None) -> Generator[None]:
    """Stop a supervisor when an event is set."""
    over = threading.Event()

    def wait() -> None:
        while not over.is_set():
            if stopping is not None and stopping.wait(0.05):
                supervisor.stop()
                return

    watcher = threading.Thread(target=wait, daemon=True)
    if stopping is not None:
        watcher.start()
    try:
        yield
    finally:
        over.set()
