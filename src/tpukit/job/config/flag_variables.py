"""The compiler flags of a configuration as environment variables, and what became of each."""

import os
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from ...runtime.environment import JaxState, VariableChange
from ...runtime.flags import set_xla_flags
from ...runtime.flags.bundles import generation_for_flags
from ...runtime.flags.flag import VARIABLES
from ...runtime.versions import is_any_installed
from ..compiler_flags import flags_of

if TYPE_CHECKING:
    from .tpu import TPUConfig

LIBTPU_VARIABLE = VARIABLES["libtpu"]


def set_flags(
    config: "TPUConfig", environment: MutableMapping[str, str], *, jax_state: JaxState
) -> Iterator[VariableChange]:
    """Set the flags that `config` asks for, and say of each variable what was done.

    Args:
        config: Its level and switches decide, for its generation; without one for that of the TPU
            found here, as `generation_for_flags` chooses it.
        environment: Where to set them; in the process's own nothing is set once jax has started.
        jax_state: Whether jax has opened its devices.
    """
    held = environment.get(LIBTPU_VARIABLE)
    if not is_any_installed("libtpu"):
        why = "libtpu is not installed, so no flag can be checked: pip install 'tpukit[tpu]'"
        yield VariableChange(LIBTPU_VARIABLE, held, held, "kept", why)
        return
    generation = generation_for_flags(config.chip.name if config.chip else None)
    flags = flags_of(config, generation=generation)
    if not flags:
        why = "no flags are asked for at level 0"
        yield VariableChange(LIBTPU_VARIABLE, held, held, "kept", why)
        return
    late = environment is os.environ and jax_state == "initialised"
    target = dict(environment) if late else environment
    before = dict(environment)
    record = set_xla_flags(flags, environment=target)
    chosen_for = f" for {generation}" if generation else ""
    why = f"flags of level {config.xla_optimization_level}{chosen_for}"
    why += "; nothing but libtpu reads TPU flags"
    for name, value in record.variables.items():
        if late:
            said = f"{value!r} would be right, but jax has opened its devices"
            yield VariableChange(name, before.get(name), before.get(name), "too late", said)
        else:
            yield VariableChange(name, before.get(name), value, "set", why)
