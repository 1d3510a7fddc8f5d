"""What most tests import, imported once: every trial is a fork of a process that has done so."""

import os
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported, before tests/conftest.py says so

import flax.nnx  # noqa: F401
import hypothesis  # noqa: F401
import jax.experimental.pallas  # noqa: F401
import optax  # noqa: F401
import pydantic  # noqa: F401
import pytest  # noqa: F401
import rich  # noqa: F401

# jax warns of any fork. Its threads start with its first computation, and none was asked for here.
warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
