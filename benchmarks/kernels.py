"""Estimated times, bundles and bytes of our TPU kernels, without a TPU.

python benchmarks/kernels.py estimate
python benchmarks/kernels.py keep
python benchmarks/kernels.py tuned
python benchmarks/kernels.py bundles
python benchmarks/kernels.py norm-bytes
python benchmarks/kernels.py gated-delta
python benchmarks/kernels.py grouped-fp8
"""

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from harness import DATA, MODELLED, Result, Subcommand, read_command_line, report, run_command

TIMINGS = DATA / "kernel_timings.json.gz"
CHIPS = "v5e,v5p,v6e,7x"

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "estimate",
        "estimates of `tpukit kernel bench` beside measured kernels",
        options={
            "--timings": {"type": Path, "default": TIMINGS, "help": "measured rows"},
            "--only": {"action": "append", "default": [], "help": "rows of this op; repeat"},
            "--on": {"action": "append", "default": [], "help": "rows of this chip; repeat"},
            "--limit": {"type": int, "default": 3, "help": "cases of each op and chip"},
            "--all": {"action": "store_true", "help": "every row: hours the first time"},
        },
    ),
    Subcommand(
        "keep",
        "keep compiled facts of measured programs for the test suite",
        options={
            "--timings": {"type": Path, "default": TIMINGS, "help": "measured rows"},
            "--limit": {"type": int, "default": 2, "help": "cases of each op that XLA makes"},
            "--write": {"action": "store_true", "help": "into compiled_rows.json.gz of the suite"},
        },
    ),
    Subcommand(
        "tuned",
        "shipped blocks beside those that `tpukit kernel tune` finds",
        options={
            "--tune": {"action": "store_true", "help": "tune and write; else only show"},
            "--ops": {"help": "separated by commas; all that are shipped by default"},
            "--cases": {"help": "of those ops; all that are shipped by default"},
            "--chips": CHIPS,
            "--seconds": {"type": float, "help": "for each case and generation, at most"},
        },
    ),
    Subcommand(
        "bundles",
        "bundles of every op's kernels on every generation",
        options={
            "ops": {"nargs": "*", "help": "ops to count; all by default"},
            "--write": {"action": "store_true", "help": "keep the counts"},
        },
    ),
    Subcommand("norm-bytes", "bytes that residual norm reads and writes"),
    Subcommand(
        "gated-delta",
        "the gated delta rule beside XLA",
        options={
            "--chips": "v5p,v6e,7x",
            "--cases": "1x4096,1x8192,4x4096",
            "--passes": "forward,backward,both",
        },
    ),
    Subcommand(
        "grouped-fp8",
        "grouped matmuls of experts in fp8",
        options={
            "--chips": "7x",
            "--cases": "mixtral_8x7b,qwen3_30b_a3b,deepseek_v3_16_experts",
        },
    ),
)

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import tpukit
from tpukit import configure_tpu_environment
from tpukit.errors import TPUError
from tpukit.hardware import get_chip
from tpukit.kernels.registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op

LEAST_SPEARMAN, MOST_ERROR, LEAST_NAMED = 0.9, 0.25, 0.9
LEAST_CASES = 5  # fewer say little of a rank


