"""What runs here in the place of a job: the job itself where it is small, else one of its kind.

Planning and checking need no machine, so they are of the job as it is. Training it here is another
matter: a stand-in has its mesh axes, optimizer, schedule and checkpoints, a model of a few hundred
thousand parameters, and a slice of the same chips with few hosts. What differs is listed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..hardware import Slice, list_slices
from ..job.job import Job
from ..job.model_source import is_own_model, load_model
from ..job.yaml_text import write_yaml
from ..models.transformer.config import TransformerConfig
from ..runtime.files import write_text
from ..shown import Shown
from ..training.data.sources import is_data_function

MOST_PARAMETERS = 5_000_000
MOST_TOKENS_PER_STEP = 1 << 14
MOST_DEVICES, MOST_HOSTS = 8, 2
SEQUENCE_LENGTH = 128
EXAMPLES_A_DEVICE = 2
SAVES = 6
READINGS_EVERY_S = 0.5
BYTES = {"tokenizer": "bytes"}
# Matrices of whole groups of 128 rows, as scales have them, and bytes that any axis can split.
_SIZES = {"vocab_size": 384, "d_model": 128, "d_ff": 256, "head_dim": 32}
_DENSE = {"preset": "tiny", **_SIZES}
_SPARSE = {"preset": "tiny-moe", **_SIZES, "expert_d_ff": 128}
# What of `train:` belongs to the real run: where it writes, what it starts from, whom it tells.
_NOT_TAKEN = (
    *("data", "eval_data", "tokenizer", "text_key", "packing", "epochs", "init_from", "lora"),
    *("steps", "warmup_steps", "run_dir", "checkpoint_dir", "checkpoint_every"),
    *("checkpoint_seconds", "hooks", "log_every", "eval_every", "hang_timeout_s", "tune_products"),
)
_TEXT_BYTES = 2_000_000


@dataclass(frozen=True)
class StandIn(Shown):
    """The job that is trained here.

    Attributes:
        job: Ready to be launched but for its `launch:` section and its run directory.
        is_same_model: Whether it trains the very model that was asked about.
        differences: In what it differs from the job, each in a sentence.
        corpus: Where text has to be written that stands in for data; None where it has its own.
    """

    job: Job
    is_same_model: bool
    differences: tuple[str, ...]
    corpus: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "job": self.job.to_dict(),
            "is_same_model": self.is_same_model,
            "differences": list(self.differences),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"- {one}") for one in self.differences]
        return Group(
            Text("what is trained here:", style="bold"),
            Text(write_yaml(self.job.to_dict())),
            Text("in what it differs from the job:", style="bold"),
            *lines,
        )


def config_of(job: Job) -> TransformerConfig | None:
    """Return what a job's model is; None where it is no reference transformer."""
    if isinstance(job.model, str) and is_own_model(job.model):
        return None
    found = job.model
    if isinstance(found, str):
        found = load_model(found, job.model_changes, values=False)
    return found if isinstance(found, TransformerConfig) else None


def make_stand_in(job: Job, *, steps: int, folder: Path) -> StandIn:
    """Return what to train here in the place of a job.

    Args:
        job: As it was given; it names a slice.
        steps: To train for.
        folder: Where text is to be that stands in for data which is not here.

    Raises:
        ConfigError: The model is somebody's own and the job is larger than this machine takes.
    """
    config = config_of(job)
    differences: list[str] = []
    said = job.to_dict()
    train = {key: value for key, value in said.get("train", {}).items() if key not in _NOT_TAKEN}
    small = config is not None and config.parameter_count().total <= MOST_PARAMETERS
    if config is None or small:
        said = _as_it_is(job, said, differences)
        data = _own_data(job)
    else:
        said = _scaled_down(job, config, said, differences)
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
    said["train"] = {
        **train,
        **data,
        "steps": steps,
        "warmup_steps": min(job.train.warmup_steps, steps // 10),
        "checkpoint_every": _every(steps),
        "hooks": ["profile"],
    }
    said["observe"] = {"monitoring_interval_seconds": READINGS_EVERY_S}
    said.pop("launch", None)
    return StandIn(Job.from_dict(said), small or config is None, tuple(differences), corpus)


def _every(steps: int) -> int:
    return max(1, steps // SAVES)


def _as_it_is(job: Job, said: Mapping[str, Any], differences: list[str]) -> dict[str, Any]:
    """Return a job whose model is trained as it is, on a slice that fits onto this machine."""
    found = dict(said)
    if not _is_small(job.slice):
        found |= _smaller_slice(job, differences)
    if job.tokens_per_step > MOST_TOKENS_PER_STEP:
        if config_of(job) is None:
            raise ConfigError(
                f"{job.model} is a model of your own and takes {job.tokens_per_step:,} tokens a "
                f"step; a rehearsal trains it as it is, with {MOST_TOKENS_PER_STEP:,} at most: "
                "--set batch_size=… --set sequence_length=…."
            )
        found |= _smaller_batch(Job.from_dict({**found, "batch_size": None}), differences)
    return found


def _scaled_down(
    job: Job, config: TransformerConfig, said: Mapping[str, Any], differences: list[str]
) -> dict[str, Any]:
    """Return a job of the same kind with a small model."""
    found = {**said, "model": dict(_SPARSE if config.n_experts else _DENSE)}
    standing = Job.from_dict({"model": found["model"]})
    parameters = (config_of(standing) or config).parameter_count().total
    differences.append(
        f"a model of {parameters:,} parameters (preset {standing.model}) stands in for "
        f"{config.name}, which has {config.parameter_count().total:,}"
    )
    found |= _smaller_slice(job, differences) if not _is_small(job.slice) else {}
    return found | _smaller_batch(Job.from_dict({**found, "batch_size": None}), differences)


def _is_small(slice: Slice) -> bool:
    return slice.devices <= MOST_DEVICES and slice.hosts <= MOST_HOSTS


def _smaller_slice(job: Job, differences: list[str]) -> dict[str, Any]:
    """Return slice and mesh: the axes of the job's own, each as short as it can be."""
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


def _smaller_batch(job: Job, differences: list[str]) -> dict[str, Any]:
    batch = job.batch_ways * job.microbatches * EXAMPLES_A_DEVICE
    differences.append(f"a step has {batch} examples of {SEQUENCE_LENGTH} tokens")
    return {"batch_size": batch, "sequence_length": SEQUENCE_LENGTH}


def _own_data(job: Job) -> dict[str, Any] | None:
    """Return where a job's own data is, where that is on this machine."""
    data = job.train.data
    if data is not None and is_data_function(data):
        return {"data": data}  # shipped from here, as the model's own file is
    if data is None or not Path(data).exists():
        return None
    kept = ("tokenizer", "text_key", "packing")
    stated = {key: getattr(job.train, key) for key in kept if getattr(job.train, key) is not None}
    return {"data": str(Path(data).absolute()), **stated}


def write_own_source(path: Path) -> None:
    """Write the text of this package as one document a file, the same every time."""
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
