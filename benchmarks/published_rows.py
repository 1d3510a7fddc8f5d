"""Published training runs, read from their recipes as workloads of this package."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from published_loss import blocked_loss, blocked_loss_of_narrow_head

from tpukit import Slice, TransformerConfig, Workload, get_preset, list_presets
from tpukit.errors import TPUError
from tpukit.runtime.flags.bundles import select


def narrow_scores(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Causal attention whose scores are rounded to the activations' format before the softmax.

    As `dot_product_attention` of AI-Hypercomputer/maxtext@28816574b (MaxText/layers/attentions.py)
    does without float32_logits, which is its default: half the bytes of scores in float32.
    """
    if window is not None or segment_ids is not None:
        raise ValueError("published runs with plain attention have neither windows nor segments")
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares.astype(v.dtype), v)


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


# Whose splash kernels: both have the same names, and only tokamax's were measured.
SplashMaker: TypeAlias = Literal["jax", "tokamax"]
# Whose grouped products: megablox's, which ours are like, or tokamax's.
GroupedMaker: TypeAlias = Literal["megablox", "tokamax"]
PRECISIONS = ("bf16", "int8", "fp8")
AXES = ("data", "fsdp", "zero", "expert", "context", "tensor")  # those that change least come last
# Presets by the names of MaxText's models and of published rows.
PRESETS = {
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek3-671b": "deepseek-v3",
    "deepseek-v3-671b": "deepseek-v3",
    "gemma4-2b": "gemma4-e2b",
    "gemma4-4b": "gemma4-e4b",
    "gemma4-26b": "gemma4-26b-a4b",
    "kimi-k2-1t": "kimi-k2",
    "llama4-17b-16e": "llama4-scout",
    "llama4-scout-17b-16e": "llama4-scout",
    "llama4-17b-128e": "llama4-maverick",
    "llama4-maverick-17b-128e": "llama4-maverick",
    "olmo3-7b-pt": "olmo3-7b",
    "qwen3-480b-a35b": "qwen3-coder-480b-a35b",
}
# MaxText's policies by name (MaxText/layers/decoders.py: get_remat_policy).
MAXTEXT_POLICIES = {
    "none": "none",
    "full": "full",
    "minimal": "minimal",
    "minimal_with_context": "save=qkv_proj,attention,out_proj,mlpwi,mlpwo",
    "minimal_offloaded": "offload=qkv_proj,out_proj,mlpwi,mlpwo",
    "save_dot_with_context_except_mlp": "save=qkv_proj,attention,out_proj",
    "save_dot_except_mlpwi": "save=qkv_proj,out_proj,mlpwo",
    "save_dot_except_mlp": "save=qkv_proj,out_proj",
    "save_qkv_proj": "save=qkv_proj",
    "save_out_proj": "save=out_proj",
    "qkv_proj_offloaded": "offload=qkv_proj",
}


class NotExpressible(Exception):
    """We cannot build the program of this row."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a results file, ready to be compiled.

    Attributes:
        source: The repository and revision it was published in: a log, or a table of results.
    """

    name: str
    source: str
    slice: Slice
    workload: Workload
    mesh: dict[str, int]
    dcn_mesh_shape: tuple[int, ...] | None
    options: dict[str, Any]
    step_time_s: float
    mfu: float
    model_flops: float
    peak_flops: float
    further_flops_per_token: float
    precision: str
    splash: SplashMaker
    grouped: GroupedMaker
    reduces_at_once: bool

    @property
    def option_sets(self) -> tuple[dict[str, Any], ...]:
        """The options to try; whoever published a run took the faster.

        Products cut into permutes pay or do not, depending on the compiler's version, and how early
        transfers to the host start depends on what else it takes for slow.
        """
        if self.mesh.get("tensor", 1) > 1:
            return (self.options, {**self.options, **NO_COLLECTIVE_MATMUL})
        if IRONWOOD_OFFLOAD_FLAGS.items() <= self.options.items():
            return (self.options, {**self.options, **TRANSFERS_FIRST})
        return (self.options,)


