"""The settings of a job, one class per topic.

`compile`, `observe` and `launch` are sections of a job; `TPUConfig` inherits all of these classes.
`tpukit config show` prints each field's description.
"""

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from ..errors import ConfigError, did_you_mean
from ..hardware.catalog import get_chip
from ..hardware.formats import spelled_as
from ..hardware.prices import public_prices
from ..runtime.ranges import COUNT, FLOPS, INDEX, PART, SCALE, SECONDS, SEED, SHARE, WEIGHT, Range
from ..shown import Shown

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_FORM = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?|\.\d{1,20})\s*([a-z]*)\s*", re.IGNORECASE)
_LARGEST_BYTES = 2**63


def parse_bytes(amount: object) -> int:
    """Return `amount` in bytes; GB is 10⁹ and GiB is 2³⁰.

    Raises:
        ConfigError: Not an amount of memory.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | float | str):
        raise ConfigError(
            f"{amount!r} is not an amount of memory; write '32GB', '31.25GiB' or a number of bytes."
        )
    match = _FORM.fullmatch(amount if isinstance(amount, str) else f"{amount:f}")
    if match is None:
        raise ConfigError(
            f"{amount!r} is not an amount of memory; write '32GB', '31.25GiB' or a number of bytes."
        )
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ConfigError(f"{amount!r} has no known unit; use one of B, KB, MB, GB, KiB, MiB, GiB.")
    # Integers stay exact; a float would round those above 2⁵³.
    result = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if not 0 < result < _LARGEST_BYTES:
        raise ConfigError(f"{amount!r} is out of range; give the bytes of one chip.")
    return result


def format_bytes(amount: int) -> str:
    """Return the shortest text that `parse_bytes` reads as exactly `amount`."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):
        factor = _UNITS[unit.lower()]
        if amount >= factor and amount % factor == 0:
            return f"{amount // factor}{unit}"
    return f"{amount}B"


Bytes = Annotated[
    int, BeforeValidator(parse_bytes), PlainSerializer(format_bytes, when_used="always")
]


def _within(accepted: Range) -> AfterValidator:
    def check(number: float) -> float:
        if number not in accepted:
            raise ValueError(f"accepted are {accepted}")
        return number

    return AfterValidator(check)


Count = Annotated[int, _within(COUNT)]
Index = Annotated[int, _within(INDEX)]
Seed = Annotated[int, _within(SEED)]
Share = Annotated[float, _within(SHARE)]
Part = Annotated[float, _within(PART)]
Seconds = Annotated[float, _within(SECONDS)]
Scale = Annotated[float, _within(SCALE)]
Weight = Annotated[float, _within(WEIGHT)]
Flops = Annotated[float, _within(FLOPS)]


def any_spelling(*allowed: str) -> BeforeValidator:
    """Accept other spellings of number formats, such as "bf16" for "bfloat16"."""

    def spelled(value: object) -> object:
        return (spelled_as(value, allowed) or value) if isinstance(value, str) else value

    return BeforeValidator(spelled)


_Products = Literal[
    "bfloat16", "float32", "mixed", "float8", "float8_static", "float8_channels", "int8"
]
_Floats = Literal["bfloat16", "float32", "float16"]
ProductFormat = Annotated[_Products, any_spelling(*get_args(_Products))]
FloatFormat = Annotated[_Floats, any_spelling(*get_args(_Floats))]


class TPUVersion(StrEnum):
    """TPU generations as constants."""

    V2 = "v2"
    V3 = "v3"
    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    V7 = "7x"


class Section(Shown, BaseModel):
    """Base of all settings; unknown keys are refused, and defaults are validated."""

    model_config = ConfigDict(extra="forbid", validate_default=True, strict=False, frozen=False)


class ScalingConfig(Section):
    """The load above which a device counts as a hot spot."""

    load_threshold: Share = Field(
        default=0.8, description="load above which a device is a hot spot"
    )


