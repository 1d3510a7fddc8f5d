"""`KernelPyTorchConfig`: the configuration of document 002, on top of `TPUConfig`."""

from typing import Any, Literal, Self, get_args

from pydantic import Field

from ..errors import ConfigError, did_you_mean
from ..hardware import get_chip
from ..job.config import TPUConfig as TPUConfig
from ..job.config.presets import preset_values
from ..job.sections import Scale
from ..job.sections import TPUVersion as TPUVersion

Mode = Literal["training", "inference", "development"]
# Names in document 002 that differ from those of `TPUConfig`.
ALIASES = {"version": "tpu_version", "mixed_precision": "use_mixed_precision"}
_CAPACITY = {"v6e_memory_gb": "v6e", "v7_memory_gb": "7x"}


class TorchTPUConfig(TPUConfig):
    """`config.hardware.tpu`: a `TPUConfig` that also accepts the names of document 002.

    Values are checked on assignment, under both names.

    Example:
        >>> config = KernelPyTorchConfig()
        >>> config.hardware.tpu.version = TPUVersion.V5P
        >>> config.hardware.tpu.tpu_version
        'v5p'
    """

    v6e_memory_gb: Scale | None = Field(
        default=None, description="assumed HBM of a v6e chip, in GiB; None: the catalogue's"
    )
    v7_memory_gb: Scale | None = Field(
        default=None, description="assumed HBM of a 7x chip, in GiB; None: the catalogue's"
    )

    def __getattr__(self, name: str) -> Any:
        if name in ALIASES:
            return getattr(self, ALIASES[name])
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]  pydantic's

    def update(self, **changes: Any) -> Self:
        """Assign several fields at once, under either name."""
        known = {*type(self).model_fields, *ALIASES}
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"hardware.tpu has no setting '{name}'.{did_you_mean(name, known)}"
                )
        return super().update(**{ALIASES.get(name, name): value for name, value in changes.items()})

    def resolved(self) -> TPUConfig:
        """Return the plain `TPUConfig`, with the assumed HBM of the chip as its memory limit."""
        stated = {
            name: getattr(self, name) for name in self.model_fields_set if name not in _CAPACITY
        }
        for name, generation in _CAPACITY.items():
            gib = getattr(self, name)
            if gib is not None and self.chip == get_chip(generation):
                stated.setdefault("memory_per_chip", int(gib * 2**30))
        return TPUConfig(**stated)


class HardwareConfig:
    """`config.hardware`: the hardware settings."""

    def __init__(self, tpu: TorchTPUConfig) -> None:
        self.tpu = tpu

    def __repr__(self) -> str:
        return f"HardwareConfig(tpu={self.tpu!r})"


class KernelPyTorchConfig:
    """Settings for PyTorch models on TPUs, in the structure of document 002.

    Args:
        mode: The preset of `TPUConfig` to start from: "training" (the default), "inference" or
            "development".
        **tpu: Values of `config.hardware.tpu`, under either name.

    Raises:
        ConfigError: The mode or a value is not valid.
    """

    def __init__(self, mode: Mode = "training", **tpu: Any) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(
                f"mode={mode!r} is not one of {', '.join(get_args(Mode))}."
                + did_you_mean(str(mode), get_args(Mode))
            )
        self.mode: Mode = mode
        self.hardware = HardwareConfig(TorchTPUConfig(**preset_values(mode)).update(**tpu))

    def __repr__(self) -> str:
        return f"KernelPyTorchConfig(mode={self.mode!r}, hardware={self.hardware!r})"


def tpu_settings(config: object, *, mode: Mode = "training") -> TorchTPUConfig:
    """Return the settings of any accepted kind of configuration.

    Raises:
        ConfigError: It is not a configuration.
    """
    if config is None:
        return KernelPyTorchConfig(mode).hardware.tpu
    if isinstance(config, KernelPyTorchConfig):
        return config.hardware.tpu
    if isinstance(config, TorchTPUConfig):
        return config
    if isinstance(config, TPUConfig):
        return TorchTPUConfig(**{name: getattr(config, name) for name in config.model_fields_set})
    raise ConfigError(
        f"expected a KernelPyTorchConfig or a TPUConfig, got {type(config).__name__}; pass one of "
        "them."
    )
