"""`tpukit train`: a preset or a job file, data and steps, on whatever devices are here."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import job_options as options

if TYPE_CHECKING:
    from ..job import Plan

Target = Annotated[str, typer.Argument(help="A preset, a job.yaml, or module:function.")]
Data = Annotated[str | None, typer.Option(help="Tokens, text, a folder of them, or gs://…")]
Steps = Annotated[int | None, typer.Option(help="Steps of the whole run.")]
RunDir = Annotated[Path | None, typer.Option(help="The run's folder; the same again resumes.")]
EvalData = Annotated[str | None, typer.Option(help="Data for the evaluation loss.")]
Tokenizer = Annotated[str | None, typer.Option(help="For text: bytes, or a tokenizer.json.")]
LearningRate = Annotated[float | None, typer.Option(help="At its highest.")]
CheckpointEvery = Annotated[int | None, typer.Option(help="Steps; 0 for no checkpoints.")]
Seed = Annotated[int | None, typer.Option(help="Of parameters, data order, dropout.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="key=value of train:; repeat.")]
Debug = Annotated[bool, typer.Option(help="No jit, stop at the first NaN or Inf.")]


def train(
    target: Target,
    data: Data = None,
    steps: Steps = None,
    run_dir: RunDir = None,
    on: options.On = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    mesh: options.Mesh = None,
    strategy: options.Strategy = None,
    remat: options.Remat = None,
    optimizer: options.Optimizer = None,
    microbatches: options.Microbatches = None,
    attention: options.Attention = None,
    eval_data: EvalData = None,
    tokenizer: Tokenizer = None,
    learning_rate: LearningRate = None,
    checkpoint_every: CheckpointEvery = None,
    seed: Seed = None,
    set_: Set = None,
    debug: Debug = False,
    json: options.Json = False,
) -> None:
    """Train: exit 0 done or stopped by a signal and saved, 3 diverged, 200 hung, 201 peer lost."""
    from ..job.sources import parse_assignments

    plan = read_plan(
        target,
        {
            "slice": on,
            "batch_size": batch,
            "sequence_length": sequence,
            "mesh": mesh,
            "strategy": strategy,
            "remat": remat,
            "optimizer": optimizer,
            "microbatches": microbatches,
            "attention": attention,
        },
    )
    changes: dict[str, Any] = {
        "data": data,
        "steps": steps,
        "run_dir": None if run_dir is None else str(run_dir),
        "eval_data": eval_data,
        "tokenizer": tokenizer,
        "learning_rate": learning_rate,
        "checkpoint_every": checkpoint_every,
        "seed": seed,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if optimizer is not None:  # before what the train: section says
        name, moments = plan.optimizer_settings()
        given |= {"optimizer": name, "moment_dtype": moments or "float32"}
    given |= parse_assignments(set_ or ())
    _train(plan, given, debug=debug, json=json)


def read_plan(target: str, settings: dict[str, Any]) -> "Plan":
    """The plan that a preset's name or a job file, with the options given, describes."""
    from ..job import Plan
    from ..job.job import DEFAULT_SEQUENCE_LENGTH
    from ..job.model_source import is_huggingface, is_own_model
    from ..job.reading import is_job_file

    if is_job_file(target):
        return Plan.from_yaml(Path(target), **settings)
    given = {name: value for name, value in settings.items() if value is not None}
    if "sequence_length" not in given and not is_own_model(target) and not is_huggingface(target):
        from ..job.model_source import refuse_unknown_preset
        from ..models.presets import get_preset

        refuse_unknown_preset(target)
        given["sequence_length"] = min(DEFAULT_SEQUENCE_LENGTH, get_preset(target).max_seq_len)
    return Plan.from_dict({"model": target, **given})


def _train(plan: "Plan", changes: dict[str, Any], *, debug: bool, json: bool) -> None:
    from ..job.train import TrainingSettings
    from ..runtime.environment import configure_tpu_environment
    from .output import show

    # Before jax starts, so that a wrong key is answered at once.
    TrainingSettings.from_section(plan.sections.get("train", {}), **changes)
    configure_tpu_environment()
    if debug:
        from ..runtime.debugging import enable_debugging_mode

        enable_debugging_mode()
    with _joined_hosts(), _failures_as_exit_codes():
        import jax

        from ..training import TPUTrainer

        result = TPUTrainer.from_plan(plan, train=changes).train()
        if jax.process_index() == 0:
            show(result, json=json)


@contextmanager
def _joined_hosts() -> Generator[None]:
    """Join the other hosts, where the environment says that there are any."""
    from ..runtime.multihost import MultiHostConfig

    hosts = None
    if os.environ.get("TPUKIT_NUM_HOSTS") or "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        hosts = MultiHostConfig.from_environment()
    if hosts is None or hosts.num_hosts == 1:
        yield
        return
    with hosts:
        yield


@contextmanager
def _failures_as_exit_codes() -> Generator[None]:
    """End with the code that tells a supervisor whether starting again can help."""
    from ..errors import TPUDistributedError, TrainingDiverged
    from ..training.failure import ExitCode

    try:
        yield
    except TrainingDiverged as error:
        typer.secho(f"diverged: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(ExitCode.DIVERGED) from None
    except TPUDistributedError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.stderr.flush()
        # At once: a process that lingers keeps the others waiting in their collectives.
        os._exit(ExitCode.PEER_LOST)
