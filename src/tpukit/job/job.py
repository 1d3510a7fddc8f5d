"""`Job`: model, slice, mesh, batch, training, compiling: all that decides a run, as one document.

It is what the planner returns, `check` compiles, the trainer runs and a pod is launched with, and
the content of a job file. Reading one imports neither jax nor flax, so that an answer on disk is
there at once.
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
from ..runtime.files import write_output
from .document import Document, Origin
from .hidden import shown_values
from .keys import fold_inner_keys, refuse_unknown_inside
from .model_source import (
    base_fingerprint,
    is_own_model,
    load_model,
    model_fingerprint,
    package_versions,
    source_fingerprint,
)
from .sections import CompileSettings, Count, LaunchSettings, Limits, ObserveSettings
from .settings import as_config_error
from .train import PROGRAM_FIELDS, TrainingSettings
from .yaml_text import write_yaml

if TYPE_CHECKING:
    from .config import TPUConfig

DEFAULT_SEQUENCE_LENGTH = 2048
# The sections that stand below a key of their own. A room to come adds one line here.
NESTED = ("train", "compile", "observe", "launch")
_EXAMPLE = "model: llama3.1-8b"


class Job(Limits):
    """One training job: what is trained, where, and how.

    `model` is a preset's name, a Hugging Face config.json, "module:function" that builds one, or,
    in Python, any model that `Workload` takes and a `Workload` itself.

    Example:
        >>> job = Job(model="tiny", on="v6e-8", sequence_length=64, train={"optimizer": "lion"})
        >>> job.mesh_sizes, job.examples, job.train.optimizer
        ({'fsdp': 8}, 8, 'lion')
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = Field(description="preset, config.json, module:function, or a model in Python")
    model_changes: Mapping[str, Any] = Field(
        default_factory=dict[str, Any], description="fields of the preset to change"
    )
    on: str | None = Field(default=None, description="slice, e.g. v6e-8; None: what is here")
    mesh: Annotated[Mapping[str, int], BeforeValidator(read_mesh)] = Field(
        default_factory=lambda: {"fsdp": -1},
        description="size of each axis; -1: the rest; None: fsdp, and data over slices",
    )
    dcn_mesh: tuple[Count, ...] | None = Field(
        default=None, description="factor of each mesh axis that runs across slices"
    )
    batch_size: Count | None = Field(
        default=None, description="examples in a step over all devices; None: one a device"
    )
    sequence_length: Count | None = Field(
        default=None, description="tokens in an example; None: 2048, or the model's longest"
    )
    strategy: str | None = Field(
        default=None, description="how parameters are split; None: by the names of the axes"
    )
    remat: str | None = Field(
        default=None, description="what the backward pass recomputes; None: full, or as built"
    )
    microbatches: Count = Field(default=1, description="pieces a step is cut into")
    attention: str = Field(default="auto", description="auto, flash, splash, xla, ring, cudnn")
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description="of pipeline stages: 1f1b or gpipe"
    )
    loss_chunks: Count | Literal["auto"] | None = Field(
        default="auto", description="pieces the loss is cut into; see Workload"
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict[str, Any], description="compiler options, before those of compile:"
    )
    train: TrainingSettings = Field(default_factory=TrainingSettings)
    compile: CompileSettings = Field(default_factory=CompileSettings)
    observe: ObserveSettings = Field(default_factory=ObserveSettings)
    launch: LaunchSettings = Field(default_factory=LaunchSettings)
    # What only Python can say: a loss, an optax transformation, rules, shapes of a batch.
    parts: Mapping[str, Any] = Field(default_factory=dict[str, Any], exclude=True, repr=False)

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**_with_changes_apart(values))
        except ValidationError as error:
            raise as_config_error(error, Job, known_paths()) from None
        self._origins.update({name: Origin("argument") for name in values})

    @checks_all(mode="after")
    def _mesh_covers_the_slice(self) -> Self:
        if self.on is not None:
            if "mesh" not in self.model_fields_set:
                # It stays unstated: on another slice it may be another.
                object.__setattr__(self, "mesh", default_mesh(self.slice))
            fill_mesh(self.mesh, self.slice)
        return self

    @classmethod
    def of(cls, model: object, **arguments: Any) -> "Job":
        """Return the job of a model; what is no key of a job is a part of its step.

        Args:
            model: As `Job.model`.
            **arguments: Keys of a job, nested or by dotted path, and arguments of `Workload`, such
                as a loss, rules, or a remat policy made in Python.
        """
        keys: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        for name, value in arguments.items():
            plain = value is None or isinstance(value, str | int | float | Mapping | Sequence)
            is_key = "." in name or (plain and name in cls.model_fields)
            (keys if is_key else parts)[name] = value
        return cls.from_dict({"model": model, **keys}).replace(parts=parts)

    @classmethod
    def from_document(cls, document: Document) -> "Job":
        """Check the values of a document; an unknown key is refused with the nearest one."""
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
    def from_dict(cls, values: Mapping[str, Any]) -> "Job":
        """Build from plain data, nested or by dotted path, as `to_dict` writes it."""
        document = new_document()
        document.add(values, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def from_yaml(cls, path: Path | str, **changes: Any) -> "Job":
        """Read a job file; `changes` that are not None go before what it says."""
        document = new_document()
        document.add_file(path)
        given = {key: value for key, value in changes.items() if value is not None}
        document.add(given, Origin("argument"))
        return cls.from_document(document)

    def to_yaml(self, path: Path | str) -> None:
        """Write a job file that `from_yaml` reads back; what is as by default is left out."""
        self.refuse_parts("a job file")
        write_output(Path(path), write_yaml(self.to_dict(with_variables=True)))

    def refuse_parts(self, where: str) -> None:
        """Refuse what only Python can say where it would be lost."""
        said = [*self.parts, *([] if isinstance(self.model, str) else ["model"])]
        if said:
            raise ConfigError(
                f"{where} cannot hold {', '.join(said)}, given in Python; put them into a function "
                "that returns a Workload and name it: model: my_model.py:build."
            )

    def replace(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> "Job":
        """Return the same job with some keys changed, nested or by dotted path."""
        asked = {**(changes or {}), **more}
        parts = asked.pop("parts", self.parts)
        document = new_document()
        document.add(self._stated(), Origin("argument"))
        document.add(asked, Origin("argument"))
        document.origins.update(
            (path, origin) for path, origin in self._origins.items() if path not in asked
        )
        job = Job.from_document(document)
        return job if not parts else Job._with_parts(job, parts)

    @staticmethod
    def _with_parts(job: "Job", parts: Mapping[str, Any]) -> "Job":
        copied = job.model_copy(update={"parts": dict(parts)})
        copied._origins.update(job._origins)
        return copied

    def _stated(self) -> dict[str, Any]:
        """Return every value that was given, also where it is the default."""
        said = self.model_fields_set - {"parts", "model", "model_changes"}
        stated = {name: getattr(self, name) for name in said if name not in NESTED}
        for name in NESTED:
            stated[name] = getattr(self, name).model_dump(mode="json", exclude_unset=True)
        changed = {"preset": self.model, **self.model_changes}
        return {"model": changed if self.model_changes else self.model, **stated}

    def to_dict(self, *, with_variables: bool = False) -> dict[str, Any]:
        """Return what differs from the defaults as plain data that `from_dict` reads back.

        Args:
            with_variables: Also return literal values of `launch.environment`, which may be secret:
                for files and processes of the job itself, never for output.
        """
        stated: dict[str, Any] = {}
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
        whole = {"preset": model, **self.model_changes} if self.model_changes else model
        plain = {key: dict(one) if isinstance(one, Mapping) else one for key, one in stated.items()}  # pyright: ignore[reportUnknownArgumentType]  plain data
        return {"model": whole, **plain}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Job)
            and self.to_dict(with_variables=True) == other.to_dict(with_variables=True)
            and (isinstance(self.model, str) or self.model is other.model)
            and self.parts == other.parts
        )

    def origin_of(self, path: str) -> Origin:
        """Return where the value of a dotted path came from."""
        return self._origins.get(path, Origin("default"))

    @property
    def slice(self) -> Slice:
        """The slice it is for."""
        if self.on is None:
            raise ConfigError("a job needs 'on', for example on: v6e-8 (or --on v6e-8).")
        return Slice.parse(self.on)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The mesh with every size filled in."""
        return fill_mesh(self.mesh, self.slice)

    @property
    def batch_ways(self) -> int:
        """Devices that share a batch's examples."""
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
        """Tokens in an example; 1 where examples are not made of tokens."""
        if self.sequence_length is not None:
            return self.sequence_length
        if self._is_built:
            return self._built("sequence_length") or 1
        longest = getattr(self._loaded, "max_seq_len", None)
        if longest is None:  # a Hugging Face model of torch says it so
            config = getattr(self._loaded, "config", None)
            longest = getattr(config, "max_position_embeddings", DEFAULT_SEQUENCE_LENGTH)
        return min(DEFAULT_SEQUENCE_LENGTH, longest)

    @property
    def reads_tokens(self) -> bool:
        """Whether examples are made of tokens; those of a workload without sequences are not."""
        if self.sequence_length is not None or not self._is_built:
            return True
        return self._built("sequence_length") is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all devices."""
        return self.examples * self.tokens_per_example

    @property
    def model_flops(self) -> float | None:
        """FLOPs of the model in one step, causal attention counted once; None of an own model."""
        from ..models.lora.targets import thin_products
        from ..models.transformer.accounting import count_flops_per_step
        from ..models.transformer.config import TransformerConfig

        config = getattr(self._loaded, "config", self._loaded)
        if not isinstance(config, TransformerConfig):
            return None
        lora = self.train.lora
        return count_flops_per_step(
            config,
            sequence_length=self.tokens_per_example,
            tokens_per_step=self.tokens_per_step,
            thin_products=None if lora is None else thin_products(lora.spec(), config),
        ).value

    @property
    def memory_limit_bytes(self) -> int | None:
        """HBM that one device may use by the job's own limits; None where it sets none."""
        if self.memory_per_chip is None and self.memory_fraction == 1.0:
            return None
        chip = self.slice.chip
        usable = chip.per_device(chip.hbm_usable_bytes).require("a memory limit")
        asked = (self.memory_per_chip or usable * chip.devices_per_chip) / chip.devices_per_chip
        return int(min(usable, asked) * self.memory_fraction)

    @property
    def config(self) -> "TPUConfig":
        """The same values under the names of `TPUConfig`."""
        from .config.spelling import config_of

        return config_of(self)

    @property
    def key(self) -> str:
        """A hash of what decides the program: job, source it is built from, versions."""
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

    @cached_property
    def _loaded(self) -> Any:
        named = isinstance(self.model, str)
        # Only sizes are read from it.
        return load_model(self.model, self.model_changes, values=False) if named else self.model

    @property
    def _is_built(self) -> bool:
        """Whether the model is a whole `Workload`; a preset's name is known to be none."""
        named = isinstance(self.model, str) and not is_own_model(self.model)
        return not named and hasattr(self._loaded, "jit_train_step")

    def _built(self, name: str) -> int | None:
        return getattr(self._loaded, name) if self._is_built else None

    def __rich__(self) -> Any:
        from .view import SettingsView

        return SettingsView.of_job(self)


def new_document() -> Document:
    """Return an empty document with a job's sections."""
    return Document(frozenset(NESTED))


def known_paths() -> list[str]:
    """Return the dotted path of every setting."""
    found = [name for name in Job.model_fields if name not in (*NESTED, "parts", "model_changes")]
    for section in NESTED:
        kind: Any = Job.model_fields[section].annotation
        found += [f"{section}.{name}" for name in kind.model_fields]
    return found


def _with_changes_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job, with `model: {preset: tiny, n_layers: 4}` taken apart."""
    found = dict(values)
    if isinstance(found.get("model"), Mapping):
        changes: dict[str, Any] = dict(found["model"])
        found["model"] = changes.pop("preset", None)
        found["model_changes"] = changes
    if found.get("model") is None:
        raise ConfigError(f"a job needs 'model', for example {_EXAMPLE}.")
    return found
