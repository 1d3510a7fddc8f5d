"""Models: Hugging Face folders, quantized folders, checkpoints, compiled programs."""

import json
from pathlib import Path

import numpy as np

from .kinds import JSON_ATTACKS, command, kind


def _transformer_in(name):
    def read():
        from tpukit.job.model_source import load_model
        from tpukit.models.transformer.accounting import count_parameters

        config = load_model(name, {})
        count_parameters(config)
        config.parameter_shapes()
        json.dumps(config.to_dict())

    return read


_HUGGINGFACE = {
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {"n_routed_experts": 4, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 12, "n_group": 2,
        "topk_group": 1},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_num_value_heads": 4, "linear_value_head_dim": 8, "full_attention_interval": 4},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24,
        "attention_chunk_size": 8, "interleave_moe_layer_step": 2, "floor_scale": 8},
    "phi3": {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope",
             "short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0]}},
}  # fmt: skip
_USUAL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 1e4, "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def _every_config(_=None):
    for name in sorted(_HUGGINGFACE):
        yield _transformer_in(f"{name}.json")
    for name in ("llama", "deepseek_v3", "gemma3_text"):
        yield command("plan", f"{name}.json", "--tokens", "1e9", "--on", "v6e-4", "--no-verify")


def _damaged_configs():
    large = {"num_hidden_layers": 2**64}, {"num_hidden_layers": 2**62}, {"num_hidden_layers": 10**6}
    odd = {"decoder_sparse_step": 0}, {"num_attention_heads": 0}, {"hidden_size": 2**60}
    names = sorted(_HUGGINGFACE)
    for change in (*large, *odd, {"num_hidden_layers": "4"}, {"rope_scaling": 3}):
        for name in names:
            whole = {"model_type": name, **_USUAL, **_HUGGINGFACE[name], **change}
            yield f"{name}.json", json.dumps(whole).encode()
    for attack in JSON_ATTACKS:
        yield from ((f"{name}.json", attack) for name in names)


@kind("huggingface config", *_every_config(), known=list(_damaged_configs()))
def _huggingface_config(folder):
    for name, options in _HUGGINGFACE.items():
        whole = {"model_type": name, **_USUAL, **options}
        (folder / f"{name}.json").write_text(json.dumps(whole))


def _import(name):
    def read():
        from tpukit.models.huggingface.weights import import_huggingface

        import_huggingface(name)

    return read


@kind(
    "huggingface weights",
    _import("one"),
    _import("several"),
    known=[("several/model.safetensors.index.json", attack) for attack in JSON_ATTACKS[1::2]],
)
def _weights(folder):
    import jax

    from tpukit.models.adapters.transformer import TransformerAdapter
    from tpukit.models.huggingface.weights import export_huggingface

    config = _small()
    params = TransformerAdapter(config).init(jax.random.key(3)).params
    export_huggingface(params, config, folder / "one")
    export_huggingface(params, config, folder / "several", max_shard_bytes=4000)


def _load_quantized():
    from tpukit.quantization import load_quantized
    from tpukit.quantization.files.model_files import quantized_config

    quantized_config(Path("small"))
    load_quantized("small")


def _load_cache():
    from tpukit.models.presets import get_preset
    from tpukit.quantization.cache.codebooks import load_cache

    load_cache("kv", get_preset("tiny"))


@kind(
    "quantized folder",
    _load_quantized,
    _load_quantized,
    _load_cache,
    known=[
        (f"{name}.json", attack)
        for attack in JSON_ATTACKS
        for name in ("small/quantized", "small/quantized", "kv/kv_cache")
    ],
)
def _quantized(folder):
    import jax

    from tpukit.hardware.stored_formats import parse_cache_format
    from tpukit.models.adapters.transformer import TransformerAdapter
    from tpukit.models.generation.cache import CacheSpec
    from tpukit.models.presets import get_preset
    from tpukit.quantization import quantize_for_tpu, save_quantized
    from tpukit.quantization.cache.codebooks import save_cache

    config = get_preset("tiny", d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64,
                        vocab_size=64, n_layers=2, dtype="float32")  # fmt: skip
    params = TransformerAdapter(config).init(jax.random.key(3)).params
    made = quantize_for_tpu(config, 8, params=params)
    save_quantized(made, folder / "small", tokenizer="bytes")
    save_cache(CacheSpec(parse_cache_format("int8")), folder / "kv")


def _restore_checkpoint():
    from tpukit.training.checkpoint import TPUCheckpointer

    with TPUCheckpointer("checkpoints") as checkpointer:
        checkpointer.restore()


def _verify_checkpoint():
    from tpukit.training.checkpoint import TPUCheckpointer

    with TPUCheckpointer("checkpoints") as checkpointer:
        checkpointer.verify(20)


