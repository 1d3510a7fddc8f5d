"""The compiler flags of a job's `compile:` section, as options and as environment variables."""

import os
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from ..plain_data import JsonObject
from ..runtime.environment import JaxState, VariableChange
from ..runtime.flags import FlagRegistry, as_compiler_options, set_xla_flags
from ..runtime.flags.bundles import generation_for_flags, select
from ..runtime.flags.flag import GROUPS, VARIABLES
from ..runtime.versions import is_any_installed
from .sections import Communication, Compilation

if TYPE_CHECKING:
    from .config.tpu import TPUConfig


# A matmul whose operand is gathered is split into pieces when the gather is at least this large.
# The transfer of one piece then overlaps with the matmul of another.
_SPLIT_MATMULS_FROM_MIB = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
_OVERLAP = ("async_collective", "latency_hiding")


class _Flags(Communication, Compilation):
    """The settings that flags depend on."""


def flags_of(
    settings: Communication | Compilation, *, generation: str | None
) -> dict[str, bool | int | float | str]:
    """Return the flags of the optimization level and of the single settings.

    Args:
        settings: A job's `compile` section, or a `TPUConfig`, which has the same fields.
        generation: The TPU generation, such as "v6e"; None selects flags for every generation.
    """
    wanted = _Flags(**{name: getattr(settings, name) for name in _Flags.model_fields})
    groups = set(GROUPS)
    if not wanted.enable_xla_fusion:
        groups.discard("fusion")
    if not wanted.enable_async_collective:
        groups.discard("async_collective")
    if not wanted.communication_optimization:
        groups.difference_update(_OVERLAP)
    flags: dict[str, bool | int | float | str] = {}
    if wanted.xla_optimization_level:
        chosen, _ = select(wanted.xla_optimization_level, generation, groups=groups)
        known = FlagRegistry.installed()
        flags = {name: flag.value for name, flag in chosen.items() if name in known}
    if wanted.use_collective_matmul:
        flags[_SPLIT_MATMULS_FROM_MIB] = 0
    return flags


def compiler_options(
    settings: Communication | Compilation, *, generation: str | None
) -> JsonObject:
    """Return the flags of `flags_of` that are options of one compile, not of the whole process."""
    flags = flags_of(settings, generation=generation)
    if not flags:
        return {}
    registry = FlagRegistry.installed()
    per_compile = {
        name: value for name, value in flags.items() if registry.find(name).compile_option
    }
    return dict(as_compiler_options(per_compile, registry=registry))


LIBTPU_VARIABLE = VARIABLES["libtpu"]


def set_flags(
    config: "TPUConfig", environment: MutableMapping[str, str], *, jax_state: JaxState
) -> Iterator[VariableChange]:
    """Set the flags of `config` in `environment`, and yield the change of each variable.

    Args:
        config: The configuration. Without a generation, `generation_for_flags` chooses that of
            the TPU of this machine.
        environment: The variables to change; `os.environ` is left as it is once jax has started.
        jax_state: Whether jax has opened its devices.
    """
    current = environment.get(LIBTPU_VARIABLE)
    if not is_any_installed("libtpu"):
        why = "libtpu is not installed, so no flag can be checked: pip install 'tpukit[tpu]'"
        yield VariableChange(LIBTPU_VARIABLE, current, current, "kept", why)
        return
    generation = generation_for_flags(config.chip.name if config.chip else None)
    flags = flags_of(config, generation=generation)
    if not flags:
        why = "level 0 sets no flags"
        yield VariableChange(LIBTPU_VARIABLE, current, current, "kept", why)
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
            reason = f"{value!r} was not set, because jax has already opened its devices"
            yield VariableChange(name, before.get(name), before.get(name), "too late", reason)
        else:
            yield VariableChange(name, before.get(name), value, "set", why)
