"""Hand-over to torch_tpu: the plan of a checked job, and a script that trains by it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..checker.result import CheckResult
from ..compiler.program.request import as_abstract_mesh
from ..errors import ConfigError, TPUModelError, TPUValidationError
from ..hardware.target import target_chip
from ..job.compiler_flags import flags_of
from ..job.job import Job
from ..job.model_source import PREFIX, is_torch_source
from ..job.step import build_step
from ..models.adapters.torch_module.state import ModuleState, path_of
from ..parallel.sharding.rules import spec_entries
from ..plain_data import JsonMapping, JsonObject
from ..runtime.environment import configure_tpu_environment
from ..runtime.files import try_output_folder, write_output
from ..runtime.flags import set_xla_flags
from ..runtime.versions import installed_versions
from ..step.workload import Workload

PLAN, SCRIPT = "handover.json", "train_torch_tpu.py"
SCHEMA = 1
_SOURCE = Path(__file__).with_name("handover_script.py")
_VERSIONS = ("tpukit", "torch", "torchax", "transformers", "jax", "libtpu")
# The settings of `train:` that the script uses.
_TRAIN = (
    *("optimizer", "learning_rate", "beta1", "beta2", "weight_decay", "no_decay", "clip_norm"),
    *("precision", "param_dtype", "seed"),
)
_NOT_TRIED = (
    "tested on CPU only: device 'tpu' and backend 'tpu_dist' are the names that torch_tpu 0.2.0 "
    "registers; memory and step time are those of the jax program, not of torch_tpu's"
)


@dataclass(frozen=True)
class Handover:
    """The two files of a hand-over.

    Attributes:
        plan: JSON with mesh, placements, flags, environment, and the result of the check.
        script: Python that trains by the plan: torchrun train_torch_tpu.py.
    """

    plan: Path
    script: Path


def write_handover(checked: CheckResult | Job, folder: Path | str) -> Handover:
    """Write the files with which torch_tpu trains a PyTorch job on a TPU VM.

    Args:
        checked: The result of `tpukit.check`, or an unchecked job.
        folder: The target folder; it is created if needed.

    Raises:
        TPUModelError: The model is not a PyTorch module.
        ConfigError: The model is a Python object, which the script cannot import.
        TPUValidationError: The mesh has pipeline stages, or the folder cannot be written to.

    Example:
        >>> result = tpukit.check("torch:my_model.py:build", on="v6e-8", batch_size=8)
        >>> write_handover(result, "handover")
    """
    job = checked.job if isinstance(checked, CheckResult) else checked
    if job is None:
        raise TPUModelError(
            "a plain function was checked, but a hand-over needs a job with a model; check a job."
        )
    target = Path(folder)
    plan = handover_plan(job, beside=target)
    if isinstance(checked, CheckResult):
        plan["checked"] = _findings(checked)
    try_output_folder(target)
    target.mkdir(parents=True, exist_ok=True)
    written = Handover(target / PLAN, target / SCRIPT)
    write_output(written.plan, _as_json(plan))
    write_output(written.script, _SOURCE.read_text())
    return written


def handover_plan(job: Job, *, beside: Path = Path()) -> JsonObject:
    """Return the content of the plan file; the builder's path is relative to `beside`."""
    name = _builder(job, beside)
    if "pipeline" in (job.strategy or "") or "stage" in job.mesh:
        raise TPUValidationError(
            "DTensor has no pipeline stages; check a mesh of data, fsdp and tensor axes."
        )
    configure_tpu_environment()  # otherwise jax searches for a TPU in this process, slowly
    with target_chip(job.slice.chip.name):  # as in the check
        step = build_step(job, values=False)
    work, sizes = step.work, job.mesh_sizes
    module = _module_of(work)
    mesh = as_abstract_mesh(sizes, job.slice)
    axes = tuple(sizes)
    state = ModuleState.of(module)
    layout = work.layout(mesh)
    parameters: JsonObject = {}
    named = {path_of(name) for name, _ in module.named_parameters()}
    for path, tensor in {**state.trained, **state.carried}.items():
        if path not in named:
            continue  # a buffer: replicated on every device
        placed = layout.find(path) if path in state.trained else None
        spec = PartitionSpec() if placed is None else placed.spec
        parameters[_dotted(path)] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "placements": dtensor_placements(spec, tensor.ndim, axes),
        }
    flags = {**flags_of(job.compile, generation=job.slice.chip.name), **job.options}
    environment: dict[str, str] = {}
    if flags:
        set_xla_flags(flags, environment=environment)
    shardings = work.shardings(mesh).batch
    return {
        "schema": SCHEMA,
        "model": name,
        "slice": str(job.slice),
        "devices": job.slice.devices,
        "mesh": sizes,
        "strategy": layout.strategy,
        "parameters": parameters,
        "tied": {_dotted(alias): _dotted(path) for alias, path in state.aliases.items()},
        "batch": _batch(work, shardings, axes),
        "remat": None if job.remat is None else str(job.remat),
        "microbatches": job.microbatches,
        "train": job.train.model_dump(mode="json", include=set(_TRAIN)),
        "flags": flags,
        "environment": environment,
        "versions": installed_versions(*_VERSIONS),
        "checked": None,
        "notes": [*step.notes, _NOT_TRIED],
    }


