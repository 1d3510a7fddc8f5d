"""`tpukit pods`: list, create, release and inspect pods; rehearse and check first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..exit_codes import ExitCode
from ..runtime.ranges import INDEX, SCALE, SECONDS
from . import job_options as options
from .launch import Provider, Spot
from .values import output_folder, within

if TYPE_CHECKING:
    from ..pods.store import Store, WantedPod

app = typer.Typer(no_args_is_help=True)

STOPPED_WITHIN_S = 40.0
HEARD_S = 3.0
"""By when a supervisor has heard that it is to stop, and begins nothing more."""
Run = Annotated[str, typer.Argument(help="Name of a run or a pod.")]
MaybeRun = Annotated[str | None, typer.Argument(help="Name of a run. [default: all runs]")]
Zones = Annotated[
    list[str] | None, typer.Option("--zone", help="Zone to try; repeatable, tried in order.")
]
Project = Annotated[str | None, typer.Option(help="Google Cloud project.")]
MaxPrice = Annotated[
    float | None,
    typer.Option(
        "--max-price", help="Maximum price of the pod in USD per hour.", callback=within(SCALE)
    ),
]
Wait = Annotated[
    float | None,
    typer.Option(help="Seconds to wait for capacity.", callback=within(SECONDS)),
]


def _find(store: "Store", name: str) -> "WantedPod":
    """Return the store's entry of a run or a pod."""
    from ..errors import TPUValidationError, did_you_mean

    row = store.wanted.find_by_any_name(name)
    if row is None:
        known = [one.name for one in store.wanted.all()]
        raise TPUValidationError(
            f"There is no pod {name!r}; {', '.join(known) or 'none'} are wanted."
            + did_you_mean(name, known)
        )
    return row


def _is_supervised(store: "Store", row: "WantedPod") -> bool:
    """Whether a running process supervises the pod."""
    from ..pods.reconciler import KEEPERS
    from ..pods.store.locks import is_held

    return row.keeper is not None and is_held(store.folder / KEEPERS / row.keeper)


def _has_attempt(store: "Store", row: "WantedPod") -> bool:
    """Whether the run has an attempt in progress."""
    attempts = store.attempts(row.name)
    return bool(attempts) and attempts[-1].ending is None


@app.command("ls")
def list_pods(json: options.Json = False) -> None:
    """List pods as their providers report them, and delete those that no run needs any more."""
    from ..pods.listing import PodListing
    from ..pods.reconciler import Reconciler
    from ..pods.store import Store
    from .output import show

    store = Store()
    show(PodListing.look(store, Reconciler(store)), json=json)


