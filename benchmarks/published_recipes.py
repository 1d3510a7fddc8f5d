"""The compiler options of published runs: what their recipes set, where that is known."""

from typing import Any

from tpukit import Slice
from tpukit.runtime.flags.bundles import select

# What the published Trillium recipes set beyond our level 3 (AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py): all-gathers fused with compute, and host transfers overlapped.
TRILLIUM_FLAGS = {
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_max_concurrent_host_send_recv": 100,
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
}
NO_COLLECTIVE_MATMUL = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
# Collectives on the SparseCores, where a run says so (the same file); all-gathers as well unless
# the run names the others alone.
SPARSE_CORE_FLAGS = {
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_enable_instruction_fusion": False,
    **{
        f"xla_tpu_enable_async_collective_fusion_fuse_{kind}": False
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    },
    **{
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    },
}
# What the Ironwood recipes with host offload set beyond it (AI-Hypercomputer/tpu-recipes,
# training/ironwood/{deepseek3-671b,gpt-oss-120b}) for the scheduler: nothing keeps recomputed
# layers apart from what they wait for, more memory may be used, and the host link is taken for
# slow, so that transfers start early. Their scheduler that goes layer by layer is left out: with
# it gpt-oss-120b had no schedule after half an hour of a busy machine. The rest of their lists
# changes nothing: without it the program is the same to the byte.
IRONWOOD_OFFLOAD_FLAGS: dict[str, Any] = {
    "xla_tpu_aggressive_opt_barrier_removal": "enabled",
    "xla_tpu_scheduler_percent_shared_memory_limit": 150,
    "xla_tpu_pcie_bandwidth_multiplier": 0.03,
}
# What that means with libtpu 0.0.42.1. It takes every call of the SparseCores for 5e9 cycles, more
# than twice what 1.9 GB take at 0.03 of the link, so that such transfers are the last to start. At
# a hundredth of that they are the first again, as far as there is memory for it.
TRANSFERS_FIRST: dict[str, Any] = {
    "xla_tpu_scheduler_percent_shared_memory_limit": 100,
    "xla_tpu_pcie_bandwidth_multiplier": 0.0003,
}
# What MaxText's scripts of 2023 set (MaxText/configs/largest_job for v5e, v5p, 1xv4-128.sh).
MAXTEXT_2023_FLAGS: dict[str, dict[str, Any]] = {
    "v4": {"xla_enable_async_all_gather": True},
    "v5e": dict.fromkeys(
        (
            "xla_tpu_enable_data_parallel_all_reduce_opt",
            "xla_tpu_data_parallel_opt_different_sized_ops",
            "xla_tpu_enable_async_collective_fusion",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            "xla_tpu_overlap_compute_collective_tc",
            "xla_enable_async_all_gather",
        ),
        True,
    ),
}
MAXTEXT_2023_FLAGS["v5p"] = {
    **MAXTEXT_2023_FLAGS["v5e"],
    "xla_tpu_megacore_fusion_allow_ags": False,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
}


# MaxText's recipes that compute both gradients of attention in one kernel, which its default
# (sa_use_fused_bwd_kernel: False) does not (benchmarks/maxtext_trillium_model_configs.py).
FUSED_BACKWARD = ("llama3.1-8b", "llama3.1-70b", "mistral-7b")


def has_fused_backward(row: dict[str, Any]) -> bool:
    """Whether a run's attention kernel computes scores once in the backward pass, not twice."""
    text = row["attention"] or ""
    if not row["framework"].startswith("MaxText") or "fused" in text or "tokamax" in text:
        return True
    return row["hardware"]["gen"] == "v6e" and row["model"] in FUSED_BACKWARD


# Recipes for TPU7x whose reductions go over several axes of the torus at once: they set
# xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter, with and without which libtpu
# 0.0.42.1 makes the same program. Those of llama3.1-70b do not, or switch it off.
REDUCES_AT_ONCE = ("deepseek3-671b", "gpt-oss-120b", "gemma4-31b")


def reduces_at_once(row: dict[str, Any]) -> bool:
    """Whether a run's recipe asks for reductions over all axes at once."""
    return row["hardware"]["gen"] == "7x" and row["model"] in REDUCES_AT_ONCE


def read_options(row: dict[str, Any], target: Slice) -> dict[str, Any]:
    """The compiler options of a run: its recipe's where known, else our third level."""
    generation = target.chip.name
    if "2023" in row["framework"] and generation in MAXTEXT_2023_FLAGS:
        return dict(MAXTEXT_2023_FLAGS[generation])
    if "before flag stack" in row["notes"]:
        return {}
    chosen, _ = select(3, generation)
    options = {name: flag.value for name, flag in chosen.items()}
    if generation == "v6e":
        options.update(TRILLIUM_FLAGS)
        if target.chips_per_slice <= 32:
            options.update(NO_COLLECTIVE_MATMUL)
        if "SparseCore" in row["notes"] or "SC offload" in row["notes"]:
            options.update(SPARSE_CORE_FLAGS)
            gathers = "RS+AR" not in row["notes"]
            options["xla_tpu_enable_sparse_core_collective_offload_all_gather"] = gathers
    if generation == "7x" and "offload" in (row.get("remat") or ""):
        options.update(IRONWOOD_OFFLOAD_FLAGS)
    if "no scan" in (row.get("remat") or ""):
        # Unrolled layers are recomputed only because barriers keep their copies apart.
        options.pop("xla_tpu_aggressive_opt_barrier_removal", None)
    return options
