"""Environments with one version of jax and nothing of tpukit, as the author of a trainer has."""

import os
import pwd
import sys
from pathlib import Path

import pytest

from tpukit.runtime.files import finish_folder, folder_beside, temporary_folder
from tpukit.runtime.toolchains import find_interpreter, run_followed
from tpukit.runtime.toolchains.running import outside_environment

VERSIONS = {"0.6.2": "3.11", "0.11.2": "3.12", "0.12.0.1": "3.13"}
"""Versions of jax that captures are tried with, and a Python that each installs on."""


def users_cache() -> Path:
    """Return the user's own cache folder, which tests do not use otherwise: their home is another.

    Environments take minutes and gigabytes, so that one is made for all runs.
    """
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "tpukit"


def python_with(jax: str) -> Path:
    """Return an interpreter with a version of jax; pip makes its environment when first wanted."""
    place = users_cache() / "user-environments" / f"jax-{jax}-py{VERSIONS[jax]}"
    python = place / "bin" / "python"
    if python.exists():
        return python
    base = find_interpreter(VERSIONS[jax])
    if base is None:
        pytest.skip(f"no environment with jax {jax}: Python {VERSIONS[jax]} is not installed")
    with folder_beside(place) as made, temporary_folder("tpukit-home-") as home:
        for command in (
            [base, "-m", "venv", made],
            [made / "bin" / "python", "-m", "pip", "install", "--no-input", f"jax=={jax}"],
        ):
            ended = run_followed(command, environment={**outside_environment(), "HOME": str(home)})
            if ended.code:
                sys.stderr.write(ended.errors)
                pytest.skip(f"no environment with jax {jax}: pip cannot install it")
        finish_folder(made, place)
    return python
