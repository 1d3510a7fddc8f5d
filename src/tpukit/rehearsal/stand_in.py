"""The stand-in: the job that is trained on this machine, which is the given one if it is small.

A large job is planned and checked unchanged, but cannot be trained here. Its stand-in has the same
mesh axes, optimizer, schedule and checkpoints, a model of a few hundred thousand parameters, and a
slice of the same chips with few hosts. The differences are listed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..hardware import Slice, list_slices
from ..job.job import Job
from ..job.model_source import is_own_model
from ..job.yaml_text import write_yaml
from ..models.transformer.config import TransformerConfig
from ..plain_data import JsonMapping, JsonObject
from ..runtime.files import write_text
from ..shown import Renderable, Shown
from ..training.data.sources import is_data_function

MOST_PARAMETERS = 5_000_000
MOST_TOKENS_PER_STEP = 1 << 14
MOST_DEVICES, MOST_HOSTS = 8, 2
SEQUENCE_LENGTH = 128
EXAMPLES_A_DEVICE = 2
SAVES = 6
READINGS_EVERY_S = 0.5
BYTES = {"tokenizer": "bytes"}
# Matrices are multiples of 128 rows, as quantization scales need, and divisible by any axis.
_SIZES = {"vocab_size": 384, "d_model": 128, "d_ff": 256, "head_dim": 32}
_DENSE = {"preset": "tiny", **_SIZES}
_SPARSE = {"preset": "tiny-moe", **_SIZES, "expert_d_ff": 128}
# Settings of `train:` that belong to the real run: outputs, starting point, hooks.
_NOT_TAKEN = (
    *("data", "eval_data", "tokenizer", "text_key", "packing", "epochs", "init_from", "lora"),
    *("steps", "warmup_steps", "run_dir", "checkpoint_dir", "checkpoint_every"),
    *("checkpoint_seconds", "hooks", "log_every", "eval_every", "hang_timeout_s", "tune_products"),
)
_TEXT_BYTES = 2_000_000


@dataclass(frozen=True)
class StandIn(Shown):
    """The job that is trained on this machine.

    Attributes:
        job: The job to launch, without `launch:` section and run directory.
        is_same_model: Whether its model is the given job's.
        differences: Differences from the given job, each in a sentence.
        corpus: Path at which to write training text; None where the job has its own data.
    """

    job: Job
    is_same_model: bool
    differences: tuple[str, ...]
    corpus: Path | None = None
    _facts = ("job", "is_same_model", "differences")

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"- {difference}") for difference in self.differences]
        return Group(
            Text("what is trained here:", style="bold"),
            Text(write_yaml(self.job.to_dict())),
            Text("in what it differs from the job:", style="bold"),
            *lines,
        )


def config_of(job: Job) -> TransformerConfig | None:
    """Return the config of a job's model; None where it is no reference transformer."""
    if isinstance(job.model, str) and is_own_model(job.model):
        return None
    model = job.load_model()
    return model if isinstance(model, TransformerConfig) else None


