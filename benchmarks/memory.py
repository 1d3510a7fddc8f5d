"""Predicted memory beside the compiler's, published programs' and processes' own, and LoRA steps.

python benchmarks/memory.py estimate
python benchmarks/memory.py verdicts
python benchmarks/memory.py host
python benchmarks/memory.py adapters
"""

import ctypes
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import PUBLISHED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "estimate",
        "the planner's memory model beside the compiler",
        options={
            "--only": {"default": "", "help": "part of a model's name"},
            "--experts": {"action": "store_true", "help": "cases with an expert axis alone"},
            "--lora": {"action": "store_true", "help": "cases of adapters alone"},
        },
    ),
    Subcommand(
        "verdicts",
        "memory verdicts beside those of published runs",
        options={
            "--results": {"type": Path, "default": PUBLISHED},
        },
    ),
    Subcommand(
        "host",
        "host memory of a save, a restore and an export",
        options={
            "--work": {"nargs": 4, "help": "one case in this process: what, model, folder, limit"},
            "--models": {"nargs": "+", "help": "200M, 370M, 600M; all by default"},
        },
    ),
    Subcommand(
        "adapters",
        "step time of LoRA training beside the compiled schedule",
        options={
            "--only": {"default": "", "help": "part of a case's name"},
            "--whole": {"action": "store_true", "help": "adapters whole on every device"},
        },
    ),
)

import numpy as np
from published_loss import loss_of_maxtext
from published_rows import (
    read_attention,
    read_loss_chunks,
    read_model,
    read_optimizer,
    read_options,
)

from tpukit import Slice, Workload, compile_for, configure_tpu_environment, get_preset
from tpukit.errors import TPUError
from tpukit.job import Job
from tpukit.job.step import build_step
from tpukit.models.lora import low_rank
from tpukit.parallel.sharding.layout import make_layout
from tpukit.parallel.sharding.strategy import strategy_for
from tpukit.planner.cost.candidates import PRECISIONS, Candidates, SliceMesh
from tpukit.planner.cost.memory_model import MeshRoles, estimate_memory_bytes, rounds_first
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.torus import place_axes
from tpukit.step import OptimizerSpec, build_optimizer
from tpukit.step import workload as workloads
from tpukit.step.optimizer_spec import state_bytes_per_parameter

ADAMW, INT8_MOMENTS = OptimizerSpec(), OptimizerSpec(moment_dtype="int8")
LION = OptimizerSpec(name="lion", moment_dtype="bfloat16")
ADAFACTOR = OptimizerSpec(name="adafactor")


@dataclass(frozen=True)
class Case:
    model: str
    slice: str
    per_device: int
    sequence: int
    remat: str = "full"
    tensor: int = 1
    fsdp: int = 8
    expert: int = 1
    microbatches: int = 1
    optimizer: OptimizerSpec = ADAMW
    lora: dict[str, Any] | None = None
    held_out: bool = False


