"""Memory for the first save is made beforehand: as much as is copied, and never an obstacle."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.training.checkpoint import TPUCheckpointer, orbax_arrays
from tpukit.training.checkpoint.orbax_arrays import PinnedMemory


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "data"))


def test_every_part_counts_once(mesh):
    cut = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    whole = jax.ShapeDtypeStruct((5,), jnp.float32, sharding=NamedSharding(mesh, P()))
    memory = PinnedMemory({"cut": cut, "whole": whole, "key": jax.random.key(0)})
    memory.wait()
    assert memory.n_bytes == 64 * 32 * 2 + 5 * 4


def test_a_prepared_save_is_as_any_other(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(PinnedMemory, "is_wanted", staticmethod(lambda: True))
    given = jax.device_put(jnp.arange(12.0).reshape(4, 3), NamedSharding(mesh, P("fsdp")))
    with TPUCheckpointer(tmp_path) as checkpointer:
        checkpointer.prepare(params={"w": given})
        checkpointer.save(1, params={"w": given})
        checkpointer.wait()
        np.testing.assert_array_equal(checkpointer.restore().params["w"], given)


def test_a_host_without_such_memory_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(orbax_arrays, "PINNED", "no_such_memory")
    caplog.set_level(logging.INFO, logger=orbax_arrays.__name__)
    memory = PinnedMemory(jnp.ones(4))
    memory.wait()
    assert "could not be pinned" in caplog.text