class Limits(Section):
    """How much of each chip's memory may be used."""

    memory_per_chip: Bytes | None = Field(
        default=None, description="HBM to use per chip, e.g. 32GB; None: all the compiler may use"
    )
    memory_fraction: Share = Field(default=1.0, description="share of usable HBM to plan for")


class Hardware(Section):
    """Which chips, how many, in which shape."""

    tpu_version: str | None = Field(default=None, description="generation: v2 … v6e, 7x")
    num_chips: Count | None = Field(default=None, description="chips in one slice (not cores)")
    topology: str | None = Field(default=None, description="shape of the slice in chips, e.g. 8x8")
    num_slices: Count = Field(default=1, description="slices joined over the data-centre network")
    accelerator_type: str | None = Field(
        default=None, description="API name of the slice, e.g. v3-8"
    )
    flops_per_chip: Flops | None = Field(default=None, description="bf16 peak of a chip in FLOP/s")
    mesh_shape: tuple[Count, ...] | None = Field(
        default=None, description="devices along each axis"
    )


class Precision(Section):
    """Number formats of compute and parameters."""

    precision: ProductFormat = Field(default="bfloat16", description="number format of the matmuls")
    use_mixed_precision: bool = Field(
        default=True, description="compute narrow, accumulate in float32"
    )
    fp32_params: bool = Field(default=True, description="keep master parameters in float32")
    compute_dtype: FloatFormat | None = Field(
        default=None, description="overrides the compute format that precision implies"
    )
    param_dtype: FloatFormat | None = Field(
        default=None, description="overrides the parameter format that fp32_params implies"
    )


class Compilation(Section):
    """Flags, time and room of compiles."""

    xla_optimization_level: Annotated[int, Field(ge=0, le=3)] = Field(
        default=0, description="flags: 0 none, 1 suggested, 2 published recipes, 3 experimental"
    )
    enable_xla_fusion: bool = Field(default=True, description="flags of the level's fusion group")
    enable_async_collective: bool = Field(
        default=True, description="flags of the level's asynchronous collectives"
    )
    compilation_timeout_seconds: Seconds = Field(
        default=1800, description="an offline compile is killed after this long"
    )
    cache_max_size: Count | None = Field(
        default=None, description="offline compiles kept on disk; None: as many as 2 GiB hold"
    )


class Communication(Section):
    """Collectives."""

    communication_optimization: bool = Field(
        default=True,
        description="flags that overlap collectives with compute; False: none of the level's",
    )
    use_collective_matmul: bool = Field(
        default=False, description="split matmuls of gathered operands to overlap the gather"
    )


class CompileSettings(Communication, Compilation):
    """The `compile:` section of a job."""


class Memory(Section):
    """How HBM is spent."""

    memory_optimization: Literal["none", "normal", "aggressive"] = Field(
        default="normal", description="how hard to trade compute for memory"
    )
    enable_rematerialization: bool = Field(
        default=False, description="recompute activations in backward"
    )
    gradient_checkpointing: bool = Field(default=False, description="keep only layer inputs")
    batch_size_per_chip: Count | None = Field(
        default=None, description="sequences per chip and step"
    )


class ObserveSettings(Section):
    """The `observe:` section of a job: profiling, logging, watching."""

    enable_profiling: bool = Field(
        default=False, description="trace three steps of a run into its folder (costs time)"
    )
    log_device_placement: bool = Field(
        default=False, description="write the placement of each array to the run folder"
    )
    scaling_config: ScalingConfig = Field(
        default_factory=ScalingConfig, description="hot-spot threshold"
    )
    enable_monitoring: bool = Field(
        default=True, description="`tpukit train` keeps readings of chips and hosts in its folder"
    )
    monitoring_interval_seconds: Seconds = Field(default=1.0, description="between two readings")
    monitoring_duration_seconds: Seconds | None = Field(
        default=None, description="of a watch; None: a run's to its end, one of memory a minute"
    )
    allocation_history_retention_seconds: Seconds = Field(
        default=3600.0, description="how long a monitor or memory manager remembers readings"
    )
    enable_strict_validation: bool = Field(
        default=False, description="what a run would only note ends it before it starts"
    )


