"""Optimization levels 0 to 3: the flags of each TPU generation, and setting them."""

from collections.abc import Collection, MutableMapping
from dataclasses import replace

from ...errors import FlagError
from ...hardware import detect_accelerators, get_chip
from ...hardware.catalog import CHIP_FOR_ESTIMATES
from .flag import GROUPS, BundleFlag, load_bundles
from .registry import FlagRegistry
from .setting import FlagRecord, SkippedFlag, set_xla_flags

HIGHEST_LEVEL = 3
"""Whose flags are set on a machine without a TPU, where no generation is named."""


def enable_xla_optimizations(
    level: int = 2,
    *,
    enable_fusion: bool = True,
    enable_async_collective: bool = True,
    enable_megacore: bool = True,
    enable_latency_hiding: bool = True,
    generation: str | None = None,
    environment: MutableMapping[str, str] | None = None,
    registry: FlagRegistry | None = None,
) -> FlagRecord:
    """Set the flags of an optimization level.

    Args:
        level: 0 sets nothing, 1 what the compiler's authors suggest, 2 adds published recipes,
            3 adds experimental scheduling, which can cost memory.
        enable_fusion: Leave the flags of this group at their defaults when False.
        enable_async_collective: The same for asynchronous collectives.
        enable_megacore: The same for megacore; only v4 and v5p have it.
        enable_latency_hiding: The same for the latency-hiding scheduler.
        generation: Such as "v6e"; the TPU found here by default. On a machine without a TPU the
            flags of v6e are set, and a note in the result reports it.
        environment: Where to set them; `os.environ` by default.
        registry: The flags to check against; those installed here by default.

    Returns:
        What was set with the reason for each, and what was left out and why.

    Raises:
        FlagError: The level is not 0, 1, 2 or 3.
        SliceError: The generation is unknown.
        MissingExtraError: libtpu is not installed, so no TPU flag can be checked.
    """
    wanted = dict(
        zip(
            GROUPS,
            (enable_fusion, enable_async_collective, enable_megacore, enable_latency_hiding),
            strict=True,
        )
    )
    chip_name = generation_for_flags(generation)
    chosen, skipped = select(level, chip_name, groups=[group for group, on in wanted.items() if on])
    registry = FlagRegistry.installed() if registry is None else registry
    if registry.libtpu_version is not None:  # without it, set_xla_flags names the extra
        for name in [name for name in chosen if name not in registry]:
            del chosen[name]
            skipped.append(SkippedFlag(name, f"no such flag in {registry.described}"))
    record = set_xla_flags(
        {name: flag.value for name, flag in chosen.items()},
        environment=environment,
        registry=registry,
    )
    notes = record.notes
    if level and generation is None:
        notes = (*notes, *_notes_on_generation(chip_name))
    explained = tuple(
        replace(flag, reason=chosen[flag.name].reason, source=chosen[flag.name].source)
        for flag in record.applied
    )
    return replace(record, applied=explained, skipped=tuple(skipped), notes=notes)


def select(
    level: int, generation: str | None, *, groups: Collection[str] = GROUPS
) -> tuple[dict[str, BundleFlag], list[SkippedFlag]]:
    """Return a level's flags for one generation, and those left out with the reason.

    Raises:
        FlagError: The level is not 0, 1, 2 or 3.
    """
    if level not in range(HIGHEST_LEVEL + 1):
        raise FlagError(f"level {level!r} is not an optimization level; use 0, 1, 2 or 3.")
    bundles = load_bundles()
    chosen: dict[str, BundleFlag] = {}
    skipped: dict[str, SkippedFlag] = {}
    for flag in bundles.flags:
        if flag.level > level:
            continue
        if flag.group not in groups:
            skipped[flag.name] = SkippedFlag(flag.name, f"{flag.group} is switched off")
        elif _applies(flag.generations, generation):
            chosen[flag.name] = flag
        elif flag.name not in skipped:
            only = ", ".join(sorted(flag.generations or ()))
            skipped[flag.name] = SkippedFlag(flag.name, f"only for {only}")
    if level:
        for exclusion in bundles.excluded:
            if generation is not None and _applies(exclusion.generations, generation):
                skipped[exclusion.name] = SkippedFlag(exclusion.name, exclusion.reason)
    return chosen, [flag for name, flag in skipped.items() if name not in chosen]


def _applies(generations: frozenset[str] | None, generation: str | None) -> bool:
    return generations is None or generation in generations


def generation_for_flags(asked: str | None) -> str | None:
    """Return the generation to choose flags for: the one given, or the machine's own.

    A machine without a TPU gets `CHIP_FOR_ESTIMATES`, because only processes that compile for
    another machine read the flags there. A TPU of unknown generation gets None, which selects only
    flags that are valid for every generation.

    Raises:
        SliceError: The generation is unknown.
    """
    if asked is not None:
        return get_chip(asked).name
    found = detect_accelerators()
    return found.generation if found.kind == "tpu" else CHIP_FOR_ESTIMATES


def _notes_on_generation(chosen: str | None) -> tuple[str, ...]:
    if chosen is None:
        return (
            "The generation of the TPU found here is unknown, so only flags for every generation "
            "are set; name it, for example generation='v6e'.",
        )
    if detect_accelerators().kind == "tpu":
        return ()
    return (
        f"No TPU was found here, so the flags are those of {chosen}; name another generation, for "
        "example generation='v5p'.",
    )
