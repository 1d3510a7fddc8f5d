"""`KernelPyTorchConfig`: document 002's shape of a configuration, on the values of `TPUConfig`."""

from typing import Any, Literal, Self, get_args

from pydantic import Field

from ..errors import ConfigError, did_you_mean
from ..hardware import get_chip
from ..job.config import TPUConfig as TPUConfig
from ..job.config.presets import preset_values
from ..job.sections import Scale
from ..job.sections import TPUVersion as TPUVersion

Mode = Literal["training", "inference", "development"]
# What document 002 calls by another name than `TPUConfig` does.
ALIASES = {"version": "tpu_version", "mixed_precision": "use_mixed_precision"}
_CAPACITY = {"v6e_memory_gb": "v6e", "v7_memory_gb": "7x"}


class TorchTPUConfig(TPUConfig):
    """`config.hardware.tpu`: a `TPUConfig` that also answers to the names of document 002.

    Values are checked on assignment, whichever name they are given under.

    Example:
        >>> config = KernelPyTorchConfig()
        >>> config.hardware.tpu.version = TPUVersion.V5P
        >>> config.hardware.tpu.tpu_version
        'v5p'
    """

    v6e_memory_gb: Scale | None = Field(
        default=None, description="HBM of a v6e chip to count with, in GiB; None: the catalogue's"
    )
    v7_memory_gb: Scale | None = Field(
        default=None, description="HBM of a 7x chip to count with, in GiB; None: the catalogue's"
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
        return super().update(**{ALIASES.get(name, name): one for name, one in changes.items()})

    def resolved(self) -> TPUConfig:
        """Return the plain configuration, with this chip's own capacity as its memory limit."""
        stated = {
            name: getattr(self, name) for name in self.model_fields_set if name not in _CAPACITY
        }
        for name, generation in _CAPACITY.items():
            gib = getattr(self, name)
            if gib is not None and self.chip == get_chip(generation):
                stated.setdefault("memory_per_chip", int(gib * 2**30))
        return TPUConfig(**stated)


class HardwareConfig:
    """`config.hardware`: what the model runs on."""

    def __init__(self, tpu: TorchTPUConfig) -> None:
        self.tpu = tpu

    def __repr__(self) -> str:
        return f"HardwareConfig(tpu={self.tpu!r})"


class KernelPyTorchConfig:
    """Settings for PyTorch models on TPUs, in the shape document 002 writes them.

    Args:
        mode: "training" (the default), "inference" or "development": which preset of `TPUConfig`
            the values start from.
        **tpu: Values of `config.hardware.tpu`, under either name.

    Raises:
        ConfigError: No such mode, or a value that is not valid.
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
    """Return the settings of whatever a class of this package was made with.

    Raises:
        ConfigError: It is neither of the two kinds of configuration.
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
        f"a configuration is a KernelPyTorchConfig or a TPUConfig, not {type(config).__name__}."
    )
