"""Tensors as arrays and back: without a copy where torch and jax share a memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....parallel.rebalancing.reshard import move

# What jax has no room for without its 64-bit mode, by torch's name, and what it becomes.
NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_of(tensor: Any) -> Any:
    """Return the format an array of this tensor has."""
    name = str(tensor.dtype).removeprefix("torch.")
    return jnp.dtype(NARROWED.get(name, name))


def shape_of(tensor: Any) -> jax.ShapeDtypeStruct:
    """Return shape and format of the array that a tensor becomes; it may have no values."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype_of(tensor))


def to_array(tensor: Any, *, copy: bool = True) -> jax.Array:
    """Return a tensor's values as an array, narrowed to what jax holds.

    Args:
        tensor: On any device of torch that has values.
        copy: False shares the memory where both can: it must then not be written to by torch
            while the array is in use, nor be donated.
    """
    import torch

    plain = tensor.detach()
    if plain.is_sparse:
        plain = plain.to_dense()
    narrow = dtype_of(plain)
    if plain.dtype == torch.bool:
        return jnp.array(plain.cpu().numpy())
    plain = plain.to(getattr(torch, narrow.name)).contiguous()
    if plain.numel() == 0:
        return jnp.zeros(tuple(plain.shape), narrow)
    array = jnp.from_dlpack(plain)
    return jnp.array(array) if copy else array


def to_tensor(array: jax.Array, *, dtype: Any = None) -> Any:
    """Return an array's values as a tensor of torch's own, in `dtype` where one is given."""
    import torch

    if not array.is_fully_addressable and isinstance(array.sharding, NamedSharding):
        # Every process asks for it at the same time.
        array = move(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    if array.size == 0 or array.dtype == jnp.bool_:
        found = torch.from_numpy(np.array(array))
    elif len(array.sharding.device_set) > 1 or next(iter(array.devices())).platform == "tpu":
        found = tensor_of_host(np.asarray(array))
    else:
        found = torch.from_dlpack(array)
    return found if dtype is None else found.to(dtype)


def tensor_of_host(values: np.ndarray[Any, Any]) -> Any:
    """Return numpy values as a tensor, also in formats that numpy has from elsewhere."""
    import torch

    name = values.dtype.name
    if values.dtype.kind == "V" or name.startswith(("bfloat", "float8")):
        raw = np.array(values).view(f"uint{8 * values.dtype.itemsize}")
        return torch.from_numpy(raw).view(getattr(torch, name))
    return torch.from_numpy(np.array(values))
