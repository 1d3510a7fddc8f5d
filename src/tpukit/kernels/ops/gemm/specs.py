"""The matmul op: its implementations, and the shapes it is judged at."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...registry.op import KernelCase, Op
from .api import OP_NAME, PRODUCTS, SPLITS, XLA, adaptive_matmul, matmul
from .blocks import block_space, default_blocks, vmem_bytes


def _case(name: str, rows: int, width: int, columns: int, dtype: Any, precision: str) -> KernelCase:
    shapes = ((rows, width), (width, columns))
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return KernelCase(name, arrays, {"precision": precision})


OP = Op(
    name=OP_NAME,
    function=adaptive_matmul,
    implementations={name: partial(matmul, implementation=name) for name in PRODUCTS},
    cases=(
        _case("small_bfloat16", 256, 512, 384, jnp.bfloat16, "bfloat16"),
        _case("small_fp32", 256, 512, 384, jnp.float32, "fp32"),
        _case("small_int8", 256, 512, 384, jnp.int8, "int8"),
        _case("small_fp8", 256, 512, 384, jnp.float8_e4m3fn, "fp8"),
        _case("bfloat16_4096", 4096, 4096, 4096, jnp.bfloat16, "bfloat16"),
        _case("int8_4096", 4096, 4096, 4096, jnp.int8, "int8"),
        _case("fp8_4096", 4096, 4096, 4096, jnp.float8_e4m3fn, "fp8"),
        _case("rounded_int8_4096", 4096, 4096, 4096, jnp.bfloat16, "int8"),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=XLA,
    differentiable=(0, 1),
    splits=SPLITS,
)
