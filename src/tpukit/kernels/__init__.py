"""Ops for TPU: one folder each, every one with a reference, a Pallas kernel and its gradient."""

# A function takes the name of its folder here, so it must be imported, not found on first use.
from ..rotary import RopeScaling as RopeScaling
from .blocks.tiling import BLOCK_SIZE as BLOCK_SIZE
from .blocks.tiling import MIN_PARALLEL_SIZE as MIN_PARALLEL_SIZE
from .blocks.tiling import from_blocked as from_blocked
from .blocks.tiling import pack_tiles as pack_tiles
from .blocks.tiling import pad_to_tiles as pad_to_tiles
from .blocks.tiling import to_blocked as to_blocked
from .blocks.tiling import unpack_tiles as unpack_tiles
from .blocks.tiling import unpad as unpad
from .blocks.tuned import use_tuned_blocks as use_tuned_blocks
from .custom_call import custom_call as custom_call
from .ops.cross_entropy.api import cross_entropy as cross_entropy
from .ops.cross_entropy.terms import CrossEntropy as CrossEntropy
from .ops.flash_attention.api import flash_attention as flash_attention
from .ops.flash_attention.spec import BlockMask as BlockMask
from .ops.gated_activation import gated_activation as gated_activation
from .ops.gated_delta.api import gated_delta as gated_delta
from .ops.gated_delta.api import gated_delta_step as gated_delta_step
from .ops.gated_delta.convolution import short_convolution as short_convolution
from .ops.gated_delta.convolution import short_convolution_step as short_convolution_step
from .ops.gated_mlp import gated_mlp as gated_mlp
from .ops.gemm import adaptive_matmul as adaptive_matmul
from .ops.gemm import gemm as gemm
from .ops.grouped_matmul.api import grouped_matmul as grouped_matmul
from .ops.layer_norm.api import layer_norm as layer_norm
from .ops.moe_gating import Gating as Gating
from .ops.moe_gating import moe_gating as moe_gating
from .ops.quantized_matmul.api import quantized_matmul as quantized_matmul
from .ops.quantized_matmul.weight import QuantizedWeight as QuantizedWeight
from .ops.quantized_matmul.weight import dequantize as dequantize
from .ops.quantized_matmul.weight import pack_fp8 as pack_fp8
from .ops.quantized_matmul.weight import pack_int4 as pack_int4
from .ops.quantized_matmul.weight import pack_int8 as pack_int8
from .ops.quantized_matmul.weight import pack_vq as pack_vq
from .ops.quantized_matmul.weight import quantize_weight as quantize_weight
from .ops.quantized_matmul.weight import unpack as unpack
from .ops.residual_norm import residual_norm as residual_norm
from .ops.rms_norm.api import rms_norm as rms_norm
from .ops.rope import rope as rope
from .ops.rope import rope_frequencies as rope_frequencies
from .ops.rope import rope_tables as rope_tables
from .partition.splits import Splits as Splits
from .precision import PrecisionConfig as PrecisionConfig
from .registry.dispatch import dispatch as dispatch
from .registry.dispatch import dispatch_with_gradient as dispatch_with_gradient
from .registry.op import Blocks as Blocks
from .registry.op import BlockSizes as BlockSizes
from .registry.op import KernelCase as KernelCase
from .registry.op import Op as Op
from .registry.registry import get_tpu_op as get_tpu_op
from .registry.registry import list_tpu_ops as list_tpu_ops
from .registry.registry import unregister_tpu_op as unregister_tpu_op
from .registry.user_kernel import TpuKernel as TpuKernel
from .registry.user_kernel import register_tpu_op as register_tpu_op
from .registry.user_kernel import tpu_kernel as tpu_kernel

__all__ = [
    "BLOCK_SIZE",
    "MIN_PARALLEL_SIZE",
    "BlockMask",
    "BlockSizes",
    "Blocks",
    "CrossEntropy",
    "Gating",
    "KernelCase",
    "Op",
    "PrecisionConfig",
    "QuantizedWeight",
    "RopeScaling",
    "Splits",
    "TpuKernel",
    "adaptive_matmul",
    "cross_entropy",
    "custom_call",
    "dequantize",
    "dispatch",
    "dispatch_with_gradient",
    "flash_attention",
    "from_blocked",
    "gated_activation",
    "gated_delta",
    "gated_delta_step",
    "gated_mlp",
    "gemm",
    "get_tpu_op",
    "grouped_matmul",
    "layer_norm",
    "list_tpu_ops",
    "moe_gating",
    "pack_fp8",
    "pack_int4",
    "pack_int8",
    "pack_tiles",
    "pack_vq",
    "pad_to_tiles",
    "quantize_weight",
    "quantized_matmul",
    "register_tpu_op",
    "residual_norm",
    "rms_norm",
    "rope",
    "rope_frequencies",
    "rope_tables",
    "short_convolution",
    "short_convolution_step",
    "to_blocked",
    "tpu_kernel",
    "unpack",
    "unpack_tiles",
    "unpad",
    "unregister_tpu_op",
    "use_tuned_blocks",
]
