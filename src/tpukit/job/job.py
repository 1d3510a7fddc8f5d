"""`Plan`: model, slice, mesh, batch and what else decides a training step, as plain data.

It is what the planner returns, the compiler checks, the trainer runs and a pod is launched with,
and the content of a job file. Reading one imports neither jax nor flax, so that an answer on disk
is there at once.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..compiler.program.request import fill_mesh
from ..errors import ConfigError, did_you_mean
from ..hardware import Slice
from .fingerprint import package_versions, source_fingerprint
from .model_source import is_own_model, load_model, model_fingerprint
from .reading import SECTIONS, fields_from, read_job_file

DEFAULT_SEQUENCE_LENGTH = 2048
OPTIMIZERS = ("adamw", "lion", "adafactor", "sgd")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training step, and where it runs.

    Attributes:
        model: A preset's name, a Hugging Face config.json, or "module:function" that builds one.
        slice: The slice it is for, e.g. "v6e-8"; None is whatever devices are here.
        model_changes: Fields of the preset to change, e.g. `{"n_layers": 4}`.
        batch_size: Examples in a step over all devices; None is one for each device.
        mesh: Size of each axis by name; -1 is all that is left.
        strategy: How parameters are split; None follows from the names of the mesh axes.
        optimizer: One of adamw, lion, adafactor, sgd; "adamw mu=bfloat16" sets its state's format.
        options: Compiler options.
        dcn_mesh: Factor of each mesh axis that runs across slices.
        loss_chunks: Pieces the loss is cut into; see `Workload`.
        sections: What a job file says besides, for the trainer ("train") and pods ("launch").
    """

    model: str
    slice: str | None = None
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
    loss_chunks: int | str | None = "auto"
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "microbatches"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of 1 or more.")
        self.optimizer_settings()
        if self.slice is not None:
            fill_mesh(self.mesh, self.target)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """Build from plain data; an unknown key is refused with the nearest known one.

        `model` may be a name, or a mapping with `preset` and fields to change.
        """
        return cls(**fields_from(data, {entry.name for entry in dataclasses.fields(cls)}))

    @classmethod
    def from_yaml(cls, path: Path | str, **overrides: Any) -> "Plan":
        """Read a job file; `overrides` that are not None go before what it says."""
        given = {key: value for key, value in overrides.items() if value is not None}
        return cls.from_dict({**read_job_file(Path(path)), **given})

    def to_yaml(self, path: Path | str) -> None:
        """Write a job file that `from_yaml` reads back; what is as by default is left out."""
        import yaml

        usual = {**Plan(model=self.model).to_dict(), "model": None}
        data = {key: value for key, value in self.to_dict().items() if value != usual.get(key)}
        Path(path).write_text(yaml.safe_dump(data, sort_keys=False))

    def replace(self, **changes: Any) -> "Plan":
        """The same job with some keys changed."""
        return Plan.from_dict({**self.to_dict(), **changes})

    @property
    def target(self) -> Slice:
        """The slice it is for."""
        if self.slice is None:
            raise ConfigError("a job needs 'slice', for example slice: v6e-8 (or --on v6e-8).")
        return Slice.parse(self.slice)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The mesh with every size filled in."""
        return fill_mesh(self.mesh, self.target)

    @property
    def key(self) -> str:
        """A hash of the job, of the source it is built from and of what that stands on."""
        program = {key: value for key, value in self.to_dict().items() if key not in SECTIONS}
        own = model_fingerprint(self.model)
        identity = [program, source_fingerprint(), package_versions(), own]
        return hashlib.sha256(
            json.dumps(identity, sort_keys=True, default=str).encode()
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        data = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        changes, sections = dict(data.pop("model_changes")), data.pop("sections")
        data["model"] = {"preset": self.model, **changes} if changes else self.model
        data["mesh"] = dict(self.mesh)
        data["options"] = dict(self.options)
        data["dcn_mesh"] = None if self.dcn_mesh is None else list(self.dcn_mesh)
        return {**data, **{name: dict(section) for name, section in sections.items()}}

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
        return self.batch_size or self.batch_ways * self.microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all devices."""
        return self.examples * self.sequence_length

    @property
    def model_flops(self) -> float | None:
        """FLOPs of the model in one step, causal attention counted once; None of an own model."""
        if is_own_model(self.model):
            return None
        config = load_model(self.model, self.model_changes)
        return config.flops_per_token(self.sequence_length).total * self.tokens_per_step

    @cached_property
    def workload(self) -> Any:
        """The workload it describes."""
        from ..step.placement import strategy_for
        from ..step.workload import Workload

        how: dict[str, Any] = {
            "optimizer": self._transformation(),
            "remat": self.remat,
            "strategy": self.strategy or strategy_for(self.mesh),
            "microbatches": self.microbatches,
            "attention": self.attention,
            "schedule": self.schedule,
        }
        model = load_model(self.model, self.model_changes)
        if isinstance(model, Workload):
            return model.replace(**how)
        shape = {"batch_size": self.examples, "sequence_length": self.sequence_length}
        return Workload(model, **shape, loss_chunks=self.loss_chunks, **how)  # pyright: ignore[reportArgumentType]  checked there

    @property
    def batch_ways(self) -> int:
        """Devices that share a batch's examples."""
        from ..parallel.mesh.axes import BATCH_ROLES, role_of

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
