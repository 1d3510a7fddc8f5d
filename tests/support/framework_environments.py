"""Environments of other people's frameworks, made with uv when a test first wants one.

They are kept in the cache folder, and have neither tpukit nor libtpu. Versions are those that were
tried; jax is the version beside tpukit, so that the compiler pair is one that it was tried with.
"""

import fcntl
import hashlib
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from tpukit.runtime.files import cache_folder, finish_folder, folder_beside
from tpukit.runtime.toolchains.toolchain import find_interpreter

PYTHON = "3.12"
# MaxText's wheel names no dependencies of its own: these are what its trainer imports.
MAXTEXT = (
    *("maxtext==0.2.4", "absl-py", "aqtp", "array-record", "chex", "datasets", "drjax", "flax"),
    *("cloud-accelerator-diagnostics", "google-cloud-aiplatform", "google-cloud-mldiagnostics"),
    *("google-cloud-monitoring", "google-api-python-client", "jinja2", "uvloop", "psutil"),
    *("grain[parquet]", "jaxtyping", "jsonlines", "ml-collections"),
    *("ml-goodput-measurement", "omegaconf", "optax", "orbax-checkpoint", "pathwaysutils"),
    *(
        "pillow",
        "pydantic",
        "qwix",
        "sentencepiece",
        "seqio",
        "sympy",
        "tensorboardx",
        "tensorflow-cpu",
    ),
    *("tensorflow-datasets", "tensorflow-text", "tiktoken", "tokamax!=0.1.0", "transformers"),
)
REQUIREMENTS = {
    "keras": ("keras==3.15.1",),
    "levanter": ("marin-levanter==0.2.227.dev40316220070",),
    "maxtext": MAXTEXT,
    "tunix": ("google-tunix==0.1.7",),
}


def framework_python(name):
    """Return the interpreter of a framework's environment; skip where it cannot be installed."""
    asked = (*REQUIREMENTS[name], f"jax=={version('jax')}", f"jaxlib=={version('jaxlib')}")
    digest = hashlib.sha256(" ".join(asked).encode()).hexdigest()[:12]
    place = cache_folder() / "frameworks" / f"{name}-{digest}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "bin" / "python").exists():
            _make(name, place, asked)
    return place / "bin" / "python"


def _make(name: str, place: Path, asked: tuple[str, ...]):
    base = find_interpreter(PYTHON)
    if base is None:
        pytest.skip(f"not installable here: {name} needs Python {PYTHON}")
    with folder_beside(place) as made:
        subprocess.run([base, "-m", "venv", made], check=True)
        python = made / "bin" / "python"
        # uv resolves what Levanter requires in seconds; pip was still trying after 10 minutes.
        for command in (
            [python, "-m", "pip", "install", "--no-input", "--quiet", "uv"],
            [python, "-m", "uv", "pip", "install", "--quiet", "--python", python, *asked],
        ):
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.returncode:
                pytest.skip(f"not installable here: {name}: {ended.stderr.strip()[-300:]}")
        finish_folder(made, place)
