"""Quantized weights packed from the formats' definitions, by nothing of ours."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


def pack_stream(values, bits):
    """Rows of whole numbers as int32 words: one long number in base two, the first lowest."""
    rows = []
    for row in values.tolist():
        number = sum(int(value) << (bits * place) for place, value in enumerate(row))
        words = -(-len(row) * bits // 32)
        rows.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(words)])
    return np.array(rows, np.uint32).view(np.int32)


def gptq(rng, outputs, inputs, *, bits=4, group=128, symmetric=True, order=None, version=1):
    """Tensors of a GPTQ weight and the float64 matrix (outputs, inputs) that they stand for."""
    groups = -(-inputs // group)
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    zeros = rng.integers(1, 2**bits, (groups, outputs))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.001, 0.02, (groups, outputs)).astype(np.float16)
    of_input = np.arange(inputs) // group if order is None else order
    matrix = np.empty((outputs, inputs))
    for column, g in enumerate(of_input):
        matrix[:, column] = (codes[:, column] - zeros[g]) * scales[g].astype(np.float64)
    tensors = {
        "qweight": pack_stream(codes, bits).T.copy(),
        "qzeros": pack_stream((zeros - (version == 1)) % 2**bits, bits),
        "scales": scales,
        "g_idx": of_input.astype(np.int32),
    }
    return tensors, matrix


def awq(rng, outputs, inputs, *, group=128):
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // group, outputs))
    scales = rng.uniform(0.001, 0.02, (inputs // group, outputs)).astype(np.float16)

    def packed(numbers):
        words = np.zeros((numbers.shape[0], outputs // 8), np.uint32)
        for column in range(outputs // 8):
            for place, which in enumerate(AWQ_ORDER):
                words[:, column] |= (numbers[:, 8 * column + which] << (4 * place)).astype(
                    np.uint32
                )
        return words.view(np.int32)

    spread = np.arange(inputs) // group
    matrix = (codes - zeros[spread]) * scales[spread].astype(np.float64)
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, matrix.T


def block_fp8(rng, outputs, inputs, *, block=(128, 128)):
    grid = (-(-outputs // block[0]), -(-inputs // block[1]))
    values = rng.normal(0, 50, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1e-4, 1e-3, grid).astype(np.float32)
    matrix = np.empty((outputs, inputs))
    for row in range(outputs):
        for column in range(inputs):
            scale = scales[row // block[0], column // block[1]]
            matrix[row, column] = float(values[row, column]) * float(scale)
    return {"weight": values, "weight_scale_inv": scales}, matrix


def mxfp4(rng, experts, outputs, inputs):
    """And the matrix as the model has it, (experts, inputs, outputs)."""
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
    scales = rng.integers(110, 135, blocks.shape[:-1]).astype(np.uint8)
    both = np.stack([blocks & 15, blocks >> 4], -1).astype(np.uint8)
    numbers = both.view(ml_dtypes.float4_e2m1fn).astype(np.float64).reshape(*scales.shape, 32)
    matrix = numbers * 2.0 ** (scales[..., None].astype(np.float64) - 127)
    return {"_blocks": blocks, "_scales": scales}, matrix.reshape(experts, outputs, -1).swapaxes(
        1, 2
    )


def nf4(rng, outputs, inputs, *, nested=True, block=64):
    codes = rng.integers(0, 16, outputs * inputs)
    packed = ((codes[0::2] << 4) | codes[1::2]).astype(np.uint8).reshape(-1, 1)
    count = -(-codes.size // block)
    state = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [outputs, inputs],
    }
    tensors = {"weight": packed, "weight.quant_map": NF4}
    if nested:
        inner = rng.integers(0, 256, count).astype(np.uint8)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.01, 0.02, -(-count // 256)).astype(np.float32)
        offset = 0.05
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            "weight.absmax": inner,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": table,
        }
        absmax = table[inner] * outer[np.arange(count) // 256] + np.float32(offset)
    else:
        absmax = rng.uniform(0.01, 0.1, count).astype(np.float32)
        tensors["weight.absmax"] = absmax
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    spread = absmax[np.arange(codes.size) // block].astype(np.float64)
    return tensors, (NF4[codes].astype(np.float64) * spread).reshape(outputs, inputs)


def int8_rows(rng, outputs, inputs):
    values = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    largest = rng.uniform(0.1, 1, outputs).astype(np.float32)
    scales = (largest / np.float32(127)).astype(np.float64)
    return {"weight": values, "SCB": largest}, values * scales[:, None]


class Tensors(dict):
    """A dictionary of tensors that reads like an open checkpoint."""

    def read(self, name):
        return self[name]


def named(prefix, tensors):
    return Tensors({prefix + name: tensor for name, tensor in tensors.items()})


def save(path, tensors):
    """A safetensors file, float8 included, which safetensors' own numpy writer has no name for."""
    plain = {n: t for n, t in tensors.items() if t.dtype not in _NARROW}
    if len(plain) == len(tensors):
        save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path)
        return
    header, data, at = {}, [], 0
    for name, tensor in tensors.items():
        kind = _NARROW.get(tensor.dtype) or _WIDE[tensor.dtype.name]
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {
            "dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(raw)],
        }  # fmt: skip
        data.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


_NARROW = {
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}
_WIDE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8", "int64": "I64"}