@kind(
    "checkpoint",
    *[_verify_checkpoint] * 5,
    _restore_checkpoint,
    known=[
        ("checkpoints/20/tpukit/process-00000-of-00001.json", attack) for attack in JSON_ATTACKS
    ],
)
def _checkpoint(folder):
    import jax.numpy as jnp

    from tpukit.training.checkpoint import TPUCheckpointer

    with TPUCheckpointer(folder / "checkpoints") as checkpointer:
        for step in (10, 20):
            params = {"w": jnp.full((16, 16), step), "b": jnp.arange(40.0)}
            checkpointer.save(step, params=params, data={"i": step})


def _read_program():
    from tpukit.compiler.dump import Listings
    from tpukit.compiler.hlo import count_collectives, count_operations, parse_hlo
    from tpukit.compiler.memory import read_memory
    from tpukit.compiler.program.lowered import ProgramFacts
    from tpukit.hardware import Slice

    texts = {name: Path(f"{name}.txt").read_text(errors="replace") for name in _LISTINGS}
    module = parse_hlo(texts["hlo"])
    count_operations(module)
    count_collectives(module)
    for computation in module.computations.values():
        for instruction in computation:
            _ = [(one.bytes, one.padded_bytes, str(one)) for one in instruction.shapes]
            _ = instruction.backend_config, instruction.called, instruction.estimated_cycles
    names = ("half_on_the_host", ("[0]", "[1]"), (1, 1), (), ())
    facts = ProgramFacts(*names, fingerprint="", source_fingerprint="")
    listings = Listings(texts["hlo"], texts["assignment"], texts["live_ranges"], devices="")
    read_memory(listings, facts=facts, target=Slice.parse("v6e-1"), fits=True)


_LISTINGS = ("hlo", "assignment", "live_ranges")
_LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], bf16[8,256])) -> (s32[], bf16[8,256]) {
  %p = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %w = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} constant({...})
  %dot = bf16[8,256]{1,0:T(8,128)(2,1)} dot(%x, %w), lhs_contracting_dims={1},
    rhs_contracting_dims={0}
  ROOT %out = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) tuple(%next, %dot)
}

%condition (p.1: (s32[], bf16[8,256])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: bf16[8,256]) -> bf16[8,256] {
  %a = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="text with )"}
  %zero = s32[]{:T(128)} constant(2)
  %state = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) while(%state), condition=%condition,
    body=%body
  %y = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  ROOT %sum = bf16[8,256]{1,0:T(8,128)(2,1)} all-reduce(%y), channel_id=1,
    replica_groups=[2,2]<=[4], to_apply=%add
}
"""


def _read_loop():
    from tpukit.compiler.hlo import (
        count_collectives,
        find_collective,
        matrix_flops,
        nested_matrix_flops,
        parse_hlo,
        trip_count,
    )

    module = parse_hlo(Path("loop.txt").read_text(errors="replace"))
    count_collectives(module)
    for computation in module.computations.values():
        for instruction in computation:
            _ = [(one.bytes, one.padded_bytes, str(one)) for one in instruction.shapes]
            matrix_flops(instruction, computation)
            nested_matrix_flops(instruction, module)
            find_collective(instruction, computation, module)
            if instruction.opcode == "while":
                trip_count(instruction, computation, module)


@kind("program listings", _read_program, _read_loop)
def _listings(folder):
    data = Path(__file__).parents[2] / "compiler/memory/data"
    for name in _LISTINGS:
        text = (data / f"host_computation_{name}.txt").read_text()
        (folder / f"{name}.txt").write_text(text)
    (folder / "loop.txt").write_text(_LOOP)


@kind("saved program", lambda: _read_saved(), known=[("program.zip", b"PK\x05\x06" + b"\0" * 18)])
def _saved_program(folder):
    import hashlib

    from tpukit.compiler.executable.file import ExecutableHeader, write_executable

    code = b"a program" * 20
    header = ExecutableHeader(
        name="f", platform="cpu", device_kind="cpu", slice=None, versions={"jax": "0.10.2"},
        host="", devices=((0,),), mesh_axes=(), arguments=(), results=(), code_bytes=len(code),
        checksum=hashlib.sha256(code).hexdigest(),
    )  # fmt: skip
    write_executable(folder / "program.zip", header, code)


def _read_saved():
    from tpukit.compiler.executable.file import read_executable, read_header

    read_header("program.zip").to_dict()
    read_executable(Path("program.zip"))


def _read_adapter():
    from tpukit.models.lora.peft_files import read_peft

    read_peft("adapter", _small())


@kind("adapter", _read_adapter)
def _adapter(folder):
    from tpukit.models.lora.peft_files import write_peft
    from tpukit.models.lora.spec import LoraSpec

    rank, config = 2, _small()
    path = next(name for name in config.parameter_shapes() if name.endswith("q_proj/kernel"))
    *stack, inputs, outputs = config.parameter_shapes()[path]
    thin = {"a": np.ones((*stack, inputs, rank)), "b": np.ones((*stack, rank, outputs))}
    for word in reversed(path.split("/")):
        thin = {word: thin}
    write_peft(thin, LoraSpec(rank=rank, alpha=4.0, targets=(path,)), config, folder / "adapter")


def _small():
    from tpukit.models.presets import get_preset

    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 16}
    return get_preset("tiny", **sizes, vocab_size=32, n_layers=2)
