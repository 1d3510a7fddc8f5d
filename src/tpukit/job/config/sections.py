"""The fields of a configuration, one small class per concern.

`TPUConfig` joins these; each field's comment is what `tpukit config show` prints beside it.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from ..quantities import format_bytes, parse_bytes

Bytes = Annotated[
    int, BeforeValidator(parse_bytes), PlainSerializer(format_bytes, when_used="always")
]
Fraction = Annotated[float, Field(gt=0, le=1)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class TPUVersion(StrEnum):
    """The generations, for those who prefer a constant to a string."""

    V2 = "v2"
    V3 = "v3"
    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    V7 = "7x"


class Section(BaseModel):
    """What every section has in common: unknown keys are refused, defaults are checked."""

    model_config = ConfigDict(extra="forbid", validate_default=True, strict=False, frozen=False)


class ScalingConfig(Section):
    """When a device counts as a hot spot."""

    load_threshold: Fraction = Field(
        default=0.8, description="load above which a device is a hot spot"
    )


class Hardware(Section):
    """Which chips, how many, in which shape."""

    tpu_version: str | None = Field(default=None, description="generation: v2 … v6e, 7x")
    num_chips: PositiveInt | None = Field(
        default=None, description="chips in one slice (not cores)"
    )
    topology: str | None = Field(default=None, description="shape of the slice in chips, e.g. 8x8")
    num_slices: PositiveInt = Field(
        default=1, description="slices joined over the data-centre network"
    )
    memory_per_chip: Bytes | None = Field(
        default=None, description="HBM to use per chip, e.g. 32GB"
    )
    flops_per_chip: PositiveFloat | None = Field(
        default=None, description="bf16 peak of a chip in FLOP/s"
    )
    mesh_shape: tuple[PositiveInt, ...] | None = Field(
        default=None, description="devices along each axis"
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig, description="hot-spot threshold"
    )


class Precision(Section):
    """Number formats of compute and parameters."""

    precision: Literal["bfloat16", "float32", "mixed", "float8", "int8"] = Field(
        default="bfloat16", description="format of the matrix products"
    )
    use_mixed_precision: bool = Field(
        default=True, description="compute narrow, accumulate in float32"
    )
    fp32_params: bool = Field(default=True, description="keep master parameters in float32")
    compute_dtype: Literal["bfloat16", "float32", "float16"] | None = Field(
        default=None, description="overrides the compute format that precision implies"
    )
    param_dtype: Literal["bfloat16", "float32", "float16"] | None = Field(
        default=None, description="overrides the parameter format that fp32_params implies"
    )


class Compilation(Section):
    """What the compiler is asked for."""

    xla_optimization_level: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1, description="0 none … 3 maximum"
    )
    enable_xla_fusion: bool = Field(
        default=True, description="the fusion group of the flag bundles"
    )
    enable_async_collective: bool = Field(
        default=True, description="overlap collectives with compute"
    )
    compilation_timeout_seconds: PositiveFloat = Field(
        default=1800, description="an offline compile is killed after this long"
    )
    cache_max_size: PositiveInt = Field(
        default=100, description="compiled programs kept in the cache"
    )


class Memory(Section):
    """How HBM is spent."""

    memory_optimization: Literal["none", "normal", "aggressive"] = Field(
        default="normal", description="how hard to trade compute for memory"
    )
    enable_rematerialization: bool = Field(
        default=False, description="recompute activations in backward"
    )
    gradient_checkpointing: bool = Field(default=False, description="keep only layer inputs")
    memory_fraction: Fraction = Field(default=1.0, description="share of usable HBM to plan for")
    batch_size_per_chip: PositiveInt | None = Field(
        default=None, description="sequences per chip and step"
    )


class Communication(Section):
    """Collectives."""

    communication_optimization: bool = Field(
        default=True, description="the collective flag bundles"
    )
    use_collective_matmul: bool = Field(
        default=False, description="split products to overlap gathers"
    )


class Monitoring(Section):
    """Profiling and logging."""

    enable_profiling: bool = Field(default=False, description="capture a trace (costs time)")
    log_device_placement: bool = Field(default=False, description="log where each array lives")
    monitoring_interval_seconds: PositiveFloat = Field(
        default=1.0, description="between two readings"
    )
    monitoring_duration_seconds: PositiveFloat = Field(default=60.0, description="of one watch")
    allocation_history_retention_seconds: PositiveFloat = Field(
        default=3600.0, description="how long allocations are remembered"
    )
    enable_strict_validation: bool = Field(default=False, description="warnings become errors")


class Cloud(Section):
    """Where the slice is asked for."""

    project: str | None = Field(default=None, description="Google Cloud project")
    zone: str | None = Field(default=None, description="zone, e.g. us-central1-a")
    network: str = Field(default="default", description="VPC network")
    accelerator_type: str | None = Field(
        default=None, description="API name of the slice, e.g. v3-8"
    )
    software_version: str | None = Field(default=None, description="TPU VM image")
    enable_ip_alias: bool = Field(default=True, description="VPC-native addresses")
    reserved: bool = Field(default=False, description="take it from a reservation")
    credentials_file: str | None = Field(default=None, description="service-account key file")


SECTIONS: tuple[type[Section], ...] = (
    Hardware,
    Precision,
    Compilation,
    Memory,
    Communication,
    Monitoring,
    Cloud,
)


def section_of(field: str) -> str:
    """The name of the section that `field` belongs to."""
    return next(section.__name__ for section in SECTIONS if field in section.model_fields)
