"""The quantized matmul op: its implementations, and the shapes it is judged at."""

import jax
import jax.numpy as jnp

from ...blocks.tiling import LANES
from ...registry.op import KernelCase, Op
from .activations import Activations
from .api import IMPLEMENTATIONS, OP_NAME, SPLITS, XLA, quantized_matmul_arrays
from .blocks import block_space, bucket, default_blocks, vmem_bytes
from .packing import INT4_GROUP
from .weight import INT4_PER_WORD, VQ_LENGTH, WeightFormat


def quantized_case(
    format: WeightFormat,
    rows: int,
    width: int,
    columns: int,
    *,
    activations: Activations = "bfloat16",
    entries: int = 128,
    stages: int = 1,
) -> KernelCase:
    """Shapes of (rows, width) activations times a (width, columns) matrix in a format.

    Args:
        format: Of the matrix.
        rows: Of activations.
        width: What is summed over.
        columns: Of the matrix.
        activations: As they are multiplied.
        entries: Of a codebook.
        stages: Of codes.
    """
    shapes = {
        "int8": ((width, columns), jnp.int8),
        "fp8": ((width, columns), jnp.float8_e4m3fn),
        "int4": ((width // INT4_PER_WORD, columns), jnp.int32),
        "vq": ((stages, width // VQ_LENGTH, columns), jnp.uint8),
    }
    groups = width // INT4_GROUP if format == "int4" else 1
    arrays = [((rows, width), jnp.bfloat16), shapes[format], ((groups, columns), jnp.float32)]
    name = format
    if format == "vq":
        arrays.append(((stages, entries // LANES, LANES), jnp.int32))
        name = f"vq{stages}x{entries}"
    return KernelCase(
        f"{name}_{activations}_{rows}x{width}x{columns}",
        tuple(jax.ShapeDtypeStruct(*array) for array in arrays),
        {"format": format, "activations": activations},
    )


OP = Op(
    name=OP_NAME,
    function=quantized_matmul_arrays,
    implementations=IMPLEMENTATIONS,
    cases=(
        quantized_case("int8", 32, 512, 512),
        quantized_case("int8", 32, 512, 512, activations="int8"),
        quantized_case("int4", 32, 512, 512),
        quantized_case("fp8", 32, 512, 512),
        quantized_case("vq", 32, 512, 512),
        quantized_case("vq", 32, 512, 512, entries=256, activations="int8"),
        quantized_case("int8", 16, 4096, 14336),
        quantized_case("int4", 16, 4096, 14336),
        quantized_case("vq", 16, 4096, 14336),
        quantized_case("int4", 2048, 4096, 14336),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=XLA,
    bucket=bucket,
    splits=SPLITS,
)