class CloudSettings(Section):
    """Where capacity is requested: project, zone, network."""

    project: str | None = Field(default=None, description="Google Cloud project")
    zone: str | None = Field(default=None, description="zone, e.g. us-central1-a")
    network: str = Field(default="default", description="VPC network")
    software_version: str | None = Field(default=None, description="TPU VM image")
    enable_ip_alias: bool = Field(default=True, description="VPC-native addresses")
    reserved: bool = Field(default=False, description="take it from a reservation")
    credentials_file: str | None = Field(default=None, description="service-account key file")


def _normalize_tier(value: object) -> object:
    """Accept Google's spellings "on_demand" and "preemptible"."""
    word = value.replace("_", "-").lower() if isinstance(value, str) else value
    return "spot" if word == "preemptible" else word


class ChipLimit(Section):
    """A row of `launch.limits`: how many chips a project may hold at once."""

    zone: str = Field(description="zone, e.g. us-central2-b")
    type: Annotated[str, AfterValidator(lambda name: get_chip(name).name)] = Field(
        description="generation: v2 … v6e, 7x"
    )
    chips: Index = Field(description="most chips at once (a v3-8 has 4)")
    tier: Annotated[Literal["on-demand", "spot", "reserved"], BeforeValidator(_normalize_tier)] = (
        Field(default="on-demand", description="on-demand, spot or reserved")
    )

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, row: object) -> object:
        """Refuse unknown keys of rows made in Python; for files the reader names the line."""
        for key in cast("dict[str, object]", row) if isinstance(row, dict) else ():
            if key not in cls.model_fields:
                raise ConfigError(
                    f"launch.limits has no key {key!r}; expected zone, type, chips and tier."
                    + did_you_mean(str(key), cls.model_fields)
                )
        return row


PROVIDER_VARIABLE = "TPUKIT_PROVIDER"
"""Environment variable that names the default provider."""


