"""The room's front door: every name is there, and reading configurations costs no jax."""

import subprocess
import sys

import pytest

import tpukit.models


@pytest.mark.parametrize("name", tpukit.models.__all__)
def test_every_name_loads(name):
    assert getattr(tpukit.models, name).__name__ == name
    assert name in dir(tpukit.models)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Workloda'"):
        tpukit.models.Workloda  # noqa: B018


def test_reading_a_preset_imports_neither_jax_nor_flax():
    program = (
        "import sys; from tpukit.models import get_preset;"
        "get_preset('llama3.1-8b').flops_per_token(8192);"
        "sys.exit(bool({'jax', 'flax', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