def run_estimate(options):
    """Score the estimates of `tpukit kernel bench` on measured kernels.

    A row takes seconds to a minute the first time. Compiles are kept, so a stopped run continues
    where it was.
    """
    configure_tpu_environment()  # or jax would look for a TPU in this process
    from measured_kernels import read_timings, score_timings

    score = score_timings(
        read_timings(options.timings),
        ops=options.only,
        chips=[get_chip(name).name for name in options.on],
        limit=None if options.all else options.limit,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    Console(width=140).print(score)
    report(*claims(score))
    return 0


def claims(score) -> list[Result]:
    """The figures that have a target: of groups with enough cases, and who is faster."""
    made: list[Result] = []
    for group in score.groups:
        if group.cases < LEAST_CASES or group.spearman is None:
            continue
        name = f"{group.op} on {group.chip}, {group.rows} rows"
        # Five ranks with two neighbours swapped correlate by 0.9, as floats by 0.8999999999999998.
        rank = round(group.spearman, 9)
        made.append(Result(f"{name}: Spearman", rank, "", at_least=LEAST_SPEARMAN))
        made.append(Result(f"{name}: median error", group.median_error, "", at_most=MOST_ERROR))
    total = score.total
    if total is not None and total.compared:
        share = total.named_right / total.compared
        what = f"faster of Pallas and XLA named, {total.compared} cases"
        made.append(Result(what, share, "", at_least=LEAST_NAMED))
    return made


KEPT = Path(__file__).parents[1] / "tests/benchmarks/measured_kernels/data/compiled_rows.json.gz"
MOST_TRANSFERS = 5_000
# Most of a schedule's text: kernels' own programs, of which bundles were made, and source lines.
_BODY = re.compile(r'"body":"[^"]*"')
_SOURCES = re.compile(r"^FileNames\n.*?(?=^(?:%|ENTRY))", re.DOTALL | re.MULTILINE)


def run_keep(options):
    """Keep what the compiler made of measured programs, so that the suite scores them without it.

    The schedule of every program and the transfers and cycles of its kernels are facts: no rate is
    in them. `tests/benchmarks/measured_kernels/test_published_scores.py` times them by the rates in
    use, so that a rate that moves is seen. Rows are those the rates of kernels were fitted on, and
    some that XLA alone makes; a kernel with very many transfers is left out for its size.
    """
    configure_tpu_environment()  # or jax would look for a TPU in this process
    kept = [found for row in chosen(options.timings, options.limit) if (found := facts(row))]
    text = json.dumps(kept, separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    print(f"{len(kept)} rows, {len(packed) / 1e3:.0f} kB")
    if options.write:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_bytes(packed)
    return 0


def chosen(timings: Path, limit: int):
    """The kernels that rates were fitted on, and some programs of XLA's."""
    from measured_kernels import read_timings
    from measured_kernels.rows import rows_in_view
    from measured_kernels.score import newest, sample

    rows = read_timings(timings).rows
    fitted = [row for row in rows if row.id in rows_in_view("kernels")]
    plain = [row for row in newest(rows)[0] if row.is_xla]
    return sorted([*fitted, *sample(plain, limit)], key=lambda row: row.id)


def facts(row) -> dict | None:
    """What a row measured and what was compiled for it; None where there is no program."""
    from measured_kernels import program_of

    from tpukit.kernels.timing import profile_kernel

    try:
        program = program_of(row)
        profile = profile_kernel(program.function, program.arguments, row.device)
    except TPUError as error:
        print(f"left out {row.describe()}: {error}", file=sys.stderr)
        return None
    transfers = sum(len(core.transfers) for call in profile.calls.values() for core in call.cores)
    if profile.reasons or transfers > MOST_TRANSFERS:
        print(f"left out {row.describe()}: {transfers} transfers", file=sys.stderr)
        return None
    return {
        "id": row.id,
        "chip": profile.chip.name,
        "op": row.op,
        "kind": program.kind,
        "measured_us": row.measured_us,
        "published": row.source_date,
        "versions": dict(profile.compiled.versions),
        "hlo": _SOURCES.sub("", _BODY.sub('"body":""', profile.compiled.hlo)),
        "calls": {name: call.to_data() for name, call in profile.calls.items()},
    }


# The cases of each op that are common in training and serving. Forward alone: kernels without a
# backward pass of their own, and those that dispatch takes where no gradient is asked for.
SHIPPED: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("llama3_8b_2048",),
    "flash_attention": (
        "causal_4096x128_bfloat16",
        "causal_8192x128_bfloat16",
        "window1024_4096x128_bfloat16",
        "causal_2048x128_bfloat16",
        "causal_4096x256_bfloat16",
    ),
    "gated_delta": ("bfloat16_1x4096_16on32x128",),
    "grouped_matmul": ("mixtral_8x7b", "qwen3_30b_a3b"),
    "layer_norm": ("bfloat16_8192x4096", "bfloat16_16384x2048", "bfloat16_8192x8192"),
    "quantized_matmul": ("int8_bfloat16_16x4096x14336", "int4_bfloat16_16x4096x14336"),
    "rms_norm": ("bfloat16_8192x4096", "bfloat16_16384x2048", "bfloat16_8192x8192"),
}
FORWARD_ALONE = ("cross_entropy", "quantized_matmul")


def run_tuned(options):
    """Tune the blocks that tpukit ships, or show what tuning gained, by op, shape and generation.

    `--tune` climbs from the default blocks by static timing (origin model), as `tpukit kernel
    tune` does for one op, and writes `src/tpukit/kernels/<op>/data/<chip>.json`. Estimates are
    kept on disk, so a run that was cut short goes on where it stopped.
    """
    tpukit.configure_tpu_environment()
    console = Console(width=150)
    options.ops = options.ops or ",".join(SHIPPED)
    if options.tune:
        tune(options, console)
    console.print(shipped(options))
    return 0


def tune(asked: argparse.Namespace, console: Console) -> None:
    """Search each case on each generation, and keep the choice at once."""
    from tpukit.errors import TPUKernelError
    from tpukit.kernels.registry.registry import get_tpu_op
    from tpukit.kernels.tuning import tune_op

    for name in asked.ops.split(","):
        op = get_tpu_op(name)
        wanted = asked.cases.split(",") if asked.cases else SHIPPED[name]
        for case in map(op.case, wanted):
            for chip in asked.chips.split(","):
                try:
                    found = tune_op(
                        op,
                        case,
                        chip,
                        gradient=name not in FORWARD_ALONE,
                        seconds=asked.seconds,
                    )
                except TPUKernelError as error:  # eight bits that the generation has not
                    console.print(f"{name} {case.name} on {chip}: {error}")
                    continue
                found.save()
                console.print(found)


def shipped(asked: argparse.Namespace) -> Table:
    """What the data files say: the time by default and as tuned, and how many were tried."""
    from tpukit.kernels.blocks.tuned import data_folder, load_tuned

    table = Table("op", "bucket", "chip", "default us", "tuned us", "gain", "tried", title="model")
    for name in asked.ops.split(","):
        for chip in asked.chips.split(","):
            for entry in load_tuned(data_folder(name), chip).values():
                usual = entry.default_us or float("nan")
                gain = f"{usual / entry.time_us - 1:.1%}" if usual > entry.time_us else "default"
                figures = (f"{usual:.1f}", f"{entry.time_us:.1f}", gain, str(entry.tried))
                table.add_row(name, entry.bucket, chip, *figures)
                if usual > entry.time_us:
                    report(
                        Result(
                            f"{name} of {entry.bucket} on {chip}, tuned blocks against default",
                            100 * (usual / entry.time_us - 1),
                            "%",
                            key=f"tuned_{name}_{entry.bucket}_{chip}".replace(" ", "_"),
                            form=".0f",
                            **MODELLED,
                        )
                    )
    return table


COUNTS = Path(__file__).parents[1] / "tests" / "kernels" / "bundle_counts.json"


def run_bundles(options):
    """Bundles of every op's kernels on every generation, as the compiler makes them today.

    `--write` keeps them in tests/kernels/bundle_counts.json, which the tests hold kernels to.
    """
    tpukit.configure_tpu_environment()
    from tpukit.kernels.registry.registry import builtin_ops

    kept = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    for name in options.ops or builtin_ops():
        kept[name] = count(name)
        print(name, json.dumps(kept[name]["bundles"]))
        if options.write:
            ordered = {op: kept[op] for op in sorted(kept)}
            COUNTS.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


def count(name: str) -> dict[str, object]:
    """The counts of one op's first case, with its gradient where it has one."""
    from tpukit.kernels.registry.registry import get_tpu_op
    from tpukit.kernels.timing import count_bundles

    op = get_tpu_op(name)
    case, direction = op.cases[0], "backward" if op.differentiable else "forward"

    def one(chip: str) -> dict[str, int] | str:
        try:
            return count_bundles(op, case, chip, direction=direction)
        except TPUError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(CHIPS.split(","), pool.map(one, CHIPS.split(",")), strict=True))
    return {"case": case.name, "direction": direction, "bundles": found}