class LaunchSettings(CloudSettings):
    """The `launch:` section of a job: provider, capacity and processes."""

    provider: str | None = Field(
        default=None, description="local, gcp, gke, gce or ssh; None: TPUKIT_PROVIDER, or local"
    )
    zones: tuple[str, ...] = Field(default=(), description="further zones, tried in order")
    endpoint: str | None = Field(
        default=None, description="address of the provider's API, for an emulator; None: its own"
    )
    spot: bool = Field(default=False, description="cheaper capacity that may be preempted")
    reservation: str | None = Field(default=None, description="name of the reservation")
    flex_start_seconds: Seconds | None = Field(
        default=None, description="wait for capacity, then run at most this long (gce)"
    )
    max_price_per_hour: Scale | None = Field(
        default=None, description="most USD per hour for the whole pod, by the price catalogue"
    )
    limits: tuple[ChipLimit, ...] = Field(
        default=(),
        description="quota of chips by zone, type and tier; capacity without a row is not "
        "requested (gcp, gce, gke)",
    )
    priority: Index = Field(default=0, description="a job of higher priority goes first")
    queue_timeout_seconds: Seconds = Field(
        default=3600.0, description="how long one zone may keep the job waiting"
    )
    api_timeout_seconds: Seconds = Field(
        default=600.0,
        description="how long the provider's API may be silent before the run ends; it goes on "
        "asking until then",
    )
    request_timeout_seconds: Seconds = Field(
        default=4.0, description="time limit of one call of the provider's API (gcp, gce)"
    )
    connect_timeout_seconds: Seconds = Field(
        default=600.0,
        description="how long a host may refuse ssh, for example while it boots (gcp, gce, ssh)",
    )
    network_timeout_seconds: Seconds = Field(
        default=600.0,
        description="how long the network to a host may be lost before its connection ends "
        "(gcp, gce, ssh)",
    )
    heartbeat_seconds: Count = Field(
        default=10, description="silence after which jax takes another process for lost"
    )
    first_step_timeout_seconds: Seconds = Field(
        default=1800.0, description="time limit of set-up, compilation and the first step"
    )
    step_timeout_seconds: Seconds = Field(
        default=300.0,
        description="time limit of later steps, after which the job counts as hung; evaluations "
        "and saves have first_step_timeout_seconds",
    )
    save_timeout_seconds: Seconds = Field(
        default=30.0, description="time to save and end for a job that is told to stop"
    )
    max_restarts: Index = Field(
        default=10, description="failures to recover from; preemptions do not count"
    )
    include: tuple[str, ...] = Field(
        default=(), description="files and folders shipped beside the job file"
    )
    setup: tuple[tuple[str, ...], ...] = Field(
        default=(), description="argument lists that run on each new host before the job"
    )
    requirements: tuple[str, ...] = Field(
        default=(),
        description="packages that the job needs beside tpukit and what its files import, in the "
        "versions installed here (gcp, gce, ssh)",
    )
    python: str | None = Field(
        default=None,
        description="Python of the hosts in which tpukit is installed, for example python3; None: "
        "the environment of the launching machine is made there (gcp, gce, ssh)",
    )
    environment: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="variables of the job's processes; $NAME: its value on the launching machine",
        repr=False,
    )
    warm_spares: bool = Field(
        default=False, description="keep started interpreters ready, to recover faster (local)"
    )
    external_addresses: bool = Field(
        default=True,
        description="a public address for each host; without one, ssh must connect from inside the "
        "network or through ssh_config (gcp, gce)",
    )
    ssh_config: str | None = Field(default=None, description="configuration file for ssh")
    ssh_user: str | None = Field(default=None, description="user on the hosts")
    hosts: tuple[str, ...] = Field(default=(), description="hosts of your own (provider ssh)")
    namespace: str = Field(default="default", description="Kubernetes namespace")
    context: str | None = Field(default=None, description="kubeconfig context (gke)")
    cluster_timeout_seconds: Seconds = Field(
        default=60.0,
        description="how long a request to the cluster may take, with its credential plugin, "
        "webhooks and retries after 429 and 503 (gke)",
    )
    queue: str | None = Field(default=None, description="Kueue LocalQueue")
    priority_class: str | None = Field(
        default=None, description="Kueue WorkloadPriorityClass; None: one made of priority"
    )
    flex_start: bool = Field(
        default=False, description="wait for capacity, and keep it for some days (gke)"
    )
    image: str | None = Field(default=None, description="container image (gke)")
    service_account: str | None = Field(default=None, description="account the hosts act as")
    pod_template: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="metadata and spec merged into each Kubernetes Pod: CPU, memory, volumes, "
        "tolerations, labels, … (gke)",
    )

    @model_validator(mode="after")
    def _limits_are_of_known_zones(self) -> Self:
        """Refuse rows of unknown zones, and two rows for the same chips."""
        if not self.limits:
            return self
        listed = {zone for rate in public_prices().rates for zone in rate.zones}
        known = {*listed, *self.zones, *filter(None, (self.zone,))}
        seen: set[tuple[str, str, str]] = set()
        for row in self.limits:
            if row.zone not in known:
                raise ConfigError(
                    f"launch.limits names zone {row.zone!r}, which is unknown and not in "
                    f"launch.zones.{did_you_mean(row.zone, known)}"
                )
            key = (row.zone, row.type, row.tier)
            if key in seen:
                raise ConfigError(
                    f"launch.limits has two rows for {row.type} ({row.tier}) in {row.zone}; keep "
                    "one, with the chips of both."
                )
            seen.add(key)
        return self


SECTIONS: tuple[type[Section], ...] = (
    Hardware,
    Limits,
    Precision,
    Compilation,
    Communication,
    Memory,
    ObserveSettings,
    CloudSettings,
)


def section_of(field: str) -> str:
    """Return the section of `TPUConfig` that `field` belongs to."""
    section = next(section for section in SECTIONS if field in section.model_fields)
    return {"CloudSettings": "launch"}.get(
        section.__name__, section.__name__.removesuffix("Settings").lower()
    )
