"""Our ops on one NVIDIA GPU beside cuDNN, torch and XLA.

python benchmarks/gpu_ops.py attention
python benchmarks/gpu_ops.py cross-entropy
python benchmarks/gpu_ops.py ops
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import GPU, MEASURED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "attention",
        "flash attention beside cuDNN, torch and tokamax",
        options={
            "--rounds": {"type": int, "default": 6},
            "--shape": {"help": "BATCHxTOKENSxHEADS/KV_HEADSxWIDTH"},
            "--window": {"type": int},
            "--torch": {"help": "time torch in this process, at this shape"},
        },
        needs=(GPU, "torch"),
        environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    Subcommand(
        "cross-entropy",
        "memory and time of the fused cross-entropy",
        options={
            "--shape": {"action": "append", "help": "TOKENSxWIDTHxVOCAB; may be repeated"},
            "--rounds": {"type": int, "default": 3},
            "--steps": {"type": int, "default": 10},
            "--one": {"help": "time one contestant in this process"},
        },
    ),
    Subcommand(
        "ops",
        "our Triton ops beside XLA",
        options={
            "--rounds": {"type": int, "default": 5},
            "--calls": {"type": int, "default": 30},
        },
        needs=(GPU,),
    ),
)

import jax
import jax.numpy as jnp
import numpy as np

from tpukit.kernels import grouped_matmul
from tpukit.kernels.ops.embedding_rows import embedding_rows

ROUND_S = 0.25
# A program of a few ops is not recorded as a CUDA graph, as every training step is; outside of one
# XLA sets as many bytes as cuDNN's results and workspace have, for jax's own call too: 216 of
# 2591 us at the first shape (measured by the profiler, jax 0.11.2).
AS_IN_A_STEP = {"xla_gpu_graph_min_graph_size": 1}


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None

    @classmethod
    def parse(cls, text: str, window: int | None) -> "Shape":
        batch, tokens, heads, width = text.split("x")
        q, _, kv = heads.partition("/")
        return cls(int(batch), int(tokens), int(q), int(kv or q), int(width), window)

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        text = f"{self.batch}x{self.tokens}x{heads}x{self.width}"
        return text if self.window is None else f"{text} window {self.window}"


SHAPES = (
    Shape(16, 2048, 16, 8, 128),
    Shape(4, 4096, 32, 8, 128),
    Shape(2, 8192, 16, 16, 128, 1024),
    Shape(8, 2048, 16, 16, 64),
)


def timed(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Milliseconds of one call, over a round of them."""
    began = time.perf_counter()
    wait(call())
    calls = max(5, int(ROUND_S / (time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait(last)
    return (time.perf_counter() - began) / calls * 1e3


def jax_contestants(shape: Shape) -> dict[str, Callable[[], float]]:
    import jax
    import jax.numpy as jnp

    from tpukit.kernels.ops.flash_attention.api import flash_attention

    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    arrays = [
        jax.random.normal(
            jax.random.key(seed), (shape.batch, shape.tokens, n, shape.width), jnp.bfloat16
        )
        for seed, n in enumerate(heads)
    ]
    seen = None if shape.window is None else (shape.window - 1, 0)
    by_hand = partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=seen,
        implementation="cudnn",
    )
    ours = partial(flash_attention, causal=True, window=shape.window)
    attends = {"tpukit": ours, "jax cuDNN": by_hand}
    try:
        attends["tokamax"] = partial(
            importlib.import_module("tokamax").dot_product_attention,
            is_causal=True,
            local_window_size=seen,
        )
    except (ImportError, AttributeError) as error:
        print(f"  tokamax does not run on jax {jax.__version__} here: {str(error)[:120]}")

    def both_passes(attend: Any) -> Callable[[], Any]:
        def step(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(cotangent)

        lowered = jax.jit(step).lower(*arrays)
        compiled = lowered.compile(compiler_options=AS_IN_A_STEP)
        jax.block_until_ready(compiled(*arrays))
        return lambda: compiled(*arrays)

    found = {}
    for name, attend in attends.items():
        try:
            found[name] = partial(timed, both_passes(attend), jax.block_until_ready)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            print(f"  {name} cannot do this shape: {str(error).splitlines()[0][:120]}")
    return found


def serve_torch(shape: Shape) -> None:
    """Time torch's ways on request: a name in, milliseconds out."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def array(heads: int) -> Any:
        made = torch.randn(
            shape.batch, shape.tokens, heads, shape.width, device="cuda", dtype=torch.bfloat16
        )
        return made.transpose(1, 2).requires_grad_()

    q, k, v, cotangent = map(array, (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads))
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def both_passes(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            grouped = shape.heads != shape.kv_heads
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return torch.autograd.grad(out, (q, k, v), cotangent)

    for line in sys.stdin:
        call = partial(both_passes, backends[line.strip()])
        call()
        print(timed(call, lambda _: torch.cuda.synchronize()), flush=True)


def compare(shape: Shape, rounds: int) -> list[Result]:
    print(shape, flush=True)
    best: dict[str, float] = {}
    contestants = jax_contestants(shape)
    command = [sys.executable, __file__, "attention", "--torch", repr(shape)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        # torch's SDPA has no window.
        if child.stdin and child.stdout and shape.window is None:
            out, back = child.stdin, child.stdout

            def ask(name: str) -> float:
                print(name, file=out, flush=True)
                return float(back.readline())

            for name in ("cuDNN", "flash"):
                contestants[f"torch {name}"] = partial(ask, name)
        for _ in range(rounds):
            for name, run in contestants.items():
                best[name] = min(best.get(name, float("inf")), run())
        if child.stdin:
            child.stdin.close()
    for name, ms in best.items():
        print(f"  {name:<12} {ms:8.3f} ms (measured)")
    rest = {name: ms for name, ms in best.items() if name != "tpukit"}
    fastest = min(rest, key=lambda name: rest[name])
    ratio = rest[fastest] / best["tpukit"]
    window = f"_{shape.window}" if shape.window else ""
    key = f"attention_{shape.batch}x{shape.tokens}{window}"
    return [
        Result(
            f"attention of both passes, {shape}: {name}",
            ms,
            "ms",
            key=f"{key}_{name}",
            form=".3f",
            **MEASURED,
        )
        for name, ms in best.items()
    ] + [Result(f"{shape}: speed against {fastest}", ratio, "x", at_least=0.98)]


def run_attention(options):
    """Compare `flash_attention`, forward and backward, with the fastest others.

    The others are cuDNN called by hand through jax, torch's SDPA with cuDNN and with flash
    attention (in a process of their own), and tokamax. All get arrays of (batch, tokens, heads,
    width) and the same cotangent; both passes run once a call. Rounds alternate, and the best
    counts: a chip that grew warm would otherwise decide.
    """
    if options.torch:
        fields = options.torch.removeprefix("Shape(").removesuffix(")").split(", ")
        pairs = (field.split("=") for field in fields)
        serve_torch(Shape(**{name: int(value) for name, value in pairs if value != "None"}))
        return
    del sys.argv[1:]  # tokamax reads them as its own flags
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit(f"this benchmark needs a GPU, and jax runs on {jax.default_backend()}.")
    shapes = (Shape.parse(options.shape, options.window),) if options.shape else SHAPES
    report(*(claim for shape in shapes for claim in compare(shape, options.rounds)))


CROSS_ENTROPY_SHAPES = (
    "8192x4096x128256",
    "4096x4096x151936",
    "16384x2048x128256",
    "8192x3840x262144",
)
# Whole logits as they are usually written: in float32, and rounded to bfloat16.
CONTESTANTS = ("tpukit", "xla_float32", "xla_bfloat16")


def make_step(name):
    import jax
    import jax.numpy as jnp

    from tpukit.kernels.ops.cross_entropy.api import cross_entropy

    def ours(x, w, labels):
        return cross_entropy(x, w, labels).loss

    def whole(x, w, labels, dtype):
        logits = jnp.dot(x, w, preferred_element_type=dtype).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    losses = {
        "tpukit": ours,
        "xla_float32": lambda *arrays: whole(*arrays, jnp.float32),
        "xla_bfloat16": lambda *arrays: whole(*arrays, jnp.bfloat16),
    }
    return jax.jit(jax.value_and_grad(losses[name], argnums=(0, 1)))


def measure(name, shape, steps):
    """Time and memory of one contestant, in this process."""
    import jax
    import jax.numpy as jnp

    tokens, width, vocab = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (width, vocab), jnp.bfloat16) * width**-0.5
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    compiled = make_step(name).lower(x, w, labels).compile()
    loss, _ = jax.block_until_ready(compiled(x, w, labels))
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(x, w, labels))
        times.append(time.perf_counter() - begun)
    stats = jax.devices()[0].memory_stats() or {}
    analysis = compiled.memory_analysis()
    return {
        "median_ms": 1e3 * statistics.median(times),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "temp_bytes": None if analysis is None else analysis.temp_size_in_bytes,
        "loss": float(loss),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def in_child(name, shape, steps, cache):
    command = [
        sys.executable,
        __file__,
        "cross-entropy",
        "--one",
        name,
        "--shape",
        shape,
        "--steps",
        str(steps),
    ]
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def cross_entropy_compare(shape, rounds, steps):
    runs = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as cache:
        for name in runs:
            in_child(name, shape, 1, cache)
        for _ in range(rounds):
            for name, seen in runs.items():
                seen.append(in_child(name, shape, steps, cache))
    best = {}
    for name, seen in runs.items():
        good = [run for run in seen if "error" not in run]
        best[name] = min(good, key=lambda run: run["median_ms"]) if good else seen[0]
    return best


def report_shape(shape, best):
    print(f"\n{shape}")
    for name, run in best.items():
        if "error" in run:
            print(f"  {name:14} failed: {run['error']}")
            continue
        peak = "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.2f} GiB"
        temp = "–" if run["temp_bytes"] is None else f"{run['temp_bytes'] / 2**30:.2f} GiB"
        print(
            f"  {name:14} {run['median_ms']:9.2f} ms (measured)   peak {peak} (measured)   "
            f"temporaries {temp} (compiler)   loss {run['loss']:.5f}   {run['device']}"
        )
        what = f"cross-entropy with gradients, {shape}: {name}"
        key = f"cross_entropy_{shape}_{name}"
        report(Result(what, run["median_ms"], "ms", key=key, form=".1f", **MEASURED))
    ours, others = best["tpukit"], [best[name] for name in CONTESTANTS[1:]]
    others = [run for run in others if "error" not in run]
    if "error" in ours or not others:
        return
    for kind, what in (
        ("median_ms", "time"),
        ("peak_bytes", "peak memory"),
        ("temp_bytes", "temporaries"),
    ):
        least = [run[kind] for run in others if run[kind] is not None]
        if least and ours[kind] is not None:
            ratio = ours[kind] / min(least)
            report(Result(f"{shape}: {what} over the better XLA's", ratio, "x", at_most=1))


def run_cross_entropy(options):
    """Cross-entropy from hidden states: our chunks against whole logits in XLA, time and memory.

    Each contestant makes loss and gradients of x and w in a process of its own, so that the peak
    of device memory is its own (measured by the allocator; None where there is none, as on a CPU).
    It is compiled in another process before that: choosing algorithms, XLA allocates more than
    some need. Rounds alternate, and the best median counts. A ratio below 1 means that we need
    less; ours are float32 logits, so bfloat16 ones are the harder contestant.
    """
    if options.one:
        print(json.dumps(measure(options.one, options.shape[0], options.steps)))
        return
    figures = {}
    for shape in options.shape or CROSS_ENTROPY_SHAPES:
        figures[shape] = cross_entropy_compare(shape, options.rounds, options.steps)
        report_shape(shape, figures[shape])


VOCABULARY = 32768
EMBEDDINGS = ((32768, 2048), (65536, 1024))  # tokens, width
ROWS, GROUPS, WIDTH, HIDDEN = 16384, 8, 2048, 8192


def best_ms(
    functions: dict[str, Callable[..., Any]], *arrays: jax.Array, rounds: int, calls: int
) -> dict[str, float]:
    """Milliseconds of one call of each, in its best round."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        jax.block_until_ready(function(*arrays))  # compiled, and warm
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            result = None
            for _ in range(calls):
                result = function(*arrays)
            jax.block_until_ready(result)
            best[name] = min(best[name], (time.perf_counter() - started) / calls * 1e3)
    return best


def words(tokens: int, *, by_zipf: bool) -> np.ndarray:
    """Numbers of words as in text, or drawn evenly."""
    random = np.random.default_rng(0)
    if not by_zipf:
        return random.integers(0, VOCABULARY, tokens).astype(np.int32)
    share = 1.0 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, tokens, p=share / share.sum()).astype(np.int32)


def embedding_gradient(look_up: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The gradient of a table by the way rows are looked up in it."""

    def gradient(table: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        _, back = jax.vjp(lambda one: look_up(one, ids), table)
        return back(cotangent)[0]

    return jax.jit(gradient)


def embedding_claims(rounds: int, calls: int) -> list[Result]:
    claims: list[Result] = []
    sides = {
        "ours": embedding_gradient(embedding_rows),
        "XLA": embedding_gradient(lambda table, ids: table[ids]),
    }
    for tokens, width in EMBEDDINGS:
        table = jnp.zeros((VOCABULARY, width), jnp.bfloat16)
        cotangent = jax.random.normal(jax.random.key(1), (tokens, width), jnp.bfloat16)
        for by_zipf in (True, False):
            ids = jnp.asarray(words(tokens, by_zipf=by_zipf))
            arrays = (table, ids, cotangent)
            found = best_ms(sides, *arrays, rounds=rounds, calls=calls)
            exact = np.zeros((VOCABULARY, width))
            np.add.at(exact, np.asarray(ids), np.asarray(cotangent, np.float64))
            kind = "Zipf's law" if by_zipf else "drawn evenly"
            for name, run in sides.items():
                apart = np.asarray(run(*arrays), np.float64) - exact
                error = 100 * float(np.linalg.norm(apart) / np.linalg.norm(exact))
                what = f"embedding gradient, {tokens} x {width}, {kind}, {name}"
                key = f"embedding_{tokens}x{width}_{'zipf' if by_zipf else 'even'}_{name}"
                claims += [
                    Result(what, found[name], "ms", key=key, form=".3g", **MEASURED),
                    Result(f"error of {what}", error, "%"),
                ]
    return claims


def grouped_gradients(product: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A grouped product with the gradients of both operands."""

    def both(rows: jax.Array, weights: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(lambda a, b: product(a, b, sizes), rows, weights)
        return out, back(cotangent)

    return jax.jit(both)


def grouped_claims(rounds: int, calls: int) -> list[Result]:
    keys = jax.random.split(jax.random.key(2), 3)
    arrays = (
        jax.random.normal(keys[0], (ROWS, WIDTH), jnp.bfloat16),
        jax.random.normal(keys[1], (GROUPS, WIDTH, HIDDEN), jnp.bfloat16),
        jnp.full((GROUPS,), ROWS // GROUPS, jnp.int32),
    )
    cotangent = jax.random.normal(keys[2], (ROWS, HIDDEN), jnp.bfloat16)
    products = {"ours": grouped_matmul, "ragged_dot": jax.lax.ragged_dot}
    forward = {name: jax.jit(product) for name, product in products.items()}
    both = {name: grouped_gradients(product) for name, product in products.items()}
    claims: list[Result] = []
    for what, functions, operands, count in (
        ("forward", forward, arrays, 1),
        ("forward and both gradients", both, (*arrays, cotangent), 3),
    ):
        found = best_ms(functions, *operands, rounds=rounds, calls=calls)
        for name, milliseconds in found.items():
            rate = count * 2 * ROWS * WIDTH * HIDDEN / milliseconds / 1e9
            claims += [
                Result(
                    f"grouped matmuls, {what}, {name}",
                    milliseconds,
                    "ms",
                    key=f"grouped_{count}_{name}",
                    form=".3g",
                    **MEASURED,
                ),
                Result(f"rate of grouped matmuls, {what}, {name}", rate, "TFLOP/s"),
            ]
    return claims


def run_ops(options):
    """Two ops on one NVIDIA GPU against XLA: the gradient of embeddings, and grouped products.

    Rounds of both sides alternate and the best round of each counts: a chip that grew warm would
    otherwise decide. The error is that of the whole gradient against sums in float64.
    """
    report(*embedding_claims(options.rounds, options.calls))
    report(*grouped_claims(options.rounds, options.calls))


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        attention=run_attention,
        cross_entropy=run_cross_entropy,
        ops=run_ops,
    )
