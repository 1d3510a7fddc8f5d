"""Ask the real TPU compiler whether it takes a set of flags, on a machine with no TPU."""

from collections.abc import Mapping
from typing import Any

from ...errors import XLACompilationError
from ...hardware import Slice, get_chip, list_slices
from ..child import ChildError, offline_environment, run_child
from .flag import VARIABLES
from .reading import PROBE
from .registry import FlagRegistry
from .setting import as_compiler_options, check_flags
from .syntax import format_flags

TIMEOUT_S = 300.0
FEWEST_DEVICES = 4  # so that there is something to gather from


def trial_compile(
    flags: Mapping[str, object],
    generation: str,
    *,
    registry: FlagRegistry | None = None,
) -> Slice:
    """Compile a small sharded training step with `flags`, given the way a job would be.

    Flags go through the environment of a child, and those that can also go as compiler
    options: libtpu checks the two in different places.

    Returns:
        The slice it was compiled for.

    Raises:
        FlagError: A name or value is wrong.
        XLACompilationError: The compiler, or its start-up, refuses the flags.
        MissingExtraError: libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    checked = check_flags(flags, registry=registry)
    target = smallest_slice(generation)
    options = {name: text for name, (flag, text) in checked.items() if flag.compile_option}
    trials = [
        {"label": "the environment", "compiler_options": {}},
        {
            "label": "compiler options",
            "compiler_options": as_compiler_options(options, registry=registry),
        },
    ]
    for trial in trials:
        trial |= _topology(target)
    variables = {
        variable: format_flags(
            {name: text for name, (flag, text) in checked.items() if flag.variable == variable}
        )
        for variable in VARIABLES.values()
    }
    try:
        reply = run_child(
            PROBE,
            {"question": "compile", "trials": trials},
            timeout_s=TIMEOUT_S,
            environment=offline_environment({k: v for k, v in variables.items() if v}),
        )
    except ChildError as error:
        raise XLACompilationError(
            f"The TPU compiler did not survive these flags for {target}: {error}"
        ) from error
    for how, complaint in reply["refused"].items():
        raise XLACompilationError(
            f"The TPU compiler refuses these flags, given through {how}, for {target}: "
            f"{complaint.splitlines()[0]}"
        )
    return target


def smallest_slice(generation: str) -> Slice:
    """The smallest slice of a generation with enough devices to communicate."""
    name = get_chip(generation).name
    return next(one for one in list_slices(name) if one.devices >= FEWEST_DEVICES)


def _topology(target: Slice) -> dict[str, Any]:
    return {"topology": target.libtpu_topology, "topology_options": target.libtpu_options}
