"""Functions recorded as the shim records the programs of a captured process."""

import sys

import jax

from tpukit.capturing.running import SHIM

sys.path.insert(0, str(SHIM))
from tpukit_shim import exporting, survey  # noqa: F401
from tpukit_shim.programs import RecordedProgram

sys.path.remove(str(SHIM))


def recorded(function, *args, donated=(), out_shardings=None):
    """Return a function's trace as a recorded program."""
    jaxpr = jax.jit(function).trace(*args).jaxpr
    params = {
        "jaxpr": jaxpr,
        "name": "f",
        "in_shardings": [None] * len(jaxpr.in_avals),
        "out_shardings": out_shardings or [None] * len(jaxpr.out_avals),
        "donated_invars": [number in donated for number in range(len(jaxpr.in_avals))],
    }
    return RecordedProgram(jax.tree.leaves(args), params, survey.survey(jaxpr.jaxpr, {}))
