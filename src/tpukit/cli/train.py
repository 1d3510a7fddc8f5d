"""`tpukit train`: train a preset or a job file on the devices of this machine."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ..exit_codes import ExitCode
from ..runtime.ranges import INDEX, SCALE, SEED
from . import job_options as options
from .values import run_folder, within

if TYPE_CHECKING:
    from ..job.job import Job
    from ..records.hooks import TrainingHook

RunDir = Annotated[
    str | None,
    typer.Option(
        help="Run directory or address (gs://…); an existing run is resumed.", callback=run_folder
    ),
]
EvalData = Annotated[str | None, typer.Option(help="Data for the evaluation loss.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Tokenizer for text: 'bytes', or a tokenizer.json file.")
]
LearningRate = Annotated[
    float | None, typer.Option(help="Peak learning rate.", callback=within(SCALE))
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(help="Steps between checkpoints; 0 writes none.", callback=within(INDEX)),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Random seed of parameters, data order and dropout.", callback=within(SEED)),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check model, data and run directory without training.")
]
Debug = Annotated[bool, typer.Option(help="Run without jit, and stop at the first NaN or Inf.")]


def train(
    called: typer.Context,
    target: options.Target,
    data: options.Data = None,
    steps: options.Steps = None,
    run_dir: RunDir = None,
    on: options.On = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    mesh: options.Mesh = None,
    strategy: options.Strategy = None,
    remat: options.Remat = None,
    optimizer: options.Optimizer = None,
    moment_dtype: options.MomentDtype = None,
    microbatches: options.Microbatches = None,
    attention: options.Attention = None,
    eval_data: EvalData = None,
    tokenizer: Tokenizer = None,
    learning_rate: LearningRate = None,
    checkpoint_every: CheckpointEvery = None,
    seed: Seed = None,
    set_: options.Set = None,
    debug: Debug = False,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Train; exit 0 done or stopped, 3 diverged, 4 out of memory, 200, 201, 205: start again."""
    from ..job.reading import read_job

    asked = options.job_changes(
        called,
        train__data=data,
        train__steps=steps,
        train__run_dir=run_dir,
        train__eval_data=eval_data,
        train__tokenizer=tokenizer,
        train__learning_rate=learning_rate,
        train__checkpoint_every=checkpoint_every,
        train__seed=seed,
    )
    # Before jax starts, so that a wrong key is reported at once.
    job = read_job(target, asked)
    _train(job, debug=debug, dry_run=dry_run, json=json)


def _train(job: "Job", *, debug: bool, dry_run: bool, json: bool) -> None:
    from ..runtime.environment import configure_tpu_environment
    from .output import show

    configure_tpu_environment()
    if debug:
        from ..runtime.debugging import enable_debugging_mode

        enable_debugging_mode()
    with _joined_hosts() as joined, _failures_as_exit_codes(joined):
        import jax

        from ..training import TPUTrainer

        trainer = TPUTrainer.from_job(job, hooks=_hooks(job))
        if dry_run:
            typer.echo(trainer.check())
            return
        result = trainer.train()
        if jax.process_index() == 0:
            show(result, json=json)


def _hooks(job: "Job") -> "list[TrainingHook]":
    """Return the monitor of chips and host, unless the job disables it."""
    if not job.observe.enable_monitoring:
        return []
    from ..observe.monitor.monitor import MonitorHook

    return [MonitorHook.as_set(job.observe)]


@contextmanager
def _joined_hosts() -> Generator[bool]:
    """Join the other hosts if the environment names any; yield whether it does."""
    from ..runtime.multihost import MultiHostConfig

    hosts = None
    if os.environ.get("TPUKIT_NUM_HOSTS") or "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        hosts = MultiHostConfig.from_environment()
    if hosts is None or hosts.num_hosts == 1:
        yield False
        return
    with hosts:
        yield True


@contextmanager
def _failures_as_exit_codes(joined: bool) -> Generator[None]:
    """Exit with the code that tells a supervisor whether a restart can help.

    One of several hosts exits at once. An orderly exit would wait for the other hosts, which wait
    for this one in a collective or for its part of a checkpoint.
    """
    from ..errors import (
        TPUDistributedError,
        TPUOutOfMemoryError,
        TPUStorageError,
        TrainingDiverged,
    )
    from ..runtime.files import PASSING_ERRORS
    from .main import tell

    try:
        yield
    except TrainingDiverged as error:  # on all hosts alike, and what they save is to be kept
        typer.secho(f"diverged: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(ExitCode.DIVERGED) from None
    except Exception as error:  # whatever it is, the other hosts must not wait for this one
        match error:
            case TPUOutOfMemoryError():
                own = ExitCode.OUT_OF_MEMORY
            case TPUStorageError():
                own = ExitCode.STORAGE
            case OSError() if error.errno in PASSING_ERRORS:
                own = ExitCode.STORAGE
            case TPUDistributedError() if joined:
                own = ExitCode.PEER_LOST
            case _:
                own = None
        if not joined and own is None:
            raise
        told = tell(error)
        code = told if own is None else own
        if not joined:
            raise typer.Exit(code) from None
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