TARGET = 1.1
NORM_BYTES_ROWS, NORM_BYTES_WIDTH = 8192, 4096


def pulled_back(op: Op, implementation: str) -> Callable[..., Any]:
    """The backward pass alone: gradients for a cotangent that is given as the last argument."""

    def backward(*arrays: Any) -> Any:
        function = op.implementations[implementation]
        _, pull = jax.vjp(lambda *given: function(*given), *arrays[:-1])
        return pull(arrays[-1])

    return backward


def moved_bytes(function: Callable[..., Any], case: KernelCase, chip: str) -> float:
    """What one call moves between HBM and the core."""
    from tpukit.compiler.timeline.machine import work_of
    from tpukit.kernels.timing.profile import profile_kernel

    profile = profile_kernel(function, case.arguments, chip)
    if profile.reasons:
        raise SystemExit(f"{chip}: {'; '.join(profile.reasons.values())}")
    module = profile.compiled.module
    return sum(
        profile.calls[one.name].hbm_bytes
        if one.name in profile.calls
        else work_of(one, module.entry, module).hbm_bytes
        for one in module.entry
    )


def run_norm_bytes(options):
    """Bytes of HBM that layer norm and RMS norm move, fused and as XLA makes them, by generation.

    The floor is each row read once and written once (backward: row and cotangent read, gradient
    written). Ours is counted by following the compiled kernel's own transfers, XLA's from the
    operands and results of its scheduled program. Target: at most 1.1 times the floor.
    """
    tpukit.configure_tpu_environment()
    from tpukit.kernels.ops.layer_norm import api as layer_norm
    from tpukit.kernels.ops.rms_norm import api as rms_norm

    claims, ratios = [], []
    for norm in (layer_norm, rms_norm):
        op, case = norm.OP, norm.case(NORM_BYTES_ROWS, NORM_BYTES_WIDTH)
        x = case.arguments[0]
        with_cotangent = KernelCase(case.name, (*case.arguments, x))
        x_bytes = x.size * x.dtype.itemsize
        for direction in ("forward", "backward"):
            for chip in CHIPS.split(","):
                moved = {}
                for name in (PALLAS_TPU, REFERENCE):
                    forward = direction == "forward"
                    function = op.implementations[name] if forward else pulled_back(op, name)
                    moved[name] = moved_bytes(function, case if forward else with_cotangent, chip)
                floor = x_bytes * (2 if direction == "forward" else 3)
                what = f"{op.name} {direction} {chip}"
                ratios.append(moved[REFERENCE] / moved[PALLAS_TPU])
                claims += [
                    Result(what, moved[PALLAS_TPU] / floor, "x floor", at_most=TARGET),
                    Result(f"{what}, XLA", moved[REFERENCE] / floor, "x floor"),
                ]
    report(*claims)
    report(
        Result(
            "bytes of norms as XLA makes them over ours",
            (min(ratios), max(ratios)),
            key="norm_bytes",
            form=".1f",
            compares="compiler : compiler",
            sample="none",
        )
    )
    return int(any(claim.at_most and claim.value > claim.at_most for claim in claims))