QUERIES_AND_VALUES = {"rank": 64, "targets": ["q_proj", "v_proj"]}
FLOAT8_BASE, INT4_BASE = {"rank": 16, "base": "fp8"}, {"rank": 16, "base": "int4"}
KEEP_MOST = "save=qkv_proj,attention,out_proj,mlpwi"
CASES = (
    Case("llama3.2-1b", "v6e-8", 4, 2048),
    Case("llama3.2-1b", "v6e-8", 2, 2048, "minimal"),
    Case("llama3.2-1b", "v6e-8", 1, 2048, "none"),
    Case("mistral-7b", "v6e-8", 2, 4096),
    Case("llama3.1-8b", "v6e-8", 2, 2048),
    Case("llama3.1-8b", "v6e-8", 2, 8192),
    Case("llama3.1-8b", "v5p-16", 4, 8192),
    Case("llama3.1-8b", "v5p-16", 2, 4096, "minimal"),
    Case("llama3.1-8b", "v6e-16", 2, 8192, tensor=2),
    Case("qwen3-8b", "v6e-8", 4, 2048),
    Case("llama3.1-70b", "v6e-64", 1, 4096, fsdp=64),
    Case("mixtral-8x7b", "v6e-64", 1, 4096, fsdp=64),
    Case("llama3.1-8b", "v6e-8", 4, 2048, microbatches=2),
    Case("llama3.1-8b", "v6e-8", 2, 8192, "offload=decoder_layer_input"),
    Case("llama3.1-8b", "v5p-16", 1, 2048, "none"),
    Case("gemma3-12b", "v6e-16", 1, 4096, fsdp=16),
    Case("llama2-7b", "v5p-16", 4, 4096, "minimal"),
    Case("maxtext2023-16B", "v5p-32", 2, 2048, fsdp=16),
    Case("small-1b", "v5litepod-4", 2, 2048, fsdp=4),
    Case("llama3.1-8b", "v5p-16", 4, 8192, "save=attention"),
    Case("llama3.1-8b", "v5p-16", 2, 4096, KEEP_MOST),
    Case("qwen3-8b", "v5p-16", 1, 8192, KEEP_MOST),
    Case("qwen3-8b", "v5litepod-16", 1, 4096, fsdp=16, held_out=True),
    Case("llama2-70b", "v5p-128", 1, 4096, fsdp=64, held_out=True),
    Case("mistral-7b", "v6e-16", 2, 8192, "save=attention", fsdp=16, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=LION, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=ADAFACTOR, held_out=True),
    Case("llama3.1-8b", "v6e-8", 2, 8192, optimizer=INT8_MOMENTS, held_out=True),
    Case("llama3.1-8b", "v5p-16", 4, 8192, optimizer=INT8_MOMENTS, held_out=True),
    # Layers of several kinds: latent attention and a leading dense layer, sinks and windows, two
    # sizes of heads with embeddings of each layer, dense blocks beside experts, linear attention.
    Case("deepseek-v2-lite", "v5p-32", 2, 4096, fsdp=16, held_out=True),
    Case("gpt-oss-20b", "v5p-32", 2, 4096, fsdp=16),
    Case("gemma4-e4b", "v5p-16", 1, 4096, held_out=True),
    Case("gemma4-26b-a4b", "v5p-32", 2, 4096, fsdp=16),
    Case("gemma4-26b-a4b", "v6e-16", 2, 4096, fsdp=16),
    Case("gemma4-31b", "v5p-32", 2, 4096, fsdp=16, held_out=True),
    Case("qwen3-next-80b-a3b", "v5p-128", 1, 4096, fsdp=64),
    Case("gpt-oss-20b", "v5p-32", 2, 4096, fsdp=4, expert=4),
    Case("gpt-oss-120b", "v5p-128", 2, 4096, fsdp=16, expert=4, held_out=True),
    Case("deepseek-v2-lite", "v5p-32", 2, 4096, fsdp=4, expert=4),
    # Adapters alone trained, beside weights in bfloat16 or quantized.
    Case("llama3.2-1b", "v6e-8", 4, 2048, lora={"rank": 16}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int8"}),
    Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int4"}),
    Case("llama3.1-8b", "v6e-1", 1, 2048, fsdp=1, lora={"rank": 16, "base": "int4"}),
    Case("llama3.1-8b", "v5p-16", 4, 8192, lora=QUERIES_AND_VALUES),
    Case("qwen3-8b", "v6e-8", 1, 8192, "save=attention", lora=FLOAT8_BASE, held_out=True),
    Case("llama3.1-70b", "v6e-16", 1, 4096, fsdp=16, lora=INT4_BASE, held_out=True),
    Case("mistral-7b", "v5litepod-8", 1, 4096, lora={"rank": 32}, held_out=True),
)


def workload(case: Case, mesh: dict[str, int]) -> Workload:
    if case.lora is not None:
        job = Job(
            model=case.model,
            on=case.slice,
            mesh=mesh,
            batch_size=case.per_device * case.fsdp,
            sequence_length=case.sequence,
            remat=case.remat,
            train={"lora": case.lora},
        )
        return build_step(job, values=False).work
    return Workload(
        case.model,
        batch_size=case.per_device * case.fsdp * case.expert,
        sequence_length=case.sequence,
        remat=case.remat,
        strategy=strategy_for(mesh),
        microbatches=case.microbatches,
        optimizer=build_optimizer(case.optimizer, 3e-4),
    )


def measure(case: Case) -> tuple[float, float]:
    """Estimated and compiled bytes of one device."""
    beside = {"tensor": case.tensor, "expert": case.expert}
    mesh = {"fsdp": case.fsdp} | {axis: size for axis, size in beside.items() if size > 1}
    work = workload(case, mesh)
    compiled = compile_for(work, case.slice, mesh=mesh, until="memory", timeout_s=300)
    shape = shape_of(get_preset(case.model), work.lora)
    estimate = estimate_memory_bytes(
        shape,
        MeshRoles(fsdp=case.fsdp, tensor=case.tensor, expert=case.expert),
        per_device_batch=case.per_device,
        sequence_length=case.sequence,
        remat=case.remat,
        microbatches=case.microbatches,
        optimizer_bytes=state_bytes_per_parameter(case.optimizer, shape.trained_shapes),
        whole_copy=rounds_first(Slice.parse(case.slice).chip.name),
    )
    split = "  ".join(f"{k} {v / 2**30:.2f}" for k, v in estimate.to_dict().items())
    purposes = "  ".join(
        f"{k} {v / 2**30:.2f}" for k, v in compiled.memory.purposes.items() if v > 2**24
    )
    print(f"    model    {split}\n    compiler {purposes}", flush=True)
    return float(estimate.total), float(compiled.memory.total_bytes)


def run_estimate(options):
    """Compare the memory model with the compiler's own figure, on preset models.

    The compiler's figure is the total of its buffer assignment, the one its out-of-memory test
    uses. The amounts in the model were read off the reports of the cases that are not `held_out`;
    those that are were compiled afterwards and changed nothing.
    """
    configure_tpu_environment()
    errors: dict[tuple[bool, bool], list[float]] = {}
    for case in CASES:
        named = options.only in case.model and (case.expert > 1 or not options.experts)
        if not named or (options.lora and case.lora is None):
            continue
        try:
            estimated, compiled = measure(case)
        except TPUError as error:
            print(f"{case}: {error}")
            continue
        off = estimated / compiled - 1
        errors.setdefault((case.lora is not None, case.held_out), []).append(abs(off))
        print(
            f"{case.model:<14} {case.slice:<8} experts on {case.expert} "
            f"batch {case.per_device} x {case.sequence} "
            f"{case.remat:<8} {case.optimizer.name} {case.optimizer.moment_dtype} "
            f"{'' if case.lora is None else f'lora {case.lora} '}"
            f"model {estimated / 2**30:6.2f}  compiler {compiled / 2**30:6.2f} GiB "
            f"{100 * off:+.1f} %{'  held out' if case.held_out else ''}",
            flush=True,
        )
        key = f"hbm_{case.model}_{case.slice}"
        what = (
            f"HBM of {case.model} on {case.slice}, {case.per_device} x {case.sequence} per device"
        )
        if options.only:
            kind = {"compares": "compiler : compiler", "sample": "none"}
            report(Result(what, compiled / 2**30, "", key=key, form=".1f", **kind))
    for (adapters, held_out), some in errors.items():
        which = "held-out cases" if held_out else "cases it was made from"
        which += " of adapters" if adapters else ""
        median, largest = 100 * statistics.median(some), 100 * max(some)
        key = f"{'lora' if adapters else 'model'}_{'held_out' if held_out else 'fitted'}"
        if options.only:
            key += f"_{options.only}"
        report(
            Result(f"memory model, median error, {len(some)} {which}", median, "%"),
            Result(
                f"memory model, largest error, {len(some)} {which}",
                largest,
                "%",
                at_most=10,
                key=f"{key}_largest",
                form=".1f",
                compares="model : compiler",
                sample="out" if held_out else "in",
            ),
        )


OFFLOAD = "offload=decoder_layer_input,qkv_proj,out_proj"
TARGET = Slice.parse("v6e-8")
MESH = {"fsdp": 8}

# What each point keeps; one whose model no preset has is missing.
REMATS = {
    "mem-ll8-jax-v6e8-bs7": "full",
    "mem-ll8-jax-v6e8-bs4-saveqkv": "save=qkv_proj",
    "mem-q8-mt-v6e8-2k-bs24": OFFLOAD,
    "mem-q8-jax-v6e8-8k-bs3-saveattn": "save=qkv_proj,context",
    "tri-llama3.1-8b-v6e-8": OFFLOAD,
}
# The Trillium recipe of llama3.1-8b ran on v6e-8; MaxText's own program needs 22.61 GiB.
RECIPE: dict[str, Any] = {
    "id": "tri-llama3.1-8b-v6e-8",
    "model": "llama3.1-8b",
    "seq": 8192,
    "per_device": 3,
    "used_gib": 22.61,
    "source": "/maxtext/",
}


def run_verdicts(options):
    """Memory verdicts against published runs: what did not fit must not fit, what ran must fit.

    Each point is compiled as it was published, read as rows with a step time are
    (published_rows.py): its remat, its loss, its optimizer, the format of its weights and
    gradients, its recipe's flags.
    """
    configure_tpu_environment()
    points = json.loads(options.results.read_text())["memory_points"]
    cases = [one for one in points if one["id"] in REMATS]
    for point in points:
        if point["id"] not in REMATS:
            print(f"left out {point['id']}: no preset has its architecture")
    agreed, ratios = 0, list[float]()
    for point in [*cases, RECIPE]:
        ran = point is RECIPE
        fits, gib = needs(point)
        agreed += fits == ran
        used = point.get("used_gib") or point.get("cap_gib", 0) + point.get("over_gib", 0)
        ratios.append(gib / used)
        said = f"{'ran' if ran else 'did not fit'} ({used:.2f} GiB)"
        verdict = f"{'fits' if fits else 'does not fit'} ({gib:.2f} GiB, {gib / used:.2f}x)"
        print(f"{point['id']:<34} published {said:<26} ours {verdict}", flush=True)
    report(
        Result(
            "memory verdicts of published runs that agree",
            (agreed, len(cases) + 1),
            at_least=len(cases) + 1,
            key="verdicts",
            form=".0f",
            joint=" of ",
            compares="compiler : published",
            sample="none",
        ),
        Result("most HBM beside the published program", max(ratios), "x", at_most=1.1),
    )


def needs(point: dict[str, Any]) -> tuple[bool, float]:
    """Whether our program of a point fits, and how much HBM it needs."""
    of_maxtext = "/maxtext/" in point["source"]
    row: dict[str, Any] = {
        **point,
        "framework": "MaxText" if of_maxtext else "",
        "remat": point.get("remat") or "",
        "dims": {},
        "dtype": "",
        "optimizer": "adamw",
        "attention": "splash, fused backward",
        "notes": "",
    }
    work = Workload(
        read_model(row),
        batch_size=8 * int(point["per_device"]),
        sequence_length=int(point["seq"]),
        remat=REMATS[point["id"]],
        optimizer=read_optimizer(row),
        attention=read_attention(row, MESH),
        loss=loss_of_maxtext if of_maxtext else None,
        loss_chunks=read_loss_chunks(row),
    )
    compiled = compile_for(
        work, TARGET, mesh=MESH, until="memory", options=read_options(row, TARGET)
    )
    return compiled.fits, compiled.memory.total_bytes / 2**30


MODELS = {  # layers, width, vocabulary
    "200M": (8, 1024, 32_000),
    "370M": (20, 1024, 16_000),
    "600M": (8, 2048, 16_000),
}
DEVICES = (1, 8)
AT_ONCE_BYTES = (4 * 10**9, 600 * 10**6)  # the default, and a few arrays at a time
FILE_BYTES = (5 * 10**9, 500 * 10**6)  # the default, and several files
WITHIN, LEAST = 1.15, 0.95


def config_of(name: str) -> Any:
    """A reference transformer of that size."""
    from tpukit.models import TransformerConfig

    layers, width, vocabulary = MODELS[name]
    return TransformerConfig(
        n_layers=layers,
        d_model=width,
        n_heads=width // 64,
        n_kv_heads=width // 64,
        d_ff=4 * width,
        vocab_size=vocabulary,
        max_seq_len=1024,
    )


def placed(config: Any) -> dict[str, Any]:
    """Shapes of the parameters, sharded over all devices; moments would be more of the same."""
    import jax

    from tpukit import create_mesh
    from tpukit.step import Workload

    mesh = create_mesh(mesh_shape=(jax.device_count(),), axis_names=("fsdp",))
    state, _ = Workload(config, batch_size=8, sequence_length=128).abstract_args(mesh)
    return {"params": state.params}


def share_of(state: Any) -> Any:
    """The same state as the prediction sees it."""
    import jax

    from tpukit.step.host_memory import HostShare, StoredArray

    def stored(leaf: Any, *, is_parameter: bool) -> StoredArray:
        pieces = len({str(at) for at in leaf.sharding.devices_indices_map(leaf.shape).values()})
        n_bytes = leaf.size * leaf.dtype.itemsize
        return StoredArray(n_bytes, jax.device_count() // pieces, is_parameter)

    arrays = [
        stored(leaf, is_parameter=name == "params")
        for name, tree in state.items()
        for leaf in jax.tree.leaves(tree)
    ]
    return HostShare(tuple(arrays), jax.device_count(), 1)


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def growth(action: Callable[[], object]) -> int:
    """By how much resident memory grows while an action runs, at its highest."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    kept = action()
    highest = memory("VmHWM")
    del kept
    return highest - before


def work(mode: str, name: str, folder: str, limit: int) -> dict[str, int]:
    """Do one of the three in this process: bytes predicted and measured."""
    import jax
    import numpy as np

    from tpukit.models.huggingface.weights import export_huggingface
    from tpukit.step.host_memory import HELD_WHILE_READ
    from tpukit.training.checkpoint import TPUCheckpointer, orbax_arrays

    handler = orbax_arrays.ocp.PyTreeCheckpointHandler
    # As on a GPU. A TPU's arrays are copied to the host too, a CPU's would be used as they are.
    orbax_arrays.ocp.PyTreeCheckpointHandler = partial(handler, enable_pinned_host_transfer=True)
    config = config_of(name)
    state = placed(config)
    share = share_of(state)
    small = {"w": np.ones(4, np.float32)}
    with tempfile.TemporaryDirectory() as warm, TPUCheckpointer(warm) as first:
        first.save(1, params=small)
        first.restore(like={"params": small})
    at_once = limit if mode == "restore" else AT_ONCE_BYTES[0]
    with TPUCheckpointer(folder, read_at_once_bytes=at_once) as checkpointer:
        if mode == "save":
            filled = jax.block_until_ready(jax.tree.map(random_like, state))
            predicted = share.saved_bytes
            measured = growth(lambda: (checkpointer.save(1, **filled), checkpointer.wait()))
        elif mode == "restore":
            # Beside it the state itself, which elsewhere is in the memory of the devices.
            predicted = share.restored_bytes + HELD_WHILE_READ * share.under_way_bytes(at_once)
            measured = growth(lambda: checkpointer.restore(like=state))
        else:
            predicted = share.exporting_bytes(limit)
            saved = checkpointer.open().arrays
            with tempfile.TemporaryDirectory() as out:
                measured = growth(
                    lambda: export_huggingface(saved, config, out, max_shard_bytes=limit)
                )
    return {"predicted": predicted, "measured": measured}


def random_like(leaf: Any) -> Any:
    """Values that take memory, where zeros might not."""
    import jax
    import numpy as np

    values = np.random.default_rng(0).random(leaf.shape, np.float32).astype(leaf.dtype)
    return jax.device_put(values, leaf.sharding)


def run(mode: str, name: str, folder: str, *, devices: int = 1, limit: int = 0) -> float:
    """One process; prints its line and returns predicted over measured."""
    command = [sys.executable, __file__, "host", "--work", mode, name, folder, str(limit)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    ratio = found["predicted"] / found["measured"]
    what = f"{mode} {name}, {devices} devices" + (f", limit {limit / 1e9:g} GB" if limit else "")
    gigabytes = " : ".join(f"{found[key] / 1e9:.3f}" for key in ("predicted", "measured"))
    print(f"{what:42} predicted : measured  {gigabytes} GB  {ratio:.3f}", flush=True)
    return ratio


def run_host(options):
    """Host memory of a save, a restore and an export: predicted beside what processes take.

    Each is done in a process of its own on models of several sizes in float32, and the growth of
    its resident memory at the highest moment (VmHWM, reset before) is read from Linux. On a CPU a
    device's memory is the host's. So a save is made to copy what it writes, as it must from any
    other device, and a restore leaves the state itself beside what is under way.

    Targets: a host that is said to hold a job must hold it, so predicted is at least 95 % of
    measured; and at most 115 % of it. What a restore has under way is a limit that is set, and how
    much of it is used depends on how fast the machine reads: there the second target is not to be
    had.
    """
    if options.work:
        mode, name, folder, limit = options.work
        print(json.dumps(work(mode, name, folder, int(limit))))
        return
    ratios: dict[str, list[float]] = {"save": [], "restore": [], "export": []}
    for name in options.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            ratios["save"].append(run("save", name, folder))
            ratios["restore"] += [
                run("restore", name, folder, devices=devices, limit=limit)
                for devices, limit in itertools.product(DEVICES, AT_ONCE_BYTES)
            ]
            ratios["export"] += [run("export", name, folder, limit=limit) for limit in FILE_BYTES]
    for mode, found in ratios.items():
        most = None if mode == "restore" else WITHIN
        report(
            Result(f"{mode}: predicted over measured, median", statistics.median(found), ""),
            Result(
                f"host memory of a {mode}, predicted : measured",
                (min(found), max(found)),
                at_most=most,
                key=f"host_{mode}",
                form=".3f",
                compares="model : measured",
                sample="none" if mode == "save" else "in",
            ),
            Result(f"{mode}: predicted over measured, least", min(found), "", at_least=LEAST),
        )


COMPILE_S = 900
EVERYWHERE = [("", ())]
ADAPTERS_CASES = {
    "llama3.1-8b in bf16": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16}),
    "llama3.1-8b in int8": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int8"}),
    "llama3.1-8b in int4": Case("llama3.1-8b", "v6e-8", 2, 8192, lora={"rank": 16, "base": "int4"}),
    "llama3.1-8b, q and v": Case("llama3.1-8b", "v6e-8", 2, 8192, lora=QUERIES_AND_VALUES),
    "llama3.1-70b in int4": Case(
        "llama3.1-70b", "v6e-16", 1, 4096, fsdp=16, lora={"rank": 16, "base": "int4"}
    ),
    "llama3.2-1b on v5e": Case("llama3.2-1b", "v5litepod-8", 4, 2048, lora={"rank": 16}),
}


def counted_s(case: Case) -> float:
    """Seconds of the step by arithmetic."""
    slice, sizes = Slice.parse(case.slice), {"fsdp": case.fsdp}
    candidate = Candidates(
        meshes=(SliceMesh(slice, sizes, place_axes(slice, sizes)),),
        mesh=np.zeros(1, int),
        batch=np.asarray([case.per_device]),
        microbatches=np.ones(1, int),
        remat=np.zeros(1, int),
        precision=np.asarray([PRECISIONS.index("bf16")]),
        optimizer=np.zeros(1, int),
        remats=(case.remat,),
    )
    lora = workload(case, sizes).lora
    shape = shape_of(get_preset(case.model), lora)
    found = score(shape, candidate, sequence_length=case.sequence)
    return float(found.step_time_s[0])


def scheduled_s_and_gib(case: Case) -> tuple[float, float]:
    """Return seconds of the step by the compiled schedule, and GiB per device by the compiler."""
    mesh = {"fsdp": case.fsdp}
    compiled = compile_for(
        workload(case, mesh), case.slice, mesh=mesh, until="schedule", timeout_s=COMPILE_S
    )
    return compiled.predict().step_time_s, compiled.memory.total_bytes / 2**30


def lay_whole() -> None:
    """Have every device hold all adapters, and gather none."""
    workloads.lora_layout = lambda params, base: make_layout(
        params, base.mesh, None, rules=EVERYWHERE
    )
    low_rank.constrain = lambda x, *axes: x


def run_adapters(options):
    """Compare the planner's step time of LoRA training with the compiled schedule's.

    Both are of the same step: the one that `tpukit train` runs with `train: {lora: …}`. No rate
    was fitted to any of them. With `--whole` adapters lie whole on every device instead of being
    cut like their weights: what cutting them saves and costs is the difference.
    """
    configure_tpu_environment()
    if options.whole:
        lay_whole()
    placed = "whole on every device" if options.whole else "split like their weights"
    end = "_whole" if options.whole else ""
    kind = {"compares": "model : model", "sample": "out"}
    offs: dict[str, list[float]] = {}
    for name, case in ADAPTERS_CASES.items():
        if options.only not in name:
            continue
        counted = counted_s(case)
        scheduled, gib = scheduled_s_and_gib(case)
        print(f"{name:<22} {case.slice:<12} arithmetic {counted:.3f} s, schedule {scheduled:.3f} s")
        off = 100 * (counted / scheduled - 1)
        offs.setdefault(f"{case.model}_{case.slice}", []).append(off)
        key = f"lora_{name.replace(', ', ' ').replace(' ', '_')}{end}"
        memory = {"compares": "compiler : compiler", "sample": "out"}
        report(
            Result(
                f"HBM per device of {name}, LoRA {placed}",
                gib,
                "GiB",
                key=f"{key}_gib",
                form=".1f",
                **memory,
            ),
            Result(
                f"step of {name}, LoRA {placed}", scheduled, "s", key=f"{key}_s", form=".2f", **kind
            ),
        )
        if not options.whole:
            report(Result(f"adapters, step by arithmetic over the schedule's, {name}", off, "%"))
    for case_name, some in offs.items():
        if not options.whole:
            away = sorted(abs(off) for off in some)
            report(
                Result(
                    f"LoRA steps of {case_name.replace('_', ' on ')} by arithmetic, off schedule",
                    (away[0], away[-1]),
                    "%",
                    key=f"lora_off_{case_name}",
                    form=".3g" if len(away) == 1 else ".0f",
                    **kind,
                )
            )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        estimate=run_estimate,
        verdicts=run_verdicts,
        host=run_host,
        adapters=run_adapters,
    )
