"""`Job`: model, slice, mesh, batch, training and compiler settings of a run, as one document.

The planner returns a job, `check` compiles it, the trainer runs it, and a pod is launched with it.
A job file contains one. Reading a job imports neither jax nor flax, so cached answers load fast.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic import model_validator as checks_all

from ..errors import ConfigError, TPUValidationError
from ..frameworks import model_name
from ..hardware import Slice
from ..hardware.mesh_sizes import default_mesh, fill_mesh, read_mesh
from ..models.defaults import TRAINING_SEQUENCE_LENGTH
from ..plain_data import JsonMapping, JsonObject
from ..runtime.files import write_output
from ..shown import Renderable
from .document import Document, Origin
from .hidden import shown_values
from .model_source import (
    ModelSource,
    base_fingerprint,
    is_own_model,
    model_fingerprint,
    package_versions,
    source_fingerprint,
)
from .sections import CompileSettings, Count, LaunchSettings, Limits, ObserveSettings
from .settings import as_config_error, fold_inner_keys, refuse_unknown_inside
from .train import PROGRAM_FIELDS, TrainingSettings
from .yaml_text import write_yaml

if TYPE_CHECKING:
    from .config import TPUConfig

# Fields that are sections of a job file.
NESTED = ("train", "compile", "observe", "launch")
_EXAMPLE = "model: llama3.1-8b"


class Job(Limits):
    """One training job: what is trained, where, and how.

    `model` is a preset, a Hugging Face config.json, or "module:function" that builds a model. In
    Python it may also be a `Workload`, or any model that one takes.

    Example:
        >>> job = Job(model="tiny", on="v6e-8", sequence_length=64, train={"optimizer": "lion"})
        >>> job.mesh_sizes, job.examples, job.train.optimizer
        ({'fsdp': 8}, 8, 'lion')
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = Field(description="preset, config.json, module:function, or a model in Python")
    model_changes: JsonMapping = Field(
        default_factory=JsonObject, description="fields of the preset to change"
    )
    on: str | None = Field(
        default=None, description="slice, e.g. v6e-8; None: the devices of this machine"
    )
    mesh: Annotated[Mapping[str, int], BeforeValidator(read_mesh)] = Field(
        default_factory=lambda: {"fsdp": -1},
        description="size of each axis; -1: the rest; None: fsdp, and data over slices",
    )
    dcn_mesh: tuple[Count, ...] | None = Field(
        default=None, description="factor of each mesh axis that runs across slices"
    )
    batch_size: Count | None = Field(
        default=None, description="examples in a step over all devices; None: one per device"
    )
    sequence_length: Count | None = Field(
        default=None,
        description=f"tokens per example; None: {TRAINING_SEQUENCE_LENGTH} or the model's limit",
    )
    strategy: str | None = Field(
        default=None, description="how parameters are sharded; None: by the names of the axes"
    )
    remat: str | None = Field(
        default=None, description="what the backward pass recomputes; None: full, or as built"
    )
    microbatches: Count = Field(default=1, description="parts that a step's batch is split into")
    attention: str = Field(default="auto", description="auto, flash, splash, xla, ring, cudnn")
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description="schedule of pipeline stages: 1f1b or gpipe"
    )
    loss_chunks: Count | Literal["auto"] | None = Field(
        default="auto", description="chunks the loss is computed in; see Workload"
    )
    options: JsonMapping = Field(
        default_factory=JsonObject,
        description="compiler options; they override those of compile:",
    )
    train: TrainingSettings = Field(default_factory=TrainingSettings)
    compile: CompileSettings = Field(default_factory=CompileSettings)
    observe: ObserveSettings = Field(default_factory=ObserveSettings)
    launch: LaunchSettings = Field(default_factory=LaunchSettings)
    # Arguments of `Workload` that only Python can give: a loss, an optax transformation, rules.
    parts: Mapping[str, Any] = Field(default_factory=dict[str, Any], exclude=True, repr=False)

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])
    # Shared with every job made from this one by `replace`, unless the model changes.
    _source: ModelSource = PrivateAttr()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**_split_model_changes(values))
        except ValidationError as error:
            raise as_config_error(error, Job, known_paths()) from None
        self._origins.update({name: Origin("argument") for name in values})
        self._source = ModelSource(self.model, self.model_changes)

    @checks_all(mode="after")
    def _mesh_covers_the_slice(self) -> Self:
        if self.on is not None:
            if "mesh" not in self.model_fields_set:
                # It does not count as stated, so another slice gets its own default.
                object.__setattr__(self, "mesh", default_mesh(self.slice))
            _ = self.mesh_sizes  # refuses a mesh that does not cover the slice
        return self

    @classmethod
    def of(cls, model: object, **arguments: Any) -> "Job":
        """Return a job from keys of a job and arguments of `Workload`.

        Args:
            model: As `Job.model`.
            **arguments: Keys of a job, nested or by dotted path. All others are kept in `parts` and
                passed to `Workload`, such as a loss, rules, or a remat policy made in Python.
        """
        keys: JsonObject = {}
        parts: dict[str, Any] = {}
        for name, value in arguments.items():
            plain = value is None or isinstance(value, str | int | float | Mapping | Sequence)
            is_key = "." in name or (plain and name in cls.model_fields)
            (keys if is_key else parts)[name] = value
        job = cls.from_dict({"model": model, **keys})
        return job.replace(parts=parts) if parts else job

    @classmethod
    def from_document(cls, document: Document) -> "Job":
        """Validate a document; the error for an unknown key suggests the nearest known one."""
        from .config.spelling import settle_config_names

        known = known_paths()
        fold_inner_keys(document, cls, known)
        settle_config_names(document, known)
        refuse_unknown_inside(document, cls)
        try:
            job = cls(**document.nested())
        except TPUValidationError as error:
            raise document.explain(error) from None
        job._origins.clear()
        job._origins.update(document.origins)
        return job

    @classmethod
    def from_dict(cls, values: JsonMapping) -> "Job":
        """Build a job from plain data, nested or by dotted path."""
        document = new_document()
        document.add(values, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def from_yaml(cls, path: Path | str, **changes: Any) -> "Job":
        """Read a job file; `changes` that are not None override its values."""
        document = new_document()
        document.add_file(path)
        given = {key: value for key, value in changes.items() if value is not None}
        document.add(given, Origin("argument"))
        return cls.from_document(document)

    def to_yaml(self, path: Path | str) -> None:
        """Write a job file that `from_yaml` reads back; default values are left out."""
        self.refuse_parts("a job file")
        write_output(Path(path), write_yaml(self.to_dict(with_variables=True)))

    def refuse_parts(self, where: str) -> None:
        """Raise if the job has a model or parts that exist only in Python.

        Raises:
            ConfigError: `where` cannot contain them.
        """
        in_python = [*self.parts, *([] if isinstance(self.model, str) else ["model"])]
        if in_python:
            raise ConfigError(
                f"{where} cannot contain {', '.join(in_python)}, given in Python; put them into a "
                "function that returns a Workload and name it: model: my_model.py:build."
            )

    def replace(self, changes: JsonMapping | None = None, /, **more: Any) -> "Job":
        """Return the job with some keys changed, nested or by dotted path."""
        changed = {**(changes or {}), **more}
        parts = changed.pop("parts", self.parts)
        document = new_document()
        document.add(self._stated(), Origin("argument"))
        document.add(changed, Origin("argument"))
        document.origins.update(
            (path, origin) for path, origin in self._origins.items() if path not in changed
        )
        job = Job.from_document(document)
        if job._source.is_same(self._source):
            job._source = self._source
        if parts:
            job = job.model_copy(update={"parts": dict(parts)})
            vars(job).pop("key", None)  # refused where only Python has the parts
        return job

    def _stated(self) -> JsonObject:
        """Return every value that was given, including those equal to the default."""
        given = self.model_fields_set - {"parts", "model", "model_changes"}
        stated = {name: getattr(self, name) for name in given if name not in NESTED}
        for name in NESTED:
            stated[name] = getattr(self, name).model_dump(mode="json", exclude_unset=True)
        changed = {"preset": self.model, **self.model_changes}
        return {"model": changed if self.model_changes else self.model, **stated}

    def to_dict(self, *, with_variables: bool = False) -> JsonObject:
        """Return the values that differ from the defaults, as plain data for `from_dict`.

        Args:
            with_variables: Whether to include literal values of `launch.environment`, which may be
                secret. Only files and processes of the job itself need them.
        """
        stated: JsonObject = {}
        for name, field in type(self).model_fields.items():
            if name in ("model", "model_changes", "parts"):
                continue
            value, usual = getattr(self, name), field.get_default(call_default_factory=True)
            if name == "mesh" and self.on is not None:
                usual = default_mesh(self.slice)  # it follows the slice
            if name in NESTED:
                value = (
                    value.model_dump(mode="json", exclude_unset=True)
                    if with_variables
                    else shown_values(value, exclude_unset=True)
                )
                if value:
                    stated[name] = value
            elif value != usual:
                stated[name] = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]  plain data
        model = self.model if isinstance(self.model, str) else model_name(self.model)
        named = {"preset": model, **self.model_changes} if self.model_changes else model
        plain = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in stated.items()
        }  # pyright: ignore[reportUnknownArgumentType]  plain data
        return {"model": named, **plain}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Job)
            and self.to_dict(with_variables=True) == other.to_dict(with_variables=True)
            and (isinstance(self.model, str) or self.model is other.model)
            and self.parts == other.parts
        )

    def origin_of(self, path: str) -> Origin:
        """Return the origin of the value at a dotted path."""
        return self._origins.get(path, Origin("default"))

    @cached_property
    def slice(self) -> Slice:
        """The slice that the job is for."""
        if self.on is None:
            raise ConfigError("a job needs 'on', for example on: v6e-8 (or --on v6e-8).")
        return Slice.parse(self.on)

    @cached_property
    def mesh_sizes(self) -> Mapping[str, int]:
        """Devices along each mesh axis, with -1 replaced by its size."""
        return fill_mesh(self.mesh, self.slice)

    @property
    def batch_ways(self) -> int:
        """Number of devices that a batch is split over."""
        from ..parallel.mesh.axes import count_batch_ways

        return count_batch_ways(self.mesh_sizes)

    @property
    def examples(self) -> int:
        """Examples in a step over all devices."""
        if self.batch_size is not None:
            return self.batch_size
        built = self._built("examples")
        return built if built is not None else self.batch_ways * self.microbatches

    @property
    def tokens_per_example(self) -> int:
        """Tokens in an example; 1 if examples do not consist of tokens."""
        if self.sequence_length is not None:
            return self.sequence_length
        if self._is_built:
            return self._built("sequence_length") or 1
        model = self.load_model()
        longest = getattr(model, "max_seq_len", None)
        if longest is None:  # a Hugging Face model of torch
            config = getattr(model, "config", None)
            longest = getattr(config, "max_position_embeddings", TRAINING_SEQUENCE_LENGTH)
        return min(TRAINING_SEQUENCE_LENGTH, longest)

    @property
    def reads_tokens(self) -> bool:
        """Whether examples consist of tokens; a `Workload` without a sequence length has none."""
        if self.sequence_length is not None or not self._is_built:
            return True
        return self._built("sequence_length") is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all devices."""
        return self.examples * self.tokens_per_example

    @property
    def model_flops(self) -> float | None:
        """Model FLOPs of one step, with causal attention counted once.

        None if the model is not a reference transformer.
        """
        from ..models.lora.spec import lora_multiply_adds
        from ..models.transformer.accounting import count_flops_per_step
        from ..models.transformer.config import TransformerConfig

        model = self.load_model()
        config = getattr(model, "config", model)
        if not isinstance(config, TransformerConfig):
            return None
        lora = self.train.lora
        return count_flops_per_step(
            config,
            sequence_length=self.tokens_per_example,
            tokens_per_step=self.tokens_per_step,
            lora_multiply_adds=None if lora is None else lora_multiply_adds(lora.spec(), config),
        ).value

    @property
    def memory_limit_bytes(self) -> int | None:
        """HBM that the job allows per device; None if the job sets no limit."""
        if self.memory_per_chip is None and self.memory_fraction == 1.0:
            return None
        chip = self.slice.chip
        usable = chip.per_device(chip.hbm_usable_bytes).require("a memory limit")
        allowed = (self.memory_per_chip or usable * chip.devices_per_chip) / chip.devices_per_chip
        return int(min(usable, allowed) * self.memory_fraction)

    @property
    def config(self) -> "TPUConfig":
        """The job's values under the names of `TPUConfig`."""
        from .config.spelling import config_of

        return config_of(self)

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the compiled program: job, source code, versions."""
        self.refuse_parts("the cache")
        train = self.train.model_dump(mode="json", include=set(PROGRAM_FIELDS))
        kept = {key: value for key, value in self.to_dict().items() if key not in NESTED}
        kept |= {"compile": self.compile.model_dump(mode="json"), "train": train}
        kept["mesh"] = self.mesh_sizes if self.on is not None else dict(self.mesh)
        own = model_fingerprint(self.model)
        base = base_fingerprint(self.train.init_from)
        identity = [kept, source_fingerprint(), package_versions(), own, base]
        return hashlib.sha256(
            json.dumps(identity, sort_keys=True, default=str).encode()
        ).hexdigest()

    def load_model(self, *, values: bool = False) -> Any:
        """Return the model, or the `Workload` that a builder returned; a builder runs once.

        Args:
            values: Whether a PyTorch model needs its values; for a check its shapes are enough.
        """
        return self._source.load(values=values)

    @property
    def _is_built(self) -> bool:
        """Whether the model is a `Workload`."""
        named = isinstance(self.model, str) and not is_own_model(self.model)
        return not named and hasattr(self.load_model(), "jit_train_step")

    def _built(self, name: str) -> int | None:
        return getattr(self.load_model(), name) if self._is_built else None

    def __rich__(self) -> Renderable:
        from .settings import SettingsView

        return SettingsView.of_job(self)


def new_document() -> Document:
    """Return an empty document with a job's sections."""
    return Document(frozenset(NESTED))


def known_paths() -> list[str]:
    """Return the dotted path of every setting."""
    paths = [name for name in Job.model_fields if name not in (*NESTED, "parts", "model_changes")]
    for section in NESTED:
        kind: Any = Job.model_fields[section].annotation
        paths += [f"{section}.{name}" for name in kind.model_fields]
    return paths


def _split_model_changes(values: JsonMapping) -> JsonObject:
    """Return the fields of a job, with `model: {preset: tiny, n_layers: 4}` split in two."""
    fields = dict(values)
    if isinstance(fields.get("model"), Mapping):
        changes: JsonObject = dict(fields["model"])
        fields["model"] = changes.pop("preset", None)
        fields["model_changes"] = changes
    if fields.get("model") is None:
        raise ConfigError(f"a job needs 'model', for example {_EXAMPLE}.")
    return fields