KEY_HEADS, HEADS = 16, 32
CHUNKS = (64, 128)


def run_gated_delta(options):
    """The gated delta rule at Qwen3-Next's shape: our kernel beside the same chunks made by XLA.

    Static times of one device (origin model). XLA gets the better of chunks of 64 and 128 tokens.
    Its backward pass computes the chunks again, as ours does; where both passes are timed as one
    program, without recomputation of layers, XLA shares what they have in common and the kernel
    does not.
    """
    tpukit.configure_tpu_environment()
    from tpukit.kernels.ops.gated_delta import api, pallas_tpu, reference, xla

    def backward(passes: Any, **options: Any) -> Callable[..., Any]:
        def run(d_out: Any, d_state: Any, *arrays: Any) -> Any:
            return passes.backward(xla.DeltaResiduals(*arrays), (d_out, d_state), **options)[:5]

        return run

    def both(passes: Any, **options: Any) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            result, residuals = passes.forward(*arrays, **options)
            return result, passes.backward(residuals, result, **options)[:5]

        return run

    is_slower = False
    for name in options.cases.split(","):
        batch, tokens = map(int, name.split("x"))
        case = api.case(batch, tokens, KEY_HEADS, HEADS)
        for chip in options.chips.split(","):
            passes = {
                "forward": (
                    lambda *arrays: pallas_tpu.forward(*arrays)[0],
                    [partial(xla.gated_delta, chunk=chunk) for chunk in CHUNKS],
                ),
                "backward": (
                    backward(pallas_tpu),
                    [backward(xla, chunk=chunk) for chunk in CHUNKS],
                ),
                "both": (both(pallas_tpu), [both(xla, chunk=chunk) for chunk in CHUNKS]),
            }
            results = jax.eval_shape(reference.gated_delta, *case.arguments)
            for label in options.passes.split(","):
                kernel, others = passes[label]
                arguments = (*results, *case.arguments) if label == "backward" else case.arguments
                ours = time_us(kernel, arguments, chip)
                theirs = [time_us(other, arguments, chip) for other in others]
                shown = ", ".join(
                    f"{us:.0f} ({chunk})" for us, chunk in zip(theirs, CHUNKS, strict=True)
                )
                ratio = ours / min(theirs)
                is_slower = is_slower or ratio > 1
                print(
                    f"{name} {label} on {chip}: kernel {ours:.0f} us, XLA {shown} us (origin "
                    f"model): {ratio:.2f}",
                    flush=True,
                )
                report(
                    Result(
                        f"µs of the gated delta rule, {name} on {chip}, kernel beside XLA, {label}",
                        (ours, min(theirs)),
                        key=f"gated_delta_{name}_{chip}_{label}",
                        form=".0f",
                        joint=" : ",
                        **MODELLED,
                    )
                )
    return int(is_slower)


