"""Published training runs as workloads we can compile; a row we cannot express says why."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

from tpukit import Slice, TransformerConfig, Workload, get_preset, list_presets
from tpukit.runtime.flags.bundles import select

QUANTIZED = "its products are quantized in a way that our step does not have"
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


class NotExpressible(Exception):
    """We cannot build the program of this row."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a results file, ready to be compiled."""

    name: str
    slice: Slice
    workload: Workload
    mesh: dict[str, int]
    dcn_mesh_shape: tuple[int, ...] | None
    options: dict[str, Any]
    step_time_s: float
    mfu: float
    model_flops: float
    peak_flops: float
    other_flops_per_token: float
    precision: str

    @property
    def option_sets(self) -> tuple[dict[str, Any], ...]:
        """The options to try; whoever published a run took the faster.

        Products cut into permutes pay or do not, depending on the compiler's version.
        """
        if self.mesh.get("tensor", 1) == 1:
            return (self.options,)
        return (self.options, {**self.options, **NO_COLLECTIVE_MATMUL})


def load_rows(path: Path, *, only: str | None = None) -> list[dict[str, Any]]:
    """The rows with a full configuration."""
    rows = json.loads(path.read_text())["results"]
    return [row for row in rows if row["config"] == "full" and (only is None or only in row["id"])]


def as_run(row: dict[str, Any], *, quantized: bool = False) -> PublishedRun:
    """The run of a row.

    Args:
        row: As the file has it.
        quantized: Take runs whose products have eight bits too; their workload has wide ones.

    Raises:
        NotExpressible: With the reason.
    """
    precision = (row["quantization"] or "bf16").split()[0].split("_")[0]
    if precision not in ("bf16", "int8", "fp8") or (precision != "bf16" and not quantized):
        raise NotExpressible(QUANTIZED)
    config = read_model(row)
    hardware, batch = row["hardware"], row["batch"]
    shape = hardware["topology"].split(" x ")[-1]
    target = Slice.of(hardware["gen"], topology=shape, num_slices=hardware["slices"])
    mesh, dcn = read_parallelism(row["parallelism"], target)
    sequence, examples = int(batch["seq_len"]), int(batch["global_seqs"])
    remat = read_remat(row["remat"])
    per_token = config.flops_per_token(sequence).total
    model_flops = per_token * examples * sequence
    peak = target.peak_tflops("bf16").require("a benchmark") * 1e12
    seconds = published_step_s(row, examples * sequence, target)
    return PublishedRun(
        name=row["id"],
        slice=target,
        workload=Workload(
            config,
            batch_size=examples,
            sequence_length=sequence,
            remat=remat,
            strategy=strategy_of(mesh),
            optimizer=read_optimizer(row["optimizer"]),
            attention="xla" if "plain" in (row["attention"] or "") else "splash",
        ),
        mesh=mesh,
        dcn_mesh_shape=dcn,
        options=read_options(row, target),
        step_time_s=seconds,
        mfu=model_flops / seconds / peak,
        model_flops=model_flops,
        peak_flops=peak,
        other_flops_per_token=other_flops_per_token(row, config),
        precision=precision,
    )


def read_model(row: dict[str, Any]) -> TransformerConfig:
    """The preset as the row ran it, or one of its family with the row's dimensions.

    Raises:
        NotExpressible: No preset is like it.
    """
    model, dims = row["model"], row["dims"]
    if model not in list_presets():
        if not model.startswith("maxtext2023-"):
            raise NotExpressible(f"no preset has the architecture of {model}")
        names = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim")
        return get_preset(
            "maxtext2023-16B", vocab_size=dims["vocab"], **{name: dims[name] for name in names}
        )
    capacity = re.search(r"capacity_factor ([\d.]+)", row["remat"])
    if capacity is None:
        return get_preset(row["model"])
    return get_preset(row["model"], routing="capacity", capacity_factor=float(capacity[1]))


