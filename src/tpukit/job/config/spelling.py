"""Conversion between `TPUConfig` and `Job`, which name the same values differently.

Sections `compile`, `observe` and `launch` and the memory limits have the same names in both. The
other names differ: chips as `tpu_version`, `num_chips` and `topology` or as `on: v6e-64`;
recomputation as switches or as `remat`; formats as `precision` and `fp32_params` or as
`train.precision` and `train.param_dtype`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...models.remat.policy import FULL, MINIMAL
from ...plain_data import JsonObject
from ..document import Document
from ..sections import (
    CompileSettings,
    Hardware,
    LaunchSettings,
    Limits,
    ObserveSettings,
    Precision,
)
from ..settings import unknown_key
from .tpu import TPUConfig

if TYPE_CHECKING:
    from ..job import Job

# `launch` has more settings in a job; a configuration has no provider.
_SECTIONS = {"compile": CompileSettings, "observe": ObserveSettings, "launch": LaunchSettings}
_CHIPS = tuple(name for name in Hardware.model_fields if name != "mesh_shape")
_REMAT = ("memory_optimization", "enable_rematerialization", "gradient_checkpointing")
_FORMATS = tuple(Precision.model_fields)
# Fields with the same name in a job and a configuration.
_SAME_NAME = tuple(Limits.model_fields)


@dataclass(frozen=True)
class Spelled:
    """A value of a job, and the fields of the configuration that it comes from."""

    path: str
    value: Any
    fields: tuple[str, ...]


def spell_as_job(config: TPUConfig) -> Iterable[Spelled]:
    """Yield the values that a configuration states, as values of a job."""
    stated = config.model_fields_set
    for section, kind in _SECTIONS.items():
        for name in kind.model_fields:
            if name in stated:
                value = config.model_dump(mode="json", include={name})[name]
                yield Spelled(f"{section}.{name}", value, (name,))
    for name in _SAME_NAME:
        if name in stated:
            yield Spelled(name, getattr(config, name), (name,))
    chips = tuple(name for name in _CHIPS if name in stated)
    if chips and config.slice is not None:
        yield Spelled("on", str(config.slice), chips)
    if config.mesh_shape is not None:
        from ...parallel.mesh.axes import name_axes

        yield Spelled("mesh", name_axes(config.mesh_shape), ("mesh_shape",))
    if config.batch_size_per_chip is not None and config.slice is not None:
        examples = config.batch_size_per_chip * config.slice.chips
        yield Spelled("batch_size", examples, ("batch_size_per_chip",))
    switches = tuple(name for name in _REMAT if name in stated)
    remat = config.get_remat()
    if remat is not None:
        yield Spelled("remat", remat, switches)
    formats = tuple(name for name in _FORMATS if name in stated)
    if formats:
        memory = config.get_memory_config()
        precision = config.compute_dtype or {"mixed": "bfloat16"}.get(
            config.precision, config.precision
        )
        yield Spelled("train.precision", precision, formats)
        yield Spelled("train.param_dtype", memory.param_dtype, formats)


def config_of(job: "Job") -> TPUConfig:
    """Return a job's values under the names of `TPUConfig`."""
    values: JsonObject = {}
    origins = {}
    for section in _SECTIONS:
        settings = getattr(job, section)
        for name, value in settings.model_dump(mode="json", exclude_unset=True).items():
            if name in TPUConfig.model_fields:
                values[name], origins[name] = value, job.origin_of(f"{section}.{name}")
    for name in _SAME_NAME:
        if name in job.model_fields_set:
            values[name], origins[name] = getattr(job, name), job.origin_of(name)
    if job.on is not None:
        where = job.slice
        chips = {
            "tpu_version": where.chip.name,
            "num_chips": where.chips // where.num_slices,
            "topology": "x".join(map(str, where.topology)),
            "num_slices": where.num_slices,
            "mesh_shape": tuple(job.mesh_sizes.values()),
        }
        values |= chips
        origins |= {name: job.origin_of("mesh" if "mesh" in name else "on") for name in chips}
        if job.batch_size is not None and job.batch_size % where.chips == 0:
            values["batch_size_per_chip"] = job.batch_size // where.chips
            origins["batch_size_per_chip"] = job.origin_of("batch_size")
    switch = {FULL: "gradient_checkpointing", MINIMAL: "enable_rematerialization"}
    if job.remat in switch:
        values[switch[job.remat]], origins[switch[job.remat]] = True, job.origin_of("remat")
    for name, path in (("precision", "train.precision"), ("param_dtype", "train.param_dtype")):
        value = getattr(job.train, name)
        if value is not None:
            name = "compute_dtype" if value == "float16" and name == "precision" else name
            values[name], origins[name] = value, job.origin_of(path)
    return TPUConfig.with_origins(values, origins)


def settle_config_names(document: Document, known: Iterable[str]) -> None:
    """Replace names of `TPUConfig` in a document by those of `Job`, in place.

    Raises:
        ConfigError: A key belongs to neither, or both names of one value are set differently.
    """
    known = frozenset(known)
    foreign = [path for path in document.values if path not in known]
    for path in foreign:
        if path not in TPUConfig.model_fields and path != "model_changes":
            raise unknown_key(path, known | document.sections, where=document.origins[path].place)
    # Validating a configuration needs its limits too.
    spelled = document.take(set(foreign) & set(TPUConfig.model_fields))
    if not spelled.values:
        return
    if "on" in document.values and not {*spelled.values} & {"tpu_version", "accelerator_type"}:
        config_on = {"accelerator_type": document.values["on"]}
    else:
        config_on = {}
    hardware = {name for name in spelled.values if name in _CHIPS}
    try:
        config = TPUConfig(**({} if hardware else config_on), **spelled.values)
    except ConfigError as error:
        raise spelled.explain(error) from None
    if config.batch_size_per_chip is not None and config.slice is None:
        raise ConfigError(
            f"batch_size_per_chip={config.batch_size_per_chip} needs the number of chips; name "
            "the slice (on: v6e-8), or give batch_size over all chips."
        )
    for value in spell_as_job(config):
        origins = [spelled.origins[name] for name in value.fields if name in spelled.origins]
        if origins:
            document.settle(value.path, value.value, origins[-1])
