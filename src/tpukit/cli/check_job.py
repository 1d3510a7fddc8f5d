"""A job to check: model, batch, mesh and strategy as plain data, from YAML or from options.

Reading a job imports neither jax nor flax, so that an answer on disk is there at once.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..compiler.fixes import JobShape
from ..compiler.request import fill_mesh
from ..errors import ConfigError, MeshError, TPUValidationError, did_you_mean
from ..hardware import Slice

DEFAULT_SEQUENCE_LENGTH = 2048
OPTIMIZERS = ("adamw", "lion", "adafactor", "sgd")
_STRATEGY_OF_ROLE = {
    "fsdp": "fsdp",
    "tensor": "megatron",
    "expert": "expert",
    "stage": "pipeline",
    "context": "context",
    "data": "data",
    "replica": "data",
}
# Everything that decides which program a job becomes.
_ROOMS_OF_PROGRAMS = ("kernels", "models", "parallel")
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
_COMPUTE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class CheckJob:
    """One training step to be compiled for one slice.

    Attributes:
        model: A preset's name.
        slice: The slice it is for, e.g. "v6e-8".
        model_changes: Fields of the preset to change, e.g. `{"n_layers": 4}`.
        batch_size: Examples in a step over all devices; None is one for each device.
        mesh: Size of each axis by name; -1 is all that is left.
        strategy: How parameters are split; None follows from the names of the mesh axes.
        optimizer: One of adamw, lion, adafactor, sgd; "adamw mu=bfloat16" sets its state's format.
        options: Compiler options.
        dcn_mesh: Factor of each mesh axis that runs across slices.
    """

    model: str
    slice: str
    model_changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch_size: int | None = None
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    mesh: Mapping[str, int] = field(default_factory=lambda: {"fsdp": -1})
    strategy: str | None = None
    remat: str = "full"
    optimizer: str = "adamw"
    microbatches: int = 1
    attention: str = "auto"
    schedule: str = "1f1b"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dcn_mesh: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "microbatches"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of 1 or more.")
        self.optimizer_settings()
        fill_mesh(self.mesh, self.target)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CheckJob":
        """Build from plain data; an unknown key is refused with the nearest known one.

        `model` may be a preset's name, or a mapping with `preset` and fields to change.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise ConfigError(
                    f"'{key}' is not a key of a job; keys are {', '.join(sorted(known))}."
                    + did_you_mean(str(key), known)
                )
        values = dict(data)
        model = values.get("model")
        if isinstance(model, Mapping):
            changes: dict[str, Any] = dict(model)  # pyright: ignore[reportUnknownArgumentType]  checked by the model
            values["model"] = changes.pop("preset", None)
            values["model_changes"] = changes
        for key in ("model", "slice"):
            if not isinstance(values.get(key), str):
                raise ConfigError(f"a job needs '{key}', for example {_EXAMPLES[key]}.")
        if isinstance(values.get("mesh"), str):
            values["mesh"] = parse_mesh(values["mesh"])
        if not isinstance(values.get("mesh", {}), Mapping):
            raise ConfigError(f"mesh is {values['mesh']!r}; write sizes by axis, e.g. {{fsdp: 8}}.")
        if values.get("dcn_mesh") is not None:
            values["dcn_mesh"] = tuple(values["dcn_mesh"])
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: Path, **overrides: Any) -> "CheckJob":
        """Read a job file; `overrides` that are not None go before what it says."""
        import yaml

        try:
            data = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
        if not isinstance(data, dict):
            raise ConfigError(
                f"{path} holds no job; write keys such as model, batch_size and slice."
            )
        given = {key: value for key, value in overrides.items() if value is not None}
        return cls.from_dict({**data, **given})

    def replace(self, **changes: Any) -> "CheckJob":
        """The same job with some keys changed."""
        return CheckJob.from_dict({**self.to_dict(), **changes})

    @property
    def target(self) -> Slice:
        """The slice it is for."""
        return Slice.parse(self.slice)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The mesh with every size filled in."""
        return fill_mesh(self.mesh, self.target)

    @property
    def key(self) -> str:
        """A hash of the job, of the source it is built from and of what that stands on."""
        identity = [self.to_dict(), _source_fingerprint(), _versions()]
        return hashlib.sha256(
            json.dumps(identity, sort_keys=True, default=str).encode()
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        data = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        changes = dict(data.pop("model_changes"))
        data["model"] = {"preset": self.model, **changes} if changes else self.model
        data["mesh"] = dict(self.mesh)
        data["options"] = dict(self.options)
        data["dcn_mesh"] = None if self.dcn_mesh is None else list(self.dcn_mesh)
        return data

    def optimizer_settings(self) -> tuple[str, str | None]:
        """Name and format of the first moment, from e.g. "adamw mu=bfloat16"."""
        found = re.fullmatch(r"(\w+)(?: mu=(\w+))?", self.optimizer)
        if found is None or found[1] not in OPTIMIZERS or (found[2] and found[1] != "adamw"):
            name = self.optimizer.split(" ")[0]
            raise ConfigError(
                f"optimizer '{self.optimizer}' is not known; use {', '.join(OPTIMIZERS)}, or "
                f"'adamw mu=bfloat16'.{did_you_mean(name, OPTIMIZERS)}"
            )
        return found[1], found[2]

    @property
    def examples(self) -> int:
        """Examples in a step over all devices."""
        return self.batch_size or self._batch_ways * self.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all devices."""
        return self.examples * self.sequence_length

    @property
    def model_flops(self) -> float:
        """FLOPs of the model in one step, causal attention counted once."""
        from ..models.presets import get_preset

        config = get_preset(self.model, **self.model_changes)
        return config.flops_per_token(self.sequence_length).total * self.tokens_per_step

    @cached_property
    def workload(self) -> Any:
        """The workload it describes."""
        from ..models.presets import get_preset
        from ..models.workload import Workload
        from ..parallel.axes import role_of

        names = dict.fromkeys(_STRATEGY_OF_ROLE[role_of(axis)] for axis in self.mesh)
        return Workload(
            get_preset(self.model, **self.model_changes),
            batch_size=self.examples,
            sequence_length=self.sequence_length,
            optimizer=self._transformation(),
            remat=self.remat,
            strategy=self.strategy or "+".join(names),
            microbatches=self.microbatches,
            attention=self.attention,
            schedule=self.schedule,
        )

    def shape(self) -> JobShape:
        """What proposing fixes needs to know of it."""
        config = self.workload.config
        tokens = self.tokens_per_step // self._batch_ways // self.microbatches
        width = _COMPUTE_BYTES[config.dtype]
        return JobShape(
            model=self.model,
            model_changes=self.model_changes,
            batch_size=self.examples,
            batch_ways=self._batch_ways,
            microbatches=self.microbatches,
            remat=str(self.workload.remat),
            optimizer=self.optimizer,
            param_dtype=config.param_dtype,
            mesh=self.mesh_sizes,
            heads=config.n_heads,
            layer_inputs_bytes=config.n_layers * tokens * config.d_model * width,
            pipelined="pipeline" in self.workload.strategy,
        )

    @property
    def _batch_ways(self) -> int:
        from ..parallel.axes import BATCH_ROLES, role_of

        ways = 1
        for axis, size in self.mesh_sizes.items():
            ways *= size if role_of(axis) in BATCH_ROLES else 1
        return ways

    def _transformation(self) -> Any:
        import optax

        name, mu = self.optimizer_settings()
        if name == "adamw":
            return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1, mu_dtype=mu)
        return {"lion": optax.lion, "adafactor": optax.adafactor, "sgd": optax.sgd}[name](1e-4)


