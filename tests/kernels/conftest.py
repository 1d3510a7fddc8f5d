"""What tests of kernels share: the TPU interpreter's race detector as a check that fails."""

import contextlib
import io

import jax
import pytest


@pytest.fixture
def no_races():
    """`with no_races(): ...` fails if the TPU interpreter reported a race meanwhile.

    The detector of each kernel is gone when the next one starts; what it printed stays.
    """

    @contextlib.contextmanager
    def watch():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            yield
            jax.effects_barrier()
        assert "RACE DETECTED" not in said.getvalue(), said.getvalue()

    return watch
