"""Devices, distributed training and compiler flags from one configuration (document 002)."""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from ..job.compiler_flags import flags_of
from ..runtime.flags.bundles import generation_for_flags
from .config import TorchTPUConfig, tpu_settings
from .devices import XLADeviceManager
from .distributed import XLADistributedTraining

if TYPE_CHECKING:
    from ..runtime.environment import EnvironmentReport


class XLAOptimizations:
    """What the configuration's optimization level asks of the compiler.

    Levels of a model (number formats, rematerialization, kernels) are `TPUOptimizer`'s; these are
    the flags of the process, which jax reads once, when it starts.
    """

    def __init__(self, settings: TorchTPUConfig) -> None:
        self._settings = settings

    @property
    def level(self) -> int:
        """`xla_optimization_level`: 0 none, 1 suggested, 2 published recipes, 3 experimental."""
        return self._settings.xla_optimization_level

    @property
    def flags(self) -> dict[str, bool | int | float | str]:
        """The compiler flags of the level, for the configured generation or the TPU found here."""
        chip = self._settings.chip
        generation = generation_for_flags(chip.name if chip else None)
        return flags_of(self._settings, generation=generation)

    def apply(self, environment: MutableMapping[str, str] | None = None) -> "EnvironmentReport":
        """Set the flags for this process and return what was set, and what came too late.

        Nothing but libtpu reads them, so they change nothing where it does not run.

        Args:
            environment: Variables to change; those of this process by default.
        """
        return self._settings.setup_environment_variables(environment)

    def mark_step(self) -> None:
        """Do nothing: torch_xla cut its lazy graph here, and a compiled program needs no cut."""

    def synchronize(self) -> None:
        """Wait until everything that jax has started is done."""
        import jax

        jax.effects_barrier()
        jax.block_until_ready(jax.live_arrays())


def create_xla_integration(
    config: object = None,
) -> tuple[XLADeviceManager, XLADistributedTraining, XLAOptimizations]:
    """Return devices, collectives and compiler flags for one configuration.

    Raises:
        TPUNotAvailableError: There is no TPU and the configuration asks for strict validation.
        TPUDistributedError: The environment names several hosts and nobody has joined them.
    """
    settings = tpu_settings(config)
    devices = XLADeviceManager(settings)
    return devices, XLADistributedTraining(devices), XLAOptimizations(settings)
