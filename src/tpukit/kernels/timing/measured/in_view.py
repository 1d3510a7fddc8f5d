"""Which measured rows were in view when the constants of estimates were chosen."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

Constants = Literal["kernels", "ops"]
# The file beside each set of constants that names the rows it was fitted on.
_FILES: dict[Constants, tuple[str, str]] = {
    "kernels": ("tpukit.compiler.bundles", "calibration.toml"),
    "ops": ("tpukit.compiler.timeline", "fitted_on.toml"),
}


@cache
def rows_in_view(constants: Constants) -> frozenset[str]:
    """The ids of the rows that the rates of Pallas kernels, or of XLA's ops, were chosen by."""
    package, name = _FILES[constants]
    table = tomllib.loads((files(package) / "data" / name).read_text())
    return frozenset(table["fitted_on"]["rows"])