def make_stand_in(job: Job, *, steps: int, folder: Path) -> StandIn:
    """Return the stand-in for a job.

    Args:
        job: As it was given; it names a slice.
        steps: Steps to train.
        folder: Folder for training text, where the job's data is not on this machine.

    Raises:
        ConfigError: The model is the user's own, and the job is too large for this machine.
    """
    config = config_of(job)
    differences: list[str] = []
    document = job.to_dict()
    train = {
        key: value for key, value in document.get("train", {}).items() if key not in _NOT_TAKEN
    }
    small = config is not None and config.parameter_count().total <= MOST_PARAMETERS
    if config is None or small:
        document = _with_same_model(job, document, differences)
        data = _own_data(job)
    else:
        document = _with_small_model(job, config, document, differences)
        data = None
    corpus = folder / "corpus.jsonl" if data is None else None
    if data is None and not job.reads_tokens:
        raise ConfigError(
            f"{job.model} reads no tokens, so no text can stand in for its data; give its own: "
            "--data file.py:function, an .npz file, or a folder with a folder of images per class."
        )
    if data is None:
        data = {"data": str(corpus), **BYTES}
        differences.append("it learns the text of tpukit's own source, as bytes")
    differences.append(
        f"it takes {steps} steps"
        + ("" if job.train.steps is None else f" instead of {job.train.steps:,}")
        + f" and saves every {_every(steps)}"
    )
    for key in ("init_from", "lora"):
        if getattr(job.train, key) is not None:
            differences.append(f"train.{key} is left out: it trains all of a new model")
    document["train"] = {
        **train,
        **data,
        "steps": steps,
        "warmup_steps": min(job.train.warmup_steps, steps // 10),
        "checkpoint_every": _every(steps),
        "hooks": ["profile"],
    }
    document["observe"] = {"monitoring_interval_seconds": READINGS_EVERY_S}
    document.pop("launch", None)
    return StandIn(Job.from_dict(document), small or config is None, tuple(differences), corpus)


def _every(steps: int) -> int:
    return max(1, steps // SAVES)


def _with_same_model(job: Job, document: JsonMapping, differences: list[str]) -> JsonObject:
    """Return the job's document with the same model, on a slice small enough for this machine."""
    changed = dict(document)
    if not _is_small(job.slice):
        changed |= _smaller_slice(job, differences)
    if job.tokens_per_step > MOST_TOKENS_PER_STEP:
        if config_of(job) is None:
            raise ConfigError(
                f"{job.model} is a model of your own and takes {job.tokens_per_step:,} tokens per "
                f"step; a rehearsal trains it unchanged, with {MOST_TOKENS_PER_STEP:,} at most: "
                "--set batch_size=… --set sequence_length=…."
            )
        changed |= _smaller_batch(Job.from_dict({**changed, "batch_size": None}), differences)
    return changed


def _with_small_model(
    job: Job, config: TransformerConfig, document: JsonMapping, differences: list[str]
) -> JsonObject:
    """Return the job's document with a small model of the same kind."""
    changed = {**document, "model": dict(_SPARSE if config.n_experts else _DENSE)}
    standing = Job.from_dict({"model": changed["model"]})
    parameters = (config_of(standing) or config).parameter_count().total
    differences.append(
        f"a model of {parameters:,} parameters (preset {standing.model}) stands in for "
        f"{config.name}, which has {config.parameter_count().total:,}"
    )
    changed |= _smaller_slice(job, differences) if not _is_small(job.slice) else {}
    return changed | _smaller_batch(Job.from_dict({**changed, "batch_size": None}), differences)


def _is_small(slice: Slice) -> bool:
    return slice.devices <= MOST_DEVICES and slice.hosts <= MOST_HOSTS


def _smaller_slice(job: Job, differences: list[str]) -> JsonObject:
    """Return a small slice and mesh with the job's axes."""
    axes = [name for name, size in job.mesh_sizes.items() if size > 1] or ["fsdp"]
    least = 2 ** len(axes)
    for slice in list_slices(job.slice.chip.name):
        if slice.devices >= least and _is_small(slice):
            differences.append(f"{slice} stands in for {job.slice}")
            mesh = {axes[0]: -1, **dict.fromkeys(axes[1:], 2)}
            return {"on": str(slice), "mesh": mesh, "dcn_mesh": None}
    raise ConfigError(
        f"a mesh of {' × '.join(axes)} takes {least} devices at least, and a rehearsal has "
        f"{MOST_DEVICES}; rehearse with a mesh of fewer axes: --set mesh=fsdp=-1."
    )


def _smaller_batch(job: Job, differences: list[str]) -> JsonObject:
    batch = job.batch_ways * job.microbatches * EXAMPLES_A_DEVICE
    differences.append(f"a step has {batch} examples of {SEQUENCE_LENGTH} tokens")
    return {"batch_size": batch, "sequence_length": SEQUENCE_LENGTH}


def _own_data(job: Job) -> JsonObject | None:
    """Return the job's data settings, if its data is on this machine."""
    data = job.train.data
    if data is not None and is_data_function(data):
        return {"data": data}  # shipped from this machine, like the model's file
    if data is None or not Path(data).exists():
        return None
    kept = ("tokenizer", "text_key", "packing")
    stated = {key: getattr(job.train, key) for key in kept if getattr(job.train, key) is not None}
    return {"data": str(Path(data).absolute()), **stated}


def write_own_source(path: Path) -> None:
    """Write the text of this package, one document per file, always the same."""
    root = Path(__file__).parents[1]
    lines: list[str] = []
    written = 0
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines.append(json.dumps({"text": text}))
        written += len(text)
        if written > _TEXT_BYTES:
            break
    write_text(path, "\n".join(lines) + "\n")