@app.command("up")
def get_pod(
    name: Annotated[str, typer.Argument(help="Name of the pod.")],
    on: options.On = None,
    provider: Provider = None,
    project: Project = None,
    zone: Zones = None,
    spot: Spot = None,
    max_price: MaxPrice = None,
    wait: Wait = None,
    json: options.Json = False,
) -> None:
    """Create a pod and keep it until `down`; exit 5 if no zone has capacity."""
    from ..errors import ConfigError, PodUnavailable
    from ..pods.config import PodConfig
    from ..pods.manager import TpuManager
    from .output import Announcer, show

    if on is None:
        raise ConfigError("pods up needs to know which slice: --on v6e-8.")
    config = PodConfig(tpu_type=on, max_price_per_hour=max_price, zones=tuple(zone or ()))
    manager = TpuManager(provider=provider, project=project).build()
    try:
        pod = manager.allocate_pod(
            config.with_preemptible(bool(spot)), name=name, wait_s=wait, progress=Announcer()
        )
    except PodUnavailable as error:
        if isinstance(error, ConfigError):  # a zone that is not there
            raise
        typer.secho(f"no pod: {error}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(ExitCode.NO_CAPACITY) from None
    show(pod, json=json)


@app.command("down")
def give_pod_back(name: Run, json: options.Json = False) -> None:
    """Let the run on a pod save and end, if there is one, and release the pod."""
    import time

    from ..errors import ProviderError, TPUError
    from ..pods.allocation import wait_until_gone
    from ..pods.launching.background import BackgroundRun
    from ..pods.listing import PodListing
    from ..pods.reconciler import Reconciler
    from ..pods.store import Store
    from .output import show, working

    store = Store()
    row = _find(store, name)
    if _is_supervised(store, row):
        with working(f"letting {row.name} save and end, {STOPPED_WITHIN_S:g} s at most"):
            sure_at = time.monotonic() + HEARD_S

            def is_enough() -> bool:
                # Its processes have ended; its supervisor may still wait for a provider.
                return time.monotonic() > sure_at and not _has_attempt(store, row)

            BackgroundRun.find(store, row.name).stop(STOPPED_WITHIN_S, is_enough=is_enough)
    store.wanted.release(row.name)
    with working(f"giving {row.pod_name} back"):
        try:
            wait_until_gone(Reconciler(store), row.name, STOPPED_WITHIN_S, patience=1)
        except TPUError as error:
            raise ProviderError(
                f"{row.pod_name} could not be given back: {error} It stays marked for deletion, "
                "and tpukit pods ls tries again. If the provider is gone for good, tpukit pods "
                f"forget {row.name} removes it from the store."
            ) from error
    show(PodListing.last_seen(store), json=json)


@app.command("forget")
def forget_pod(name: Run, json: options.Json = False) -> None:
    """Remove a pod from the store without calling its provider, which may be gone."""
    from ..errors import ConfigError
    from ..pods.listing import PodListing
    from ..pods.store import Store
    from .output import show

    store = Store()
    row = _find(store, name)
    if _is_supervised(store, row):
        raise ConfigError(
            f"Run {row.name!r} is supervised by a living process; end it first: tpukit pods down "
            f"{row.name}."
        )
    store.forget(row)
    if row.zone is not None:
        typer.echo(
            f"{row.pod_name} is forgotten. If it still exists in {row.zone or 'its cluster'}, it "
            "goes on costing: delete it with the provider's own tools.",
            err=True,
        )
    show(PodListing.last_seen(store), json=json)


@app.command("logs")
def show_logs(
    name: Annotated[
        str, typer.Argument(help="Name of a run or a pod, or a run directory, also gs://….")
    ],
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Follow the log until the run ends.")
    ] = True,
    json: options.Json = False,
) -> None:
    """Show the output of a run, each line with its host; Ctrl-C does not stop the run.

    A run directory, also gs://…, shows the log that training wrote there.
    """
    import json as json_module

    from ..observe.runs.run import Run as WrittenRun
    from ..observe.runs.run import is_run
    from ..runtime.object_store import is_address

    if is_address(name) or is_run(Path(name)):
        for line in WrittenRun(name).log(follow=follow):
            typer.echo(json_module.dumps({"text": line}) if json else line)
        return
    from ..pods.launching.background import BackgroundRun
    from ..pods.store import Store
    from .launch import watching

    run = BackgroundRun.find(Store(), name)
    entries = run.entries(follow=follow and run.is_running)
    if json:
        for entry in entries:
            typer.echo(json_module.dumps(entry.to_dict()))
        return
    with watching(None) as view:
        for entry in entries:
            view.show(entry)
            if entry.is_final:
                typer.echo(f"-- {entry.text}")