def load_rows(path: Path, *, only: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file whose id contains `only`."""
    rows = json.loads(path.read_text())["results"]
    return [row for row in rows if only is None or only in row["id"]]


def what_is_missing(row: dict[str, Any]) -> str:
    """Why nothing can be compiled of a row that states its configuration in part."""
    if not row.get("dims") or "d_ff" not in row["dims"]:
        return "it is no decoder, or its dimensions are not stated"
    if not (row.get("batch") or {}).get("global_seqs"):
        return "its batch is not stated"
    named = ("parallelism", "remat", "optimizer")
    missing = [name for name in named if not row.get(name)]
    missing += [] if row["hardware"].get("topology") else ["topology"]
    return f"stated in part: {row['notes'] or 'what is missing is not said'}" + (
        f" (no {', no '.join(missing)})" if missing else ""
    )


def as_run(row: dict[str, Any], *, quantized: bool = False) -> PublishedRun:
    """The run of a row.

    Args:
        row: As the file has it.
        quantized: Leave the workload's products wide where those of the run have eight bits, for
            arithmetic that is told of the precision.

    Raises:
        NotExpressible: With the reason.
    """
    if row["config"] != "full":
        raise NotExpressible(what_is_missing(row))
    precision = (row["quantization"] or "bf16").split()[0].split("_")[0]
    if precision not in PRECISIONS:
        raise NotExpressible(f"no step of ours has products in {row['quantization']!r}")
    config = read_model(row)
    if not quantized:
        config = config.replace(matmul=read_matmul(row, precision))
    target = read_slice(row["hardware"])
    # Two axes split every matrix of a dense model as one does.
    second = "zero" if config.has_experts else "fsdp"
    mesh, dcn = read_parallelism(row["parallelism"], target, second_fsdp=second)
    batch = row["batch"] or {}
    if not batch.get("seq_len") or not batch.get("global_seqs"):
        raise NotExpressible("its batch or sequence length is not given")
    sequence, examples = int(batch["seq_len"]), int(batch["global_seqs"])
    attention = read_attention(row, mesh)
    remat = read_remat(row["remat"])
    if row["framework"].startswith("MaxText") and all(k.n_experts for k in config.kinds.values()):
        # MaxText gives this name to what experts give row by row (layers/moe.py), not to their sum.
        remat = remat.replace("mlpwo", "expert_rows")
    per_token = config.flops_per_token(sequence).total
    model_flops = per_token * examples * sequence
    peak = target.peak_tflops("bf16").require("a benchmark") * 1e12
    seconds = published_step_s(row, examples * sequence, target)
    return PublishedRun(
        name=row["id"],
        source=row["source"].partition(":")[0],
        slice=target,
        workload=Workload(
            config,
            batch_size=examples,
            sequence_length=sequence,
            remat=remat,
            strategy=strategy_of(mesh),
            optimizer=read_optimizer(row),
            attention=attention,
            loss_chunks=read_loss_chunks(row),
            scan_layers="no scan" not in row["remat"],
        ),
        mesh=mesh,
        dcn_mesh_shape=dcn,
        options=read_options(row, target),
        step_time_s=seconds,
        mfu=model_flops / seconds / peak,
        model_flops=model_flops,
        peak_flops=peak,
        further_flops_per_token=further_flops_per_token(row, config),
        precision=precision,
        splash=read_splash(row),
        grouped=read_grouped(row),
        reduces_at_once=reduces_at_once(row),
    )


def read_slice(hardware: dict[str, Any]) -> Slice:
    """The slices a row ran on; its axes may be named in any order.

    Raises:
        NotExpressible: The topology is not given, or there is no such slice.
    """
    shape = (hardware.get("topology") or "").split(" x ")[-1]
    if not re.fullmatch(r"\d+(x\d+)+", shape):
        raise NotExpressible("its topology is not given")
    in_order = "x".join(sorted(shape.split("x"), key=int))
    reasons: list[str] = []
    for topology in dict.fromkeys((shape, in_order)):
        try:
            return Slice.of(
                hardware["gen"], topology=topology, num_slices=hardware.get("slices") or 1
            )
        except TPUError as reason:
            reasons.append(str(reason))
    raise NotExpressible(reasons[0])


def read_model(row: dict[str, Any]) -> TransformerConfig:
    """The preset as the row ran it, or one of its family with the row's dimensions.

    Raises:
        NotExpressible: No preset is like it.
    """
    model, dims = row["model"], row["dims"]
    of_maxtext = row["framework"].startswith("MaxText")
    changes: dict[str, Any] = {
        "param_dtype": read_weights(row),
        # MaxText's recipes set use_iota_embed.
        "embedding_lookup": "one_hot" if of_maxtext else "rows",
        # Its layers round weights inside the scan, which stacks gradients as wide as the weights.
        # Its own programs need 22.61, 11.31 and 23.64 GiB (llama3.1-8b on v6e-8 and -256, 70b);
        # ours 21.93, 10.78 and 23.99, and with narrow stacks 21.24, 10.75 and 22.69.
        "wide_gradients": of_maxtext and "grads bf16" not in (row["optimizer"] or ""),
    }
    model = PRESETS.get(model, model)
    if model not in list_presets():
        if not model.startswith("maxtext2023-"):
            raise NotExpressible(f"no preset has the architecture of {model}")
        names = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim")
        changes.update({name: dims[name] for name in names}, vocab_size=dims["vocab"])
        return get_preset("maxtext2023-16B", **changes)
    capacity = re.search(r"capacity_factor ([\d.]+)", row["remat"])
    if capacity is not None:
        changes.update(routing="capacity", capacity_factor=float(capacity[1]))
    config = get_preset(model, **changes)
    # Recipes leave out the groups that DeepSeek's router chooses from (its YAML says to set them).
    ungrouped = {"router_groups": 0, "router_groups_kept": 0}
    kinds = {
        name: {**changed, **(ungrouped if "router_groups" in changed else {})}
        for name, changed in config.layer_kinds.items()
    }
    return config.replace(layer_kinds=kinds) if of_maxtext else config


def read_matmul(row: dict[str, Any], precision: str) -> str:
    """Our products for those of a published run, all three of a layer rounded in MaxText.

    int8 is AQT's, which rounds for gradients of weights too (MaxText/layers/quantizations.py:
    drhs_bits, unless quantization_local_shard_count is 0; it is the number of slices where not
    set). fp8 is Qwix's, by constant scales where the recipe calibrates and by channels elsewhere.
    """
    if precision == "fp8":
        return "float8_static" if "fixed" in row["quantization"] else "float8_channels"
    return "int8_throughout" if precision == "int8" else "dtype"


def read_weights(row: dict[str, Any]) -> str:
    """The format weights are kept in between steps, and with them gradients and moments.

    The research log behind the "wk-" rows describes every set-up in the same words. The trainers
    beside its pages say otherwise: that of qwen3 keeps weights in bfloat16 (train.py:
    weights_dtype), and that of llama3 makes them in the computing format and widens only what it
    loads, which these runs do not (train.py: init_storage_dtype, load_pretrained_weights). The
    memory their pages state leaves no room for wider ones.
    """
    narrow = _own_trainer(row) or re.search(r"\b(bf16|bfloat16) weights", row["dtype"] or "")
    return "bfloat16" if narrow else "float32"


def _own_trainer(row: dict[str, Any]) -> str | None:
    """The model a trainer of that log was written for, if the run is one of its own."""
    found = re.search(r"/(qwen3|llama3)_\w+/jax/", row.get("source") or "")
    return found[1] if found else None


def read_attention(row: dict[str, Any], mesh: dict[str, int]) -> Any:
    """Plain attention as MaxText writes it, around the ring where sequences are cut, or splash.

    Raises:
        NotExpressible: It is torch_xla's. That runs the forward kernel once more for the gradients,
            and by its text on all keys where it is asked for those before (pytorch/xla,
            torch_xla/experimental/splash_attention.py: _jax_grad_f, wrap_flash_attention); with
            ours llama3.1-8b on v6e-256 would be predicted 13 % too fast.
    """
    if row["framework"].startswith("torchprime"):
        raise NotExpressible("its attention is torch_xla's, which our step does not have")
    if mesh.get("context", 1) > 1:
        return "ring"
    if "plain" in (row["attention"] or ""):
        return narrow_scores
    return "splash" if has_fused_backward(row) else "splash in two"


def read_splash(row: dict[str, Any]) -> SplashMaker:
    """Whose kernels a run's attention is.

    The log behind the "wk-" rows writes tokamax's everywhere; the page of its MaxText run says
    attention=flash, which is jax's in that release.
    """
    if "tpu-recipes-v0.1" in row["framework"]:
        return "jax"
    return "tokamax" if "tokamax" in (row["attention"] or "") else "jax"


def read_grouped(row: dict[str, Any]) -> GroupedMaker:
    """Whose kernels multiply a run's experts.

    Every recipe of MaxText for TPU7x that has experts sets use_tokamax_gmm (AI-Hypercomputer/
    tpu-recipes, training/ironwood); those for other chips do not.
    """
    of_maxtext = row["framework"].startswith("MaxText")
    return "tokamax" if of_maxtext and row["hardware"]["gen"] == "7x" else "megablox"


def read_loss_chunks(row: dict[str, Any]) -> Any:
    """MaxText makes all logits at once unless its recipe tiles the vocabulary."""
    if _own_trainer(row) == "llama3":
        return blocked_loss
    if "/qwen3_cc5_" in row["source"] and _own_trainer(row):
        return blocked_loss_of_narrow_head
    tiles = re.search(r"num_vocab_tiling=(\d+)", row["remat"])
    if tiles is not None:
        return int(tiles[1])
    return None if row["framework"].startswith("MaxText") else "auto"


def further_flops_per_token(row: dict[str, Any], config: TransformerConfig) -> float:
    """FLOPs of products that the published program makes and a planned one of ours does not.

    MaxText's tiled vocabulary and tokamax's loss make the logits again in the backward pass.
    MaxText's experts of fixed capacity get and give their rows by products with one-hot masks,
    two forward, three backward, and two again.
    """
    table = 2.0 * config.vocab_size * config.d_model
    if "linear-CE (tokamax)" in row["notes"]:
        return table
    if not row["framework"].startswith("MaxText"):
        return 0.0
    flops = table if "num_vocab_tiling" in row["remat"] else 0.0
    if config.routing == "capacity" and config.n_experts:
        rows = row["batch"]["seq_len"] * config.experts_per_token * config.capacity_factor
        flops += 7 * 2.0 * rows * config.d_model * config.n_layers
    return flops


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


def read_parallelism(
    text: str, target: Slice, *, second_fsdp: str
) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Mesh sizes by axis over all slices, and the part of each that crosses slices.

    Args:
        text: As the row says it.
        target: Where it ran.
        second_fsdp: Our axis for MaxText's fsdp_transpose.

    Raises:
        NotExpressible: We have no such axis, or the sizes are not those of the slice.
    """
    within: dict[str, int] = {}
    across: dict[str, int] = {}
    place = within
    for word, name, size in re.findall(r"\b(ici|dcn)\b|(\w+)=(-?\w+)", text):
        if word:
            place = within if word == "ici" else across
            continue
        axis = {"fsdp_transpose": second_fsdp, "dp": "data", "tp": "tensor", "ep": "expert"}.get(
            name, name
        )
        if axis not in AXES:
            raise NotExpressible(f"no strategy for an axis called {name}")
        place[axis] = place.get(axis, 1) * (int(size) if size.isdigit() else -1)
    known = 1
    for size in within.values():
        known *= size if size > 0 else 1
    devices = target.devices // target.num_slices
    within = {axis: size if size > 0 else devices // known for axis, size in within.items()}
    names = [axis for axis in AXES if axis in {**within, **across}]
    mesh = {axis: within.get(axis, 1) * across.get(axis, 1) for axis in names}
    if math.prod(mesh.values()) != target.devices:
        raise NotExpressible(f"{text!r} is not a mesh of the {target.devices} devices of {target}")
    dcn = tuple(across.get(axis, 1) for axis in names) if across else None
    return mesh, dcn


def strategy_of(mesh: dict[str, int]) -> str:
    """The strategy that uses every axis of the mesh."""
    parts = ["fsdp"]
    if mesh.get("tensor", 1) > 1:
        parts += ["megatron", "sequence"]  # as MaxText splits activations between blocks
    parts += [axis for axis in ("expert", "context") if mesh.get(axis, 1) > 1]
    return "+".join(parts)


def read_remat(text: str) -> str:
    """Our remat policy for a published description.

    Raises:
        NotExpressible: It does not say what is kept.
    """
    named = text.split(";")[0].strip()
    if named in MAXTEXT_POLICIES:
        return MAXTEXT_POLICIES[named]
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


def read_optimizer(row: dict[str, Any]) -> optax.GradientTransformation:
    """Our optimizer for a published description.

    Raises:
        NotExpressible: It is another one.
    """
    text = row["optimizer"]
    if "adafactor" in text:
        return optax.adafactor(5e-5)
    if "adam" in text:
        mean = "bfloat16" if "mu bf16" in text else None
        if _own_trainer(row) == "llama3":
            mean = "float32"  # train.py: master_dtype; the second moment follows the weights
        return optax.adamw(3e-4, mu_dtype=mean)
    if "sgd" in text:
        return optax.sgd(3e-4)
    raise NotExpressible(f"the optimizer {text!r} is not one we write here")
