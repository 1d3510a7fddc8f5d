"""The compiler flags that a job's `compile:` section asks for, for one generation of chips."""

from typing import Any

from ..runtime.flags import FlagRegistry, as_compiler_options
from ..runtime.flags.bundles import select
from ..runtime.flags.published import GROUPS
from .sections import Communication, Compilation

# Products with a gathered operand are cut into pieces where the gather is at least this large: the
# transfers of one piece then run beside the product of another.
_CUT_PRODUCTS_FROM_MIB = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
_OVERLAP = ("async_collective", "latency_hiding")


class _Flags(Communication, Compilation):
    """What decides flags, wherever it stands: in a job's section or flat in a `TPUConfig`."""


def flags_of(
    settings: Communication | Compilation, *, generation: str | None
) -> dict[str, bool | int | float | str]:
    """Return the flags of a level for a generation, and those that single settings ask for.

    Args:
        settings: A job's `compile`, or a `TPUConfig`, which has the same fields.
        generation: Such as "v6e"; None takes only flags that hold for every generation.
    """
    asked = _Flags(**{name: getattr(settings, name) for name in _Flags.model_fields})
    groups = set(GROUPS)
    if not asked.enable_xla_fusion:
        groups.discard("fusion")
    if not asked.enable_async_collective:
        groups.discard("async_collective")
    if not asked.communication_optimization:
        groups.difference_update(_OVERLAP)
    flags: dict[str, bool | int | float | str] = {}
    if asked.xla_optimization_level:
        chosen, _ = select(asked.xla_optimization_level, generation, groups=groups)
        known = FlagRegistry.installed()
        flags = {name: flag.value for name, flag in chosen.items() if name in known}
    if asked.use_collective_matmul:
        flags[_CUT_PRODUCTS_FROM_MIB] = 0
    return flags


def compiler_options(
    settings: Communication | Compilation, *, generation: str | None
) -> dict[str, Any]:
    """Return what of `flags_of` one compile takes; flags of the whole process are left out."""
    flags = flags_of(settings, generation=generation)
    if not flags:
        return {}
    registry = FlagRegistry.installed()
    alone = {name: value for name, value in flags.items() if registry.find(name).compile_option}
    return dict(as_compiler_options(alone, registry=registry))