def time_us(
    function: Callable[..., Any], arguments: tuple[Any, ...], chip: str, kind: str | None = None
) -> float:
    """Return the static time of one call in microseconds.

    Raises:
        SystemExit: The compiler gave nothing to time.
    """
    from tpukit.kernels.timing import estimate_kernel

    estimate = estimate_kernel(function, arguments, chip, kind=kind)
    if estimate.time_s is None:
        sys.exit(f"{chip}: {estimate.reason}")
    return estimate.time_s * 1e6


FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
BFLOAT16 = (jnp.bfloat16, jnp.bfloat16)
KERNEL, XLA, GROUPED = "pallas_tpu", "xla", "grouped_matmul"


def products(shape: tuple[int, int, int, int], formats: tuple[Any, Any]) -> dict[str, Any]:
    """For each product its function of an implementation, and its arrays."""
    from tpukit.kernels.ops.grouped_matmul.api import multiply_groups, sum_groups

    rows, width, columns, groups = shape
    values, gradients = formats
    x = jax.ShapeDtypeStruct((rows, width), values)
    w = jax.ShapeDtypeStruct((groups, width, columns), values)
    dy = jax.ShapeDtypeStruct((rows, columns), gradients)
    sizes = jnp.full(groups, rows // groups, jnp.int32)
    multiply = partial(multiply_groups, dtype=jnp.bfloat16)
    return {
        "forward": (multiply, (x, w, sizes)),
        "gradient of rows": (partial(multiply, transposed=True), (dy, w, sizes)),
        "gradient of weights": (partial(sum_groups, dtype=jnp.bfloat16), (x, dy, sizes)),
    }


def run_grouped_fp8(options):
    """Compare grouped matmuls in fp8 with XLA's ragged ones and with bfloat16.

    The three products of one projection of a layer's experts, even groups: rows and weights in
    e4m3, gradients in e5m2, results in bfloat16. Static times of one device (origin model). What
    the program says of XLA's is FLOPs too, since its ragged products were measured far faster than
    the schedule of this libtpu lets them be (docs/kernels.md).
    """
    tpukit.configure_tpu_environment()
    from tpukit.kernels import get_tpu_op

    is_slower = False
    for name in options.cases.split(","):
        case = get_tpu_op("grouped_matmul").case(name)
        (rows, width), (groups, _, columns) = (one.shape for one in case.arguments[:2])
        shape = rows, width, columns, groups
        for chip in options.chips.split(","):
            wide = products(shape, BFLOAT16)
            for label, (function, arrays) in products(shape, FLOAT8).items():
                ours = time_us(partial(function, implementation=KERNEL), arrays, chip, GROUPED)
                theirs = time_us(partial(function, implementation=XLA), arrays, chip, GROUPED)
                in_wide, wide_arrays = wide[label]
                bfloat16 = time_us(
                    partial(in_wide, implementation=KERNEL), wide_arrays, chip, GROUPED
                )
                is_slower = is_slower or ours > theirs
                print(
                    f"{name} {label} on {chip}: fp8 kernel {ours:.0f} us, fp8 XLA {theirs:.0f} us: "
                    f"{ours / theirs:.2f}; bfloat16 kernel {bfloat16:.0f} us: "
                    f"{ours / bfloat16:.2f} (origin model)",
                    flush=True,
                )
                report(
                    Result(
                        f"µs of {name} in fp8 on {chip}: our kernel, XLA's, ours in bf16, {label}",
                        (ours, theirs, bfloat16),
                        key=f"grouped_fp8_{name}_{chip}_{label}".replace(" ", "_"),
                        form=".0f",
                        joint=" : ",
                        **MODELLED,
                    )
                )
    return int(is_slower)


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        estimate=run_estimate,
        keep=run_keep,
        tuned=run_tuned,
        bundles=run_bundles,
        norm_bytes=run_norm_bytes,
        gated_delta=run_gated_delta,
        grouped_fp8=run_grouped_fp8,
    )
