"""`TPUConfig`: the settings of a job flat, under the documents' names, valid at all times."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, MutableMapping
from math import prod
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from ...errors import ConfigError, TPUValidationError
from ...hardware import Chip, Figure, Slice, get_chip, list_chips, model_flop_utilization
from ...hardware.formats import parse_format
from ...hardware.missing import Missing
from ...models.remat.policy import FULL, MINIMAL, NONE
from ...models.transformer.config import OPERANDS
from ...parallel.mesh.axes import spec_for_shape
from ...plain_data import JsonMapping
from ...runtime.debugging import DebugMode, enable_debugging_mode
from ..document import Document, Origin
from ..sections import (
    CloudSettings,
    Communication,
    Compilation,
    Hardware,
    Limits,
    Memory,
    ObserveSettings,
    Precision,
)
from ..settings import Settings, unknown_key
from .presets import preset_values
from .results import MemoryConfig, PerformanceMetrics, measured_figures

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec
    from jax.typing import ArrayLike

    from ...runtime.environment import EnvironmentReport, Platform

GIVEN = "given by you"
SAME_WITHIN = 0.02  # two datasheet figures this close are the same figure, rounded


class TPUConfig(
    CloudSettings,
    ObserveSettings,
    Communication,
    Memory,
    Compilation,
    Precision,
    Limits,
    Hardware,
    Settings,
):
    """A job's settings: hardware, precision, compilation, memory, communication, cloud.

    They are the values that a `Job` has in its sections, and either reads the other's files. Every
    value is checked when it is given, also on assignment; a refused assignment changes nothing.
    Values that only make sense together are assigned together with `update`.

    Example:
        >>> config = TPUConfig(tpu_version="v6e", num_chips=64, topology="8x8")
        >>> config.get_total_tflops()
        58752.0
    """

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        preset: str | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Self:
        """Join preset, YAML file, environment and arguments; each wins over those before it.

        The file may be a job file: what of it has a name here is taken.
        """
        document = _document()
        if preset is not None:
            document.add(preset_values(preset), Origin("preset", preset))
        if path is not None:
            _add_file(document, path)
        document.add_environment(
            os.environ if environment is None else environment, cls.model_fields
        )
        document.add(arguments, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file, a job's or one of flat settings, and nothing else."""
        document = _document()
        _add_file(document, path)
        return cls.from_document(document)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read YAML text of flat settings."""
        document = _document()
        document.add_yaml(text, name="YAML text")
        return cls.from_document(document)

    @classmethod
    def preset(cls, name: str, **arguments: Any) -> Self:
        """Return the `training`, `inference` or `development` preset, with changes."""
        document = _document()
        document.add(preset_values(name), Origin("preset", name))
        document.add(arguments, Origin("argument"))
        return cls.from_document(document)

    @classmethod
    def with_origins(cls, values: JsonMapping, origins: Mapping[str, Origin]) -> Self:
        """Build from values whose origins are known."""
        config = cls(**values)
        config._origins.update(origins)
        return config

    def __setattr__(self, name: str, value: object) -> None:
        try:
            super().__setattr__(name, value)
        except TPUValidationError as error:
            if name not in Hardware.model_fields:
                raise
            raise type(error)(
                f"{error} Fields that depend on each other are assigned together: "
                f"config.update({name}=…, …)."
            ) from None

    # --- what the settings say about the hardware ---------------------------------------

    @property
    def chip(self) -> Chip | None:
        """The chip, from the version, the accelerator type, or a peak that only one chip has."""
        if self.tpu_version is not None:
            return get_chip(self.tpu_version)
        if self.accelerator_type is not None:
            return Slice.parse(self.accelerator_type).chip
        if self.flops_per_chip is not None:
            return _only_chip_with_peak(self.flops_per_chip)
        return None

    @property
    def slice(self) -> Slice | None:
        """The slice the settings describe, or None while they leave it open."""
        if self.accelerator_type is not None and self.num_chips is None and self.topology is None:
            named = Slice.parse(self.accelerator_type)
            return Slice.of(named.chip.name, topology=named.topology, num_slices=self.num_slices)
        chip = self.chip
        if chip is None or (self.num_chips is None and self.topology is None):
            return None
        return Slice.of(
            chip.name, chips=self.num_chips, topology=self.topology, num_slices=self.num_slices
        )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._refuse_contradictions()
        return self

    def _refuse_contradictions(self) -> None:
        chip, described = self.chip, self.slice
        if self.accelerator_type is not None and described is not None:
            named = Slice.parse(self.accelerator_type)
            if (named.chip, named.topology) != (described.chip, described.topology):
                raise ConfigError(
                    f"accelerator_type={self.accelerator_type!r} is {named}, but tpu_version, "
                    f"num_chips and topology describe {described}; drop one of the two."
                )
        if chip is not None:
            self._figures_agree_with(chip)
        if self.mesh_shape is not None and described is not None:
            devices = described.devices
            if prod(self.mesh_shape) != devices:
                raise ConfigError(
                    f"mesh_shape={self.mesh_shape} needs {prod(self.mesh_shape)} devices, but "
                    f"{described} has {devices}; choose axes whose product is {devices}."
                )

    def _figures_agree_with(self, chip: Chip) -> None:
        capacity = chip.hbm_bytes.value
        # Datasheets write "32 GB" for 32 GiB: allow what either reading allows.
        most = capacity and max(capacity, capacity * 2**30 / 10**9) * (1 + SAME_WITHIN)
        if self.memory_per_chip is not None and most and self.memory_per_chip > most:
            raise ConfigError(
                f"memory_per_chip is {self.memory_per_chip / 2**30:.1f} GiB, but a {chip.name} "
                f"chip has {chip.hbm_bytes}; leave it out to use all of it, or give less."
            )
        peak = chip.peak("bf16").value
        if self.flops_per_chip is not None and peak is not None:
            stated = self.flops_per_chip / 1e12
            if abs(stated / peak - 1) > SAME_WITHIN:
                raise ConfigError(
                    f"flops_per_chip={self.flops_per_chip:g} is {stated:g} TFLOP/s, but a "
                    f"{chip.name} chip peaks at {peak:g} in bf16; leave flops_per_chip out."
                )

    def validate(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check that the settings name one slice that exists, and agree with each other.

        Construction and assignment already refuse what is wrong in itself; this also refuses
        what is incomplete. pydantic's deprecated classmethod of the same name is not used here.
        """
        self._refuse_contradictions()
        if self.slice is None:
            raise ConfigError(
                "the configuration names no slice yet: give tpu_version with num_chips or "
                "topology, or accelerator_type."
            )
        return self

    # --- figures -------------------------------------------------------------------------

    def get_total_tflops(self) -> float:
        """Peak bf16 TFLOP/s of all chips: catalog peak times chips (origin: datasheet)."""
        chips = self.slice.chips if self.slice else self.num_chips
        peak = self.chip.peak("bf16").value if self.chip else None
        if peak is None and self.flops_per_chip is not None:
            peak = self.flops_per_chip / 1e12
        if chips is None or peak is None:
            missing = "num_chips" if chips is None else "tpu_version (or flops_per_chip)"
            raise ConfigError(f"the total needs {missing}, which is not set; set it first.")
        return float(chips * peak)

    def get_performance_metrics(
        self,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        samples_per_s: float | None = None,
        achieved_tflops: float | None = None,
    ) -> PerformanceMetrics:
        """Peak figures from the catalog, and what was measured of the newest run.

        TFLOP/s are of all chips together; bandwidths are of one chip (ICI: all links, one way).
        `utilization` is MFU: model FLOPs over the peak. It and `throughput_samples_s` come from the
        run given, else from the monitor that runs in this process, else from the newest run under
        runs/; where there is none they are missing, with the reason.

        Args:
            run_dir: The run.
            samples_per_s: Throughput of all chips together, where you measured it yourself.
            achieved_tflops: Model TFLOP/s of all chips together, where you measured them yourself;
                utilization is this over the bf16 peak (your convention for counting FLOPs applies).
        """
        no_chip = Missing("no generation is set: give tpu_version or accelerator_type")
        chip, described = self.chip, self.slice
        chips = described.chips if described else self.num_chips
        peak = self.get_total_tflops() if chips and (chip or self.flops_per_chip) else None
        figures = PerformanceMetrics.Builder()
        no_total = no_chip if chips else Missing("no num_chips is set")
        stated = "datasheet" if chip else "user"
        figures.add("total_tflops", no_total if peak is None else peak, stated)
        for name, figure in (
            ("memory_bandwidth_gb_s", chip.hbm_gbps if chip else None),
            ("interconnect_bandwidth_gb_s", _all_links(chip) if chip else None),
        ):
            if figure is None or figure.value is None:
                figures.add(name, no_chip if figure is None else Missing(figure.reason), "")
            else:
                figures.add(name, figure.value, "datasheet", figure.source)
        run = measured_figures(None if run_dir is None else os.fspath(run_dir))
        if achieved_tflops is None:
            figures.add("utilization", run.utilization, "measured", run.source)
        else:
            share = model_flop_utilization(achieved_tflops * 1e12, 1.0, peak)
            figures.add("utilization", no_total if share is None else share, "measured", GIVEN)
        if samples_per_s is None:
            figures.add("throughput_samples_s", run.samples_per_s, "measured", run.source)
        else:
            figures.add("throughput_samples_s", samples_per_s, "measured", GIVEN)
        return figures.build()

    def get_memory_config(self) -> MemoryConfig:
        """Number formats and how much of each chip's memory may be planned for."""
        products = "bfloat16" if self.precision == "mixed" else self.precision
        operands = OPERANDS.get(products) or parse_format(products)
        compute = self.compute_dtype or operands.name
        master = "float32" if self.fp32_params and self.use_mixed_precision else compute
        usable = self.chip.hbm_usable_bytes.value if self.chip else None
        limits = [limit for limit in (usable, self.memory_per_chip) if limit is not None]
        capacity = int(min(limits)) if limits else None
        return MemoryConfig(
            use_mixed_precision=self.use_mixed_precision,
            compute_dtype=compute,
            param_dtype=self.param_dtype or master,
            memory_per_chip_bytes=capacity,
            planned_bytes=None if capacity is None else int(capacity * self.memory_fraction),
            memory_fraction=self.memory_fraction,
            memory_optimization=self.memory_optimization,
            enable_rematerialization=self.enable_rematerialization,
            gradient_checkpointing=self.gradient_checkpointing,
        )

    def get_remat(self) -> str | None:
        """Return what the backward pass recomputes, as `Job.remat`; None where nothing says."""
        if self.gradient_checkpointing or self.memory_optimization == "aggressive":
            return FULL
        if self.enable_rematerialization:
            return MINIMAL
        refused = (
            self.memory_optimization == "none"
            or {
                "gradient_checkpointing",
                "enable_rematerialization",
            }
            & self.model_fields_set
        )
        return NONE if refused else None

    def detect_hotspots(self, load: "ArrayLike") -> list[tuple[int, ...]]:
        """Return the index of every device whose load is above `scaling_config.load_threshold`."""
        from ...parallel.rebalancing import detect_hotspots

        return detect_hotspots(load, threshold=self.scaling_config.load_threshold)

    def optimize_sharding(
        self, load: "ArrayLike | None" = None, axis_names: tuple[str, str] = ("data", "model")
    ) -> "PartitionSpec":
        """Return the split of a (batch, hidden) computation that evens out a measured load.

        Args:
            load: Of each device, as a grid of the mesh; without one nothing is uneven, and the
                usual split is returned.
            axis_names: The mesh axes of the grid's two dimensions.
        """
        if load is None:
            return self.get_sharding_spec((1, 1), axis_names)
        from ...parallel.rebalancing import optimize_sharding

        threshold = self.scaling_config.load_threshold
        return optimize_sharding(load, axis_names=axis_names, threshold=threshold).spec

    def get_sharding_spec(
        self, shape: Iterable[int], axis_names: tuple[str, str] = ("data", "model")
    ) -> "PartitionSpec":
        """First dimension over the data axis, last over the model axis, the rest replicated."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(*spec_for_shape(tuple(shape), axis_names))

    # --- effects -------------------------------------------------------------------------

    def setup_environment_variables(
        self,
        environment: MutableMapping[str, str] | None = None,
        *,
        platform: "Platform | None" = None,
    ) -> "EnvironmentReport":
        """Set what this job needs before jax starts, and return what was set and why.

        That includes the flags of `xla_optimization_level`, on every machine that has libtpu: they
        go to LIBTPU_INIT_ARGS, which nothing but libtpu reads. `platform` skips the detection.
        """
        from ...runtime.environment import configure_tpu_environment

        target = os.environ if environment is None else environment
        report = configure_tpu_environment(
            environment=target, platform=platform, allocator="platform", preallocate=False
        )
        from ..compiler_flags import set_flags

        changes = set_flags(self, target, jax_state=report.jax_state)
        return dataclasses.replace(report, changes=(*report.changes, *changes))

    def enable_debugging_mode(self) -> DebugMode:
        """NaN and Inf checks, no jit, a log of compiles, until the result is restored."""
        return enable_debugging_mode()


def _document() -> Document:
    return Document(frozenset())


def _add_file(document: Document, path: str | os.PathLike[str]) -> None:
    """Add a file of flat settings as it is, and of a job file what has a name here."""
    from ..job import Job, known_paths, new_document

    found = new_document()
    found.add_file(path)
    only_in_jobs = {*known_paths()} - {*TPUConfig.model_fields}
    for name, origin in found.origins.items():
        if name not in TPUConfig.model_fields and name not in only_in_jobs:
            raise unknown_key(name, {*TPUConfig.model_fields, *known_paths()}, where=origin.place)
    if only_in_jobs & {*found.values}:
        if "model" not in found.values:
            found.add({"model": "no model"}, Origin("default"))
        config = Job.from_document(found).config
        values = {name: getattr(config, name) for name in config.model_fields_set}
        for name, value in values.items():
            document.values[name], document.origins[name] = value, config.origin_of(name)
        return
    document.values.update(found.values)
    document.origins.update(found.origins)


def _only_chip_with_peak(flops: float) -> Chip | None:
    """The one chip whose bf16 peak is `flops`, so that a form without a version still works."""
    matching = [
        chip
        for chip in list_chips()
        if (peak := chip.peak("bf16").value) and abs(flops / 1e12 / peak - 1) < SAME_WITHIN
    ]
    return matching[0] if len(matching) == 1 else None


def _all_links(chip: Chip) -> Figure:
    """ICI bandwidth of one chip: all its links, one way."""
    if chip.ici_links_per_chip is None:
        return Figure.missing("GB/s", f"the number of ICI links of a {chip.name} is not published")
    return chip.ici_link_gbps.scaled(chip.ici_links_per_chip)
