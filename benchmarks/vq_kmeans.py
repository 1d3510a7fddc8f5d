"""k-means of a million 8-vectors into 1024 entries, 25 passes: ours, faiss and scikit-learn.

Each is timed on the same vectors in this process, in turn, `--rounds` times; the least time counts.
faiss sees all vectors in every pass, not its sample. Ours is timed after a call that compiled it;
the time of that first call is printed too. The error is the mean square of what a value loses, on
vectors that nobody was fitted to. scikit-learn's mini-batches take minutes: `--no-sklearn` leaves
them out. On a machine with a GPU, `--torch` compares with Lloyd's passes in torch instead.

python benchmarks/vq_kmeans.py [--no-sklearn] [--rounds 3] [--vectors 1000000]
python benchmarks/vq_kmeans.py --torch
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from claims import Claim, report

from tpukit.quantization import train_codebook
from tpukit.quantization.codebooks.nearest import nearest

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-sklearn", action="store_true")
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
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
    report(Claim(f"tpukit, first call, on {jax.default_backend()}", first, "s"))
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
            Claim(f"{name}: seconds", seconds[name], "s"),
            Claim(f"{name}: held-out error", errors[name], ""),
        )
    others = [name for name in seconds if name != "tpukit"]
    fastest = min(others, key=seconds.__getitem__)
    lowest = min(errors[name] for name in others)
    report(
        Claim(
            f"time beside the fastest, {fastest}", seconds["tpukit"] / seconds[fastest], "×", 1.0
        ),
        Claim("error beside the lowest of them", errors["tpukit"] / lowest, "×", 1.0),
    )


if __name__ == "__main__":
    main()
