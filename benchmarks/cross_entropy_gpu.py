"""Cross-entropy from hidden states: our chunks against whole logits in XLA, time and memory.

    python benchmarks/cross_entropy_gpu.py [--shape 8192x4096x128256] [--rounds 3] [--json FILE]

Each contestant makes loss and gradients of x and w in a process of its own, so that the peak of
device memory is its own (measured by the allocator; None where there is none, as on a CPU). It is
compiled in another process before that: choosing algorithms, XLA allocates more than some need.
Rounds alternate, and the best median counts. A ratio below 1 means that we need less; ours are
float32 logits, so bfloat16 ones are the harder contestant.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import claims

SHAPES = ("8192x4096x128256", "4096x4096x151936", "16384x2048x128256", "8192x3840x262144")
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
    command = [sys.executable, __file__, "--one", name, "--shape", shape, "--steps", str(steps)]
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


def compare(shape, rounds, steps):
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


def report(shape, best):
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
            claims.report(
                claims.Claim(
                    f"{what} over the better XLA's", ours[kind] / min(least), "x", at_most=1
                )
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="TOKENSxWIDTHxVOCAB; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.shape[0], options.steps)))
        return
    figures = {}
    for shape in options.shape or SHAPES:
        figures[shape] = compare(shape, options.rounds, options.steps)
        report(shape, figures[shape])
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
