"""Vector quantization on synthetic weights, its k-means, and estimated speed of quantized matmuls.

python benchmarks/vq.py gaussian
python benchmarks/vq.py layer
python benchmarks/vq.py kmeans
python benchmarks/vq.py speed
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from harness import MEASURED, MODELLED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand("gaussian", "squared error of Gaussian weights"),
    Subcommand(
        "layer",
        "output error of a synthetic layer",
        options={"--trellis": {"action": "store_true", "help": "a trellis too: minutes more"}},
    ),
    Subcommand(
        "kmeans",
        "k-means beside faiss, scikit-learn or torch",
        options={
            "--vectors": {"type": int, "default": 1_000_000},
            "--rounds": {"type": int, "default": 3},
            "--no-sklearn": {
                "action": "store_true",
                "help": "leave out scikit-learn: minutes less",
            },
            "--torch": {"action": "store_true", "help": "beside torch on a GPU instead"},
        },
    ),
    Subcommand(
        "speed",
        "estimated speed of quantized matmuls on each TPU generation",
        options={
            "--chips": "v5e,v5p,v6e,7x",
            "--rows": {"type": int, "default": 16, "help": "Sequences decoded together"},
            "--document-chip": {"default": "v6e", "help": "Of the table of document 000"},
        },
    ),
)

import jax
import jax.numpy as jnp
import numpy as np

import tpukit
from tpukit.hardware import get_chip
from tpukit.quantization import quantize_matrix, train_codebook
from tpukit.quantization.codebooks.nearest import nearest
from tpukit.quantization.vector_codes.trellis import RUN, gaussian_table, search_runs, windows_of

PUBLISHED = {
    "published: Lloyd-Max, 1 value": 0.118,
    "published: QuIP# E8P, 8 values": 0.089,
    "published: QTIP trellis, window of 16 bits": 0.069,
    "bound, any code": 0.0625,
}


def vectors(length: int, entries: int) -> float:
    """The error of a codebook in int8, fitted to 2^20 vectors at most."""
    count = max(2**17, min(1024 * entries, 2**19))
    book = train_codebook(
        jax.random.normal(jax.random.key(0), (count, length)),
        entries=entries,
        length=length,
        iterations=40,
        tolerance=1e-5,
    )
    held_out = jax.random.normal(jax.random.key(1), (2**18 // length, length))
    table = book.values[0]
    return float(((held_out - table[nearest(held_out, table)]) ** 2).mean())


def trellis(window: int) -> float:
    """The error of a trellis of 2 bits, its values in int8."""
    table = jnp.asarray(gaussian_table(2, window))
    scale = jnp.abs(table).max() / 127
    table = jnp.round(table / scale) * scale
    held_out = jax.random.normal(jax.random.key(1), (1024, RUN))
    found = jax.jit(search_runs, static_argnames="bits")(
        held_out, jnp.ones_like(held_out), table, bits=2
    )
    # Decoded from the new bits alone, as a file holds them.
    decoded = table[windows_of(found & 3, bits=2, window=window)]
    return float(((held_out - decoded) ** 2).mean())


def stated(code: str, error: float, bar: float, key: str) -> Result:
    what = f"squared error of Gaussian weights at 2 bits, {code}"
    kind = {"compares": "measured : published", "sample": "out"}
    return Result(what, error, "", at_most=bar, key=key, form=".4f", **kind)


def run_gaussian(options):
    """Gaussian weights at 2 bits: mean squared error on weights no code was fitted to.

    Published rows are those of QTIP's Table 1 (arXiv 2406.11235); the bound is 4^−bits.
    """
    report(
        Result("1 value × 4 entries", vectors(1, 4), ""),
        Result("2 values × 16 entries", vectors(2, 16), ""),
        stated("4 values × 256 entries (vq2)", vectors(4, 256), 0.0990, "gaussian_vq2"),
        stated("trellis, window of 8 bits (trellis2:256)", trellis(8), 0.090, "gaussian_trellis8"),
        Result("trellis, window of 10 bits (trellis2:1024)", trellis(10), ""),
        stated("trellis, window of 12 bits (trellis2)", trellis(12), 0.090, "gaussian_trellis12"),
        *(Result(name, value, "") for name, value in PUBLISHED.items()),
    )


SIZE, TOKENS, GROUP = 512, 8192, 128


def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight (in, out), inputs to calibrate with, and inputs to judge with."""
    random = np.random.default_rng(0)
    tilt = np.exp(random.normal(0, 0.5, SIZE))[:, None]
    weight = random.standard_t(5, (SIZE, SIZE)) * 0.02 * tilt**-0.3
    mixing = random.standard_normal((SIZE, 64)) / 8
    inputs = random.standard_normal((TOKENS, 64)) @ mixing.T
    inputs += 0.5 * random.standard_normal((TOKENS, SIZE))
    inputs *= np.exp(random.normal(0, 1.0, SIZE))
    return weight, inputs[: TOKENS // 2], inputs[TOKENS // 2 :]


def rounded(weight: np.ndarray, bits: int, hessian: np.ndarray | None = None) -> np.ndarray:
    """Integers of `bits` with scale and offset by 128 rows: nearest, or GPTQ with a Hessian."""
    left, made = weight.copy(), np.zeros_like(weight)
    levels = 2**bits - 1
    factor = None
    if hessian is not None:
        damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(SIZE)
        factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    for row in range(SIZE):
        if row % GROUP == 0:
            part = left[row : row + GROUP]
            low = part.min(0)
            scale = (part.max(0) - low) / levels + 1e-12
        made[row] = np.clip(np.round((left[row] - low) / scale), 0, levels) * scale + low
        if factor is not None:
            lost = (left[row] - made[row]) / factor[row, row]
            left[row + 1 :] -= np.outer(factor[row, row + 1 :], lost)
    return made


def run_layer(options):
    """A synthetic layer at about 2 bits: each rung of vector quantization beside integers.

    W is 512 × 512 with heavy tails, inputs are correlated and of uneven size; the error is that of
    the outputs for inputs nobody calibrated with. It ranks steps; it does not predict a model's
    perplexity.
    """
    weight, calibration, held_out = layer()
    hessian = calibration.T @ calibration / len(calibration)
    outputs = ((held_out @ weight) ** 2).sum()

    def error(made: object) -> float:
        return float(((held_out @ (weight - np.asarray(made, np.float64))) ** 2).sum() / outputs)

    integers: dict[int, float] = {}
    for bits in (4, 3, 2):
        integers[bits] = error(rounded(weight, bits, hessian))
        report(
            Result(
                f"int{bits} g128 nearest ({bits + 0.25:g} bits)", error(rounded(weight, bits)), ""
            ),
            Result(f"int{bits} g128 GPTQ ({bits + 0.25:g} bits)", integers[bits], ""),
        )
    rungs = {
        "plain k-means": {"feedback": False, "refit": False},
        "+ weights of the inputs": {"hessian": hessian, "feedback": False, "refit": False},
        "+ error feedback": {"hessian": hessian, "refit": False},
        "+ entries and codes refined": {"hessian": hessian},
    }
    before = np.inf
    for name, changes in rungs.items():
        made = quantize_matrix(weight, format="vq2", **changes)
        found = error(made.dequantize())
        assert found < before, f"{name} does not lower the error: {found} after {before}"
        before = found
        last = name.startswith("+ entries")
        bar = 0.0125 if last else None
        what = f"output error of a synthetic layer, vq2 {name} ({made.bits_per_weight:.2f} bits)"
        kind = {"compares": "measured : measured", "sample": "out"}
        key = "layer_vq2" if last else ""
        report(Result(what, found, "", at_most=bar, key=key, form=".4f", **kind))
    report(Result("the last beside GPTQ int3", before / integers[3], "×", at_most=1.0))
    others = {"vq2, Hadamard": ("vq2", True), "vq1.75": ("vq1.75", False), "vq4": ("vq4", False)}
    if options.trellis:
        others["trellis2"] = ("trellis2:1024", False)
    for name, (format, hadamard) in others.items():
        made = quantize_matrix(weight, format=format, hessian=hessian, hadamard=hadamard)
        report(Result(f"{name} ({made.bits_per_weight:.2f} bits)", error(made.dequantize()), ""))


LENGTH, ENTRIES, PASSES = 8, 1024, 25


def ours(vectors: np.ndarray) -> np.ndarray:
    """`train_codebook`, entries in int8 as they are stored."""
    book = train_codebook(vectors, entries=ENTRIES, length=LENGTH, iterations=PASSES)
    return np.asarray(book.values[0])


def faiss_passes(vectors: np.ndarray) -> np.ndarray:
    """Faiss on every vector."""
    import faiss

    faiss.omp_set_num_threads(2)
    made = faiss.Kmeans(LENGTH, ENTRIES, niter=PASSES, seed=0, max_points_per_centroid=len(vectors))
    made.train(vectors)
    return made.centroids


def sklearn_batches(vectors: np.ndarray) -> np.ndarray:
    """scikit-learn's MiniBatchKMeans with its own defaults."""
    from sklearn.cluster import MiniBatchKMeans

    made = MiniBatchKMeans(ENTRIES, max_iter=PASSES, n_init=1, random_state=0)
    return made.fit(vectors).cluster_centers_


def torch_passes(vectors: np.ndarray) -> np.ndarray:
    """Lloyd's passes in torch on its GPU, by matrix products in chunks."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = torch.as_tensor(vectors, device=device)
    generator = torch.Generator(device="cpu").manual_seed(0)
    table = points[torch.randperm(len(points), generator=generator)[:ENTRIES].to(device)].clone()
    for _ in range(PASSES):
        total = torch.zeros_like(table)
        mass = torch.zeros(ENTRIES, device=device)
        for part in points.split(2**17):
            codes = ((table**2).sum(1) - 2 * part @ table.T).argmin(1)
            total.index_add_(0, codes, part)
            mass += torch.bincount(codes, minlength=ENTRIES)
        table = torch.where(mass[:, None] > 0, total / mass.clamp(min=1)[:, None], table)
    if device == "cuda":
        torch.cuda.synchronize()
    return table.cpu().numpy()


def run_kmeans(options):
    """k-means of a million 8-vectors into 1024 entries, 25 passes: ours, faiss and scikit-learn.

    Each is timed on the same vectors in this process, in turn, `--rounds` times; the least time
    counts. faiss sees all vectors in every pass, not its sample. Ours is timed after a call that
    compiled it; the time of that first call is printed too. The error is the mean square of what a
    value loses, on vectors that nobody was fitted to. scikit-learn's mini-batches take minutes:
    `--no-sklearn` leaves them out. On a machine with a GPU, `--torch` compares with Lloyd's passes
    in torch instead.
    """
    random = np.random.default_rng(0)
    vectors = random.standard_normal((options.vectors, LENGTH), dtype=np.float32)
    held_out = jnp.asarray(random.standard_normal((200_000, LENGTH), dtype=np.float32))

    def error(table: np.ndarray) -> float:
        entries = jnp.asarray(table, jnp.float32)
        return float(((held_out - entries[nearest(held_out, entries)]) ** 2).mean())

    def timed(fit: Callable[[np.ndarray], np.ndarray]) -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        table = fit(vectors)
        return time.perf_counter() - start, table

    rivals = {"torch": torch_passes} if options.torch else {"faiss": faiss_passes}
    seconds: dict[str, float] = {}
    errors: dict[str, float] = {}
    first, _ = timed(ours)
    report(Result(f"tpukit, first call, on {jax.default_backend()}", first, "s"))
    for turn in range(options.rounds):
        for name, fit in {"tpukit": ours, **rivals}.items():
            if name == "torch" and turn == 0:
                timed(fit)  # what a first call loads
            took, table = timed(fit)
            seconds[name] = min(took, seconds.get(name, np.inf))
            errors[name] = error(table)
    if not options.torch and not options.no_sklearn:
        seconds["scikit-learn"], table = timed(sklearn_batches)
        errors["scikit-learn"] = error(table)
    for name in seconds:
        report(
            Result(
                f"k-means of {options.vectors:,} {LENGTH}-vectors by {name}",
                seconds[name],
                "s",
                key=f"kmeans_{name}_{jax.default_backend()}".replace(" ", "_"),
                form=".2f",
                **MEASURED,
            ),
            Result(f"{name}: held-out error", errors[name], ""),
        )
    others = [name for name in seconds if name != "tpukit"]
    fastest = min(others, key=seconds.__getitem__)
    lowest = min(errors[name] for name in others)
    report(
        Result(
            f"k-means of {options.vectors:,} {LENGTH}-vectors, time beside {fastest}",
            seconds["tpukit"] / seconds[fastest],
            at_most=1.0,
            key=f"kmeans_{jax.default_backend()}",
            form=".2f",
            **MEASURED,
        ),
        Result("error beside the lowest of them", errors["tpukit"] / lowest, "×", 1.0),
    )


SHAPE = (4096, 14336)
# (format, activations)
FORMATS = (
    ("bf16", "bfloat16"),
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
    ("fp8", "bfloat16"),
    ("vq1.75", "bfloat16"),
    ("vq2", "bfloat16"),
    ("vq2", "int8"),
    ("vq4", "bfloat16"),
)
# Llama 3 8B: 32 heads of 128, 8 of keys and values.
ATTENTION = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096))
MLP = ((4096, 14336), (4096, 14336), (14336, 4096))
UNEMBED, LAYERS, CONTEXT, KEY_VALUES = (4096, 128_256), 32, 2048, 2 * 8 * 128
DOCUMENT = {"MatMul": (10, 3), "Attention": (25, 8), "MLP": (15, 5), "Total Inference": (120, 40)}


def seconds(shape: tuple[int, int], format: str, chip: str, rows: int, activations: str) -> Any:
    """The time of a product, or why there is none."""
    from tpukit.quantization.measures.speed import product_estimate

    print(f"{format} {activations} {shape} on {chip}", file=sys.stderr, flush=True)
    found = product_estimate(shape, format, chip, rows=rows, activations=activations)
    if isinstance(found, str):
        return found
    return found.time_s if found.time_s is not None else found.reason


def by_format(chips: list[str], rows: int) -> list[dict[str, Any]]:
    """One product in every format on every chip."""
    found: list[dict[str, Any]] = []
    for format, activations in FORMATS:
        times = {chip: seconds(SHAPE, format, chip, rows, activations) for chip in chips}
        found.append({"format": format, "activations": activations, "seconds": times})
    return found


def print_formats(table: list[dict[str, Any]], chips: list[str], rows: int) -> None:
    """Microseconds, and how many times faster than bfloat16."""
    print(f"{rows} × {SHAPE[0]} × {SHAPE[1]}, µs (times as fast as bf16); origin: model")
    wide = table[0]["seconds"]
    for row in table:
        cells: list[str] = []
        for chip in chips:
            own, full = row["seconds"][chip], wide[chip]
            known = isinstance(own, float) and isinstance(full, float)
            cells.append(f"{own * 1e6:7.1f} ({full / own:.2f})" if known else f"— ({own})"[:60])
        label = row["format"] + (" × int8" if row["activations"] == "int8" else "")
        for chip in chips:
            own, full = row["seconds"][chip], wide[chip]
            if isinstance(own, float) and isinstance(full, float):
                what = f"one matmul of a decode step on {chip} in {label} against bfloat16"
                key = f"speed_{label}_{chip}".replace(" × ", "_")
                report(Result(what, full / own, key=key, form=".2f", **MODELLED))
        print(f"{label:<14}" + "  ".join(f"{cell:<16}" for cell in cells))


def document_rows(chip: str, rows: int) -> dict[str, dict[str, float]]:
    """The rows of document 000 in milliseconds: bfloat16, vq2 and int4."""
    bandwidth = get_chip(chip).hbm_gbps.require("the time a cache is read in")
    cache = rows * CONTEXT * KEY_VALUES * 2 / (bandwidth * 1e9)
    found: dict[str, dict[str, float]] = {}
    unembed = seconds(UNEMBED, "bf16", chip, rows, "bfloat16")
    for label, format, activations in (
        ("bf16", "bf16", "bfloat16"),
        ("vq2", "vq2", "bfloat16"),
        ("vq2, int8 activations", "vq2", "int8"),
        ("int4", "int4", "bfloat16"),
    ):
        times = {
            shape: seconds(shape, format, chip, rows, activations)
            for shape in dict.fromkeys((*ATTENTION, *MLP))
        }
        attention = sum(times[shape] for shape in ATTENTION) + cache
        mlp = sum(times[shape] for shape in MLP)
        total = LAYERS * (attention + mlp) + unembed
        parts = (times[SHAPE], attention, mlp, total)
        found[label] = dict(zip(DOCUMENT, (1e3 * part for part in parts), strict=True))
    return found


def run_speed(options):
    """Estimate how fast each format is multiplied on each TPU generation.

    Kernels are compiled for the chip and run through bundle by bundle; no quantized kernel was
    ever measured on a chip, so the error of these times is not known. The first table is one
    product of a decode step; the second is the table of document 000 ("VQ Performance (TPU v6e)"),
    whose sizes nobody stated: here a layer of Llama 3 8B, 16 sequences of 2,048 tokens on one v6e.
    Its "VQ-8bit" is `vq2`: codes for four weights, entries in 8 bits. Attention and total count
    the cache, read at the datasheet's bandwidth, and total counts the unembedding; both are the
    same on both sides.

    Every product takes seconds to compile the first time, and is kept.
    """
    tpukit.configure_tpu_environment()  # or jax would look for a TPU in this process
    chips = options.chips.split(",")
    table = by_format(chips, options.rows)
    print_formats(table, chips, options.rows)
    document = document_rows(options.document_chip, options.rows)
    wide = document["bf16"]
    print(f"\nDocument 000's rows on {options.document_chip}, ms (times as fast as bf16)")
    for name, (before, after) in DOCUMENT.items():
        cells = [
            f"{label} {row[name]:.3f} ({wide[name] / row[name]:.2f})"
            for label, row in document.items()
        ]
        claim = f"the document says {before} and {after} ({before / after:.1f})"
        print(f"{name:<16}" + ", ".join(cells) + f"; {claim}")
        for label, row in document.items():
            report(
                Result(
                    f"document 000's {name} in {label} on {options.document_chip} against bf16",
                    wide[name] / row[name],
                    key=f"document_{name}_{label}".replace(" ", "_"),
                    form=".2f",
                    **MODELLED,
                )
            )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        gaussian=run_gaussian,
        layer=run_layer,
        kmeans=run_kmeans,
        speed=run_speed,
    )