def other_flops_per_token(row: dict[str, Any], config: TransformerConfig) -> float:
    """FLOPs of products that the published program makes and ours does not.

    MaxText's recipes look embeddings up by a product with a one-hot matrix (use_iota_embed), and
    its gradient. Its tiled vocabulary and tokamax's loss make the logits again in the backward
    pass. Its experts of fixed capacity get and give their rows by products with one-hot masks,
    two forward, three backward, and two again.
    """
    table = 2.0 * config.vocab_size * config.d_model
    if "linear-CE (tokamax)" in row["notes"]:
        return table
    if not row["framework"].startswith("MaxText"):
        return 0.0
    flops = 2 * table + (table if "num_vocab_tiling" in row["remat"] else 0.0)
    if config.routing == "capacity" and config.n_experts:
        rows = row["batch"]["seq_len"] * config.experts_per_token * config.capacity_factor
        flops += 7 * 2.0 * rows * config.d_model * config.n_layers
    return flops


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
    return options


def published_step_s(row: dict[str, Any], tokens: int, target: Slice) -> float:
    """The measured step: as printed, or from the printed rate."""
    measured = row["measured"]
    if measured["step_time_s"]:
        return measured["step_time_s"]
    if measured["tokens_per_s_per_chip"]:
        return tokens / measured["tokens_per_s_per_chip"] / target.chips
    flops = row["derived"].get("reported_flops_per_token")
    if flops is None:
        derived = row["derived"]
        convention = derived.get("flop_convention", "noncausal")
        flops = derived[f"flops_per_token_{convention}"]
    return flops * tokens / (measured["tflops_per_chip"] * 1e12 * target.chips)


def read_parallelism(text: str, target: Slice) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Mesh sizes by axis over all slices, and the part of each that crosses slices."""
    within: dict[str, int] = {}
    across: dict[str, int] = {}
    place = within
    for word, name, size in re.findall(r"\b(ici|dcn)\b|(\w+)=(\w+)", text):
        if word:
            place = within if word == "ici" else across
            continue
        axis = {"fsdp_transpose": "fsdp"}.get(name, name)
        if axis not in ("fsdp", "tensor", "data", "context"):
            raise NotExpressible(f"no strategy for an axis called {name}")
        place[axis] = place.get(axis, 1) * (-1 if size == "rest" else int(size))
    known = 1
    for size in within.values():
        known *= size if size > 0 else 1
    devices = target.devices // target.num_slices
    within = {axis: size if size > 0 else devices // known for axis, size in within.items()}
    names = [axis for axis in ("data", "fsdp", "context", "tensor") if axis in {**within, **across}]
    mesh = {axis: within.get(axis, 1) * across.get(axis, 1) for axis in names}
    dcn = tuple(across.get(axis, 1) for axis in names) if across else None
    return mesh, dcn


def strategy_of(mesh: dict[str, int]) -> str:
    """The strategy that uses every axis of the mesh."""
    parts = ["fsdp"]
    if mesh.get("tensor", 1) > 1:
        parts += ["megatron", "sequence"]  # as MaxText splits activations between blocks
    if mesh.get("context", 1) > 1:
        parts.append("context")
    return "+".join(parts)


def read_remat(text: str) -> str:
    """Our remat policy for a published description."""
    if text in ("full", "minimal"):
        return text
    if "nothing_saveable" in text or text == "remat, no scan, no offload":
        return "full"
    names = [name for name in ("decoder_layer_input", "mlpwo") if name in text]
    if "context" in text:
        names.append("attention")  # MaxText calls so what the kernel keeps for its backward pass
    if "q/k/v" in text or "qkv" in text:
        names.append("qkv_proj")
    if "out_proj" in text:
        names.append("out_proj")
    if not names:
        raise NotExpressible(f"the remat {text!r} is not described well enough")
    return f"{'offload' if 'offload' in text else 'save'}={','.join(names)}"


def read_optimizer(text: str) -> optax.GradientTransformation:
    """Our optimizer for a published description."""
    if "adafactor" in text:
        return optax.adafactor(5e-5)
    return optax.adamw(3e-4, mu_dtype="bfloat16" if "mu bf16" in text else None)