def dtensor_placements(spec: PartitionSpec, rank: int, axes: Sequence[str]) -> list[str]:
    """Return DTensor's placement for each mesh axis: "Shard(0)" or "Replicate()".

    Raises:
        TPUValidationError: Several axes shard one dimension in another order than the mesh's,
            which DTensor does not support.
    """
    placements = dict.fromkeys(axes, "Replicate()")
    for dimension, names in enumerate(spec_entries(spec, rank)):
        if sorted(names, key=axes.index) != list(names):
            raise TPUValidationError(
                f"dimension {dimension} is sharded by {', '.join(names)}, in another order than "
                "the "
                f"mesh's ({', '.join(axes)}); name the mesh axes in that order."
            )
        placements.update(dict.fromkeys(names, f"Shard({dimension})"))
    return list(placements.values())


def _batch(
    work: Workload, shardings: Mapping[str, jax.sharding.NamedSharding], axes: Sequence[str]
) -> JsonObject:
    return {
        name: {
            "shape": list(shape.shape),
            "dtype": shape.dtype.name,
            "placements": dtensor_placements(shardings[name].spec, shape.ndim, axes),
        }
        for name, shape in work.batch_shapes().items()
    }


def _builder(job: Job, beside: Path) -> str:
    """Return "module:function" for the script; a file is relative to the script."""
    if not isinstance(job.model, str):
        raise ConfigError(
            "the model is a Python object, which a script cannot import; put it into a function "
            "and check 'torch:my_model.py:build'."
        )
    name = job.model.removeprefix(PREFIX) if is_torch_source(job.model) else job.model
    where, colon, function = name.rpartition(":")
    if not where.endswith(".py"):
        return name
    return os.path.relpath(Path(where).resolve(), beside.resolve()) + colon + function


def _module_of(work: Workload) -> Any:
    """Return the PyTorch module of a step."""
    from ..frameworks import is_instance_of

    model = work.model
    inner = getattr(model, "module", model) if type(model).__name__ == "TorchModel" else model
    if not is_instance_of(inner, "torch.nn"):
        raise TPUModelError(
            f"a hand-over needs a PyTorch module, but this is {type(inner).__name__}; use "
            "`tpukit train` to train it."
        )
    return inner


def _findings(result: CheckResult) -> JsonObject:
    """Return the compiler's figures, each with its origin."""
    memory = result.memory.to_dict()
    step = None if result.prediction is None else result.prediction.to_dict()
    return {
        "fits": result.fits,
        "memory": {key: memory[key] for key in ("origin", "total_bytes", "usable_bytes")},
        "step": step and {key: step[key] for key in ("origin", "step_time_s", "low_s", "high_s")},
        "no_step": result.no_prediction or None,
        "versions": dict(result.compiled.versions),
    }


def _dotted(path: str) -> str:
    return path.replace("/", ".")


def _as_json(plan: JsonMapping) -> str:
    """Return the plan as JSON, with one line per parameter for readability."""
    import json

    parts: list[str] = []
    for key, value in plan.items():
        text = json.dumps(value)
        if key in ("parameters", "batch"):
            lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
            text = "{\n" + ",\n".join(lines) + "\n }"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
