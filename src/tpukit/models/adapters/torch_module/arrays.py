"""Conversion between tensors and arrays, without a copy where torch and jax share memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....parallel.rebalancing import move

# 64-bit formats, by torch's name, and the 32-bit formats that jax uses by default.
NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_of(tensor: Any) -> Any:
    """Return the dtype of the array that a tensor becomes."""
    name = str(tensor.dtype).removeprefix("torch.")
    return jnp.dtype(NARROWED.get(name, name))


def shape_of(tensor: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the array that a tensor becomes; the tensor may have no values."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype_of(tensor))


def to_array(tensor: Any, *, copy: bool = True) -> jax.Array:
    """Return a tensor's values as an array; 64-bit formats become 32-bit ones.

    Args:
        tensor: A tensor with values, on any device of torch.
        copy: False shares memory where possible. Torch must then not change the tensor while the
            array is in use, and the array must not be donated.
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
    """Return an array's values as a torch tensor, in `dtype` where one is given."""
    import torch

    if not array.is_fully_addressable and isinstance(array.sharding, NamedSharding):
        # All processes do this at the same time.
        array = move(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    if array.size == 0 or array.dtype == jnp.bool_:
        found = torch.from_numpy(np.array(array))
    elif len(array.sharding.device_set) > 1 or next(iter(array.devices())).platform == "tpu":
        found = tensor_of_host(np.asarray(array))
    else:
        found = torch.from_dlpack(array)
    return found if dtype is None else found.to(dtype)


def tensor_of_host(values: np.ndarray[Any, Any]) -> Any:
    """Return numpy values as a tensor, including formats of ml_dtypes."""
    import torch

    name = values.dtype.name
    if values.dtype.kind == "V" or name.startswith(("bfloat", "float8")):
        raw = np.array(values).view(f"uint{8 * values.dtype.itemsize}")
        return torch.from_numpy(raw).view(getattr(torch, name))
    return torch.from_numpy(np.array(values))