@app.command("attach")
def attach(
    name: Run,
    target: Annotated[
        str | None, typer.Option("--job", help="A job.yaml whose launch section counts.")
    ] = None,
    provider: Annotated[str, typer.Option(help="Which cluster runs it.")] = "gke",
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace.")] = None,
    context: Annotated[
        str | None, typer.Option("--kube-context", help="Kubeconfig context.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Follow a job that its cluster runs, whichever machine launched it; Ctrl-C leaves it alone."""
    import json as json_module

    from ..job.reading import read_job
    from ..job.sections import LaunchSettings
    from ..pods.launching.attaching import find_job, follow_job
    from ..pods.launching.run_log import RunLogEntry, code_of_cause
    from ..pods.providers.protocol import GangEvent
    from ..pods.providers.registry import open_provider
    from .launch import watching

    launch = LaunchSettings() if target is None else read_job(target).launch
    stated = {"namespace": namespace, "context": context}
    changes = {key: value for key, value in stated.items() if value is not None}
    opened = open_provider(provider, launch.model_copy(update=changes))
    pod = find_job(opened, name)
    with watching(None, to_stderr=json) as view:

        def tell(event: GangEvent) -> None:
            entry = RunLogEntry.of(event)
            if entry is not None and json:
                typer.echo(json_module.dumps(entry.to_dict()))
            elif entry is not None:
                view.show(entry)

        ending = follow_job(opened, pod, tell)
    typer.echo(f"{pod.name}: {ending}", err=json)
    raise typer.Exit(code_of_cause(ending.cause))


@app.command("ssh")
def log_in(
    name: Run,
    host: Annotated[
        int, typer.Option(help="Index of the host, from 0.", callback=within(INDEX))
    ] = 0,
) -> None:
    """Log in to a host of a pod with the system's own ssh."""
    import os

    from ..pods.access import ssh_command
    from ..pods.store import Store

    argv = ssh_command(Store(), name, host)
    os.execvp(argv[0], list(argv))


@app.command("cost")
def show_cost(run: MaybeRun = None, json: options.Json = False) -> None:
    """Show costs by run, from ready to released, with the origin of prices."""
    from ..pods.cost import CostReport
    from ..pods.store import Store
    from .output import show

    show(CostReport.of(Store(), run), json=json)


@app.command("preflight")
def look_ahead(
    target: Annotated[
        str | None, typer.Argument(help="A job.yaml file; its launch section applies.")
    ] = None,
    on: options.On = None,
    provider: Provider = None,
    project: Project = None,
    zone: Zones = None,
    spot: Spot = None,
    json: options.Json = False,
) -> None:
    """Check credentials, quota, network and ports without requesting a pod; exit 1 on errors."""
    from ..errors import ConfigError
    from ..job.reading import read_job
    from ..pods.config import PodConfig
    from ..pods.manager import TpuManager
    from ..pods.preflight import PreflightReport
    from .output import show

    job = None if target is None else read_job(target)
    tpu_type = on or (job.on if job else None)
    if tpu_type is None:
        raise ConfigError("pods preflight needs to know which slice: --on v6e-8, or a job file.")
    launch = job.launch if job else None
    manager = TpuManager(provider=provider, project=project, launch=launch).build()
    config = PodConfig(tpu_type=tpu_type, zones=tuple(zone or ())).with_preemptible(bool(spot))
    asked = manager.complete(config)
    report = PreflightReport(manager.opened.name, str(asked.slice), manager.preflight(asked))
    show(report, json=json)
    if not report.is_clear:
        raise typer.Exit(ExitCode.FAILED)


@app.command("lint")
def lint_manifests(
    files: Annotated[
        list[Path], typer.Argument(help="Manifests (YAML or JSON), or folders of them.")
    ],
    nodes: Annotated[
        Path | None,
        typer.Option(help="Output of `kubectl get nodes -o yaml`, to check that some node fits."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check Kubernetes manifests without a cluster; exit 1 on errors."""
    from ..pods.manifests import lint_files, read_pools
    from .output import show

    report = lint_files(*files, pools=None if nodes is None else read_pools(nodes))
    show(report, json=json)
    if not report.is_ok:
        raise typer.Exit(ExitCode.FAILED)


@app.command("emulate")
def emulate(
    name: Annotated[str | None, typer.Argument(help="Provider to emulate. [default: all]")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for keys and emulated machines.", callback=output_folder),
    ] = None,
) -> None:
    """Serve an emulated cloud on this machine until Ctrl-C, and print how to launch on it."""
    from ..pods.emulation import EMULATORS, serve

    if name is None:
        for known, what in EMULATORS.items():
            typer.echo(f"{known:6} {what.meaning}")
        return
    serve(name, folder, typer.echo)