_EXAMPLES = {"model": "model: llama3.1-8b", "slice": "slice: v6e-8 (or --on v6e-8)"}


def parse_mesh(text: str) -> dict[str, int]:
    """Read "fsdp=8,tensor=4"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not re.fullmatch(r"-1|\d+", size):
            raise MeshError(f"mesh '{text}': '{part}' is not a size; write fsdp=8,tensor=4.")
        if name in sizes:
            raise MeshError(f"mesh '{text}' names '{name}' twice; give each axis one size.")
        sizes[name] = int(size)
    return sizes


def _source_fingerprint() -> str:
    """A hash of the source that decides which program a job becomes."""
    root = Path(__file__).parents[1]
    others = ("compiler/program.py", "compiler/facts.py", "runtime/device_grid.py")
    files = [Path(__file__), *(root / name for name in others)]
    for room in _ROOMS_OF_PROGRAMS:
        files += [*(root / room).rglob("*.py"), *(root / room).rglob("*.toml")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def is_job_file(target: str) -> bool:
    """Whether a check's target names a YAML file."""
    return target.endswith((".yaml", ".yml"))


def refuse_unknown_preset(name: str) -> None:
    """Raise, with the nearest names, when `name` is neither a preset nor anything else."""
    from ..models.presets import list_presets

    if name not in list_presets():
        raise TPUValidationError(
            f"'{name}' is no preset, no .yaml file and no module:function."
            + did_you_mean(name, list_presets())
        )
