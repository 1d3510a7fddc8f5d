"""A safetensors header may have a size that reads like the mark of a pickle."""

import pickle

import numpy as np
import pytest
from safetensors.numpy import save

from tpukit.runtime.files import looks_pickled


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_sizes_that_begin_like_a_pickle(protocol):
    for filling in range(300, 1600):
        whole = save({"x": np.zeros(1, np.uint8)}, {"about": "y" * filling})
        if whole[:2] == bytes([0x80, protocol]):
            assert not looks_pickled(whole[:9])
            break
    else:
        pytest.fail("no header of such a size")
    assert looks_pickled(pickle.dumps({"x": list(range(20))}, protocol=protocol)[:9])
