"""Costs of the trainer: its loop beside a bare one, checkpoints, and the input pipeline.

python benchmarks/trainer.py overhead
python benchmarks/trainer.py checkpoint
python benchmarks/trainer.py input
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "overhead",
        "the trainer beside a bare jit loop",
        options={
            "--steps": 15,
            "--rounds": 4,
        },
    ),
    Subcommand(
        "checkpoint",
        "save and restore of a state of 1 B parameters",
        options={
            "--parameters": {"type": float, "default": 1.0, "help": "billions, about"},
            "--directory": {"type": Path, "help": "a disk with room for two states"},
        },
        environment={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
        },
    ),
    Subcommand("input", "tokens per second out of a memory-mapped file", needs=("grain",)),
)

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpukit.job import TrainingSettings
from tpukit.models import get_preset
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step import Workload
from tpukit.training import TPUTrainer, open_data
from tpukit.training.checkpoint import TPUCheckpointer

WIDTH, LAYERS, BATCH, LENGTH, VOCABULARY = 512, 4, 16, 64, 256


def model():
    def init(rng):
        keys = jax.random.split(rng, 3)
        return {
            "embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
            "layers": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
            "head": jax.random.normal(keys[2], (WIDTH, VOCABULARY)) / WIDTH**0.5,
        }

    def apply(params, batch):
        x = params["embed"][batch["inputs"]]
        for layer in range(LAYERS):
            x = x + jax.nn.silu(x @ params["layers"][layer])
        return x @ params["head"]

    return init, apply


def clocks():
    return time.perf_counter(), time.process_time(), time.thread_time()


def bare_loop(work, mesh, step, tokens, steps):
    """(wall, process CPU, thread CPU) seconds a step of the loop anyone would write."""
    state = work.init_on(mesh, jax.random.key(0))
    stream = open_data(tokens, sequence_length=LENGTH, batch_size=BATCH).stream()
    places = work.shardings(mesh).batch
    state, metrics = step(state, jax.device_put(next(stream), places))
    jax.block_until_ready(metrics)
    began = clocks()
    for _ in range(steps):
        state, metrics = step(state, jax.device_put(next(stream), places))
    jax.block_until_ready((state, metrics))
    took = [(now - then) / steps for now, then in zip(clocks(), began, strict=True)]
    stream.close()
    return took


class Clock:
    """A hook that reads the clocks at every record."""

    def on_start(self, run_dir, identity):
        """Forget earlier runs."""
        self.readings = []

    def on_record(self, record):
        """Read the clock."""
        self.readings.append(clocks())

    def on_end(self, result):
        """Nothing."""


def trainer(tokens, steps, folder):
    """The same of the trainer, with its metrics file, guard and progress figures."""
    clock = Clock()
    result = TPUTrainer(
        model=model(),
        use_bf16=False,
        optimizer=optax.adamw(1e-4),
        settings=TrainingSettings(checkpoint_every=0, run_dir=folder),
        hooks=[clock],
        progress=False,
    ).train(tokens, steps + 1, batch_size=BATCH, sequence_length=LENGTH)
    assert len(result.losses) == steps + 1
    first, last = clock.readings[0], clock.readings[-1]
    return [(now - then) / steps for now, then in zip(last, first, strict=True)]


def run_overhead(options):
    """Measure what the trainer costs outside the step: a bare jit loop and `TPUTrainer` in turn.

    Both run the same compiled step on the same batches. Three figures, all measured:
    - wall: seconds per step of the trainer (with metrics, guard and log) over those of the bare
      loop, the median over rounds. It is meaningful on an idle machine only.
    - CPU: the same ratio of the process's CPU seconds, all threads together. On a CPU the step
      itself is in both, so this is the overhead.
    - host: CPU seconds of the main thread per step, which a device could have to wait for.
    """
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 200_000).astype(np.uint16)
    work = Workload(model(), batch_size=BATCH, sequence_length=LENGTH, optimizer=optax.adamw(1e-4))
    mesh = create_mesh(mesh_shape=(-1,), axis_names=("fsdp",))
    step = work.jit_train_step(mesh).lower(*work.abstract_args(mesh)).compile()
    rows = []
    for number in range(options.rounds):
        turns = ["bare", "trainer"] if number % 2 else ["trainer", "bare"]
        row = {}
        for turn in turns:
            if turn == "bare":
                row[turn] = bare_loop(work, mesh, step, tokens, options.steps)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    row[turn] = trainer(tokens, options.steps, f"{folder}/run")
            wall_s, cpu_s, host_s = row[turn]
            print(
                f"{turn:8} {wall_s * 1e3:7.1f} ms/step, CPU {cpu_s * 1e3:7.1f} ms, "
                f"main thread {host_s * 1e3:5.2f} ms"
            )
        rows.append(row)
    wall, cpu = (
        statistics.median(row["trainer"][one] / row["bare"][one] for row in rows) - 1
        for one in (0, 1)
    )
    host = statistics.median(row["trainer"][2] - row["bare"][2] for row in rows)
    shortest = min(row["bare"][0] for row in rows)
    report(
        Result("bare step, the shortest round", shortest * 1e3, "ms", at_least=100),
        Result("trainer over the bare loop, wall time", wall * 100, "%", at_most=1.0),
        Result("trainer over the bare loop, CPU time", cpu * 100, "%", at_most=1.0),
        Result(
            "main thread of a step that the trainer takes",
            host * 1e3,
            "ms",
            key="main_thread",
            form=".1f",
            compares="measured : measured",
            sample="none",
        ),
        Result("  that is, of the shortest step", host / shortest * 100, "%", at_most=1.0),
    )


GB = 1e9


def bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Words that differ from place to place and from leaf to leaf, the same in every layout."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    words = np.arange(int(np.prod(shape)), dtype=np.uint32)
    words *= np.uint32(2_654_435_761)
    words ^= words >> np.uint32(15)
    words += np.uint32(seed)
    return words.astype(unsigned).view(dtype).reshape(shape)


def filled(shapes):
    """A state of that shape and sharding."""
    leaves, structure = jax.tree.flatten(shapes)
    arrays = []
    for seed, leaf in enumerate(leaves):
        host = bits(leaf.shape, leaf.dtype, seed)
        arrays.append(jax.device_put(host, leaf.sharding))
        arrays[-1].block_until_ready()
    return jax.tree.unflatten(structure, arrays)


def is_same(state) -> bool:
    """Whether every leaf holds the bits it was filled with."""
    for seed, leaf in enumerate(jax.tree.leaves(state)):
        word = np.dtype(f"u{leaf.dtype.itemsize}")
        host = np.ascontiguousarray(leaf).reshape(leaf.shape)
        if not np.array_equal(host.view(word), bits(leaf.shape, leaf.dtype, seed).view(word)):
            return False
    return True


def items_of(work: Workload, mesh) -> dict:
    """What is saved: parameters and optimizer state on a mesh, in bf16."""

    def narrow(leaf):
        dtype = jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    state = work.abstract_args(mesh)[0]
    return jax.tree.map(narrow, {"params": state.params, "opt_state": state.opt_state})


def run_checkpoint(options):
    """Measure the save and restore of a training state of 1 B parameters.

    The state is that of `small-1b` with AdamW, 1.1 B parameters on eight virtual devices (fsdp=8),
    restored onto fsdp=4, tensor=2. Parameters and both moments are bf16 (6.6 GB), so that two
    copies fit beside other work on a 23 GB machine; `--parameters 0.1` takes a tenth of the
    layers. Targets: a save blocks training for less than 1 s, and the restored state is the same
    to the bit.

    On a CPU the arrays are already in host memory. Where they are copied off a device first, add
    that copy to the blocking time: size of a host's shards ÷ its device-to-host rate.
    """
    preset = get_preset("small-1b")
    layers = max(1, round(preset.n_layers * options.parameters))
    work = Workload(
        get_preset("small-1b", n_layers=layers),
        batch_size=8,
        sequence_length=128,
        strategy="fsdp+megatron",
    )
    before = create_mesh(mesh_shape=(8, 1), axis_names=("fsdp", "tensor"))
    after = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "tensor"))
    state = filled(items_of(work, before))
    like = items_of(work, after)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    folder = Path(tempfile.mkdtemp(prefix="tpukit-checkpoint-", dir=options.directory))
    # The next step replaces the parameters in place while they are being written.
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    try:
        with TPUCheckpointer(folder) as checkpointer:
            checkpointer.save(0, warm_up=jnp.ones(8))
            checkpointer.wait()
            start = time.perf_counter()
            checkpointer.save(1, **state)
            blocked_s = time.perf_counter() - start
            start = time.perf_counter()
            params = step(state["params"])
            del state
            checkpointer.wait()
            background_s = time.perf_counter() - start
            del params
            verification = checkpointer.verify(1)
            start = time.perf_counter()
            restored = checkpointer.restore(1, like=like)
            restore_s = time.perf_counter() - start
            same = is_same(restored.items)
    finally:
        shutil.rmtree(folder)
    report(
        Result("parameters", num_parameters / 1e9, "billion"),
        Result("state (bf16 parameters and moments)", num_bytes / GB, "GB"),
        Result(
            f"a save of {num_bytes / GB:.1f} GB blocks training, on CPU devices",
            blocked_s,
            "s",
            at_most=1.0,
            key="save_blocks",
            form=".2f",
            compares="measured : target",
            sample="none",
        ),
        Result("written, digested and recorded behind it in", background_s, "s"),
        Result("  that is", num_bytes / GB / background_s, "GB/s"),
        Result("digests of all files (verify)", verification.elapsed_s, "s"),
        Result("restore on fsdp=4, tensor=2, with verification", restore_s, "s"),
        Result("restored state is the same to the bit", float(same), "", at_least=1.0),
    )
    return 0 if same else 1


TOKENS = 200_000_000
INPUT_VOCABULARY = 50_000
SHAPES = ((8, 2048), (64, 2048), (256, 4096))  # batch of this host, sequence
BY_HAND = "hand-written numpy loop"
ROUNDS, ROUND_S, SETTLE_S = 7, 0.5, 0.2


def hand_loop(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    tokens = np.memmap(path, np.uint16, "r")
    chosen = np.random.default_rng(0)
    while True:
        starts = chosen.integers(0, len(tokens) - sequence - 1, batch)
        inputs = np.stack([tokens[i : i + sequence].astype(np.int32) for i in starts])
        targets = np.stack([tokens[i + 1 : i + 1 + sequence].astype(np.int32) for i in starts])
        yield {"inputs": inputs, "targets": targets}


def grain_by_row(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    tokens = np.memmap(path, np.uint16, "r")

    class Rows:
        def __len__(self) -> int:
            return (len(tokens) - 1) // sequence

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            row = tokens[index * sequence : (index + 1) * sequence + 1].astype(np.int32)
            return {"inputs": row[:-1], "targets": row[1:]}

    rows = grain.MapDataset.source(Rows()).seed(0).shuffle().repeat()
    return iter(rows.to_iter_dataset().batch(batch))


def tpukit_data(path: Path, batch: int, sequence: int) -> Iterator[dict[str, np.ndarray]]:
    data = open_data(
        path,
        sequence_length=sequence,
        batch_size=batch,
        vocab_size=INPUT_VOCABULARY,
        process_index=0,
        process_count=1,
    )
    return data.stream()


def rate(stream: Iterator[dict[str, np.ndarray]]) -> tuple[float, float]:
    """Tokens by second of the clock, and by second of work on all cores."""
    settled = time.perf_counter() + SETTLE_S  # what was read ahead meanwhile does not count
    while time.perf_counter() < settled:
        next(stream)
    drawn, began, worked = 0, time.perf_counter(), time.process_time()
    while (took := time.perf_counter() - began) < ROUND_S:
        drawn += next(stream)["targets"].size
    return drawn / took, drawn / (time.process_time() - worked)


def run_input(options):
    """Measure tokens per second out of a memory-mapped file beside a hand-written numpy loop.

    Both give the same work: random rows of one file as int32 inputs and targets. The loop is what
    people write by hand; grain as its tutorial writes it (one element a row) is there for
    comparison (https://github.com/google/grain/issues/569). Rounds of all three alternate, so that
    a busy machine is busy for all; the figure is the median of the rounds.
    """
    makers: dict[str, Callable[..., Iterator[dict[str, np.ndarray]]]] = {
        "tpukit": tpukit_data,
        BY_HAND: hand_loop,
        "grain, one element a row": grain_by_row,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        numbers = np.random.default_rng(1).integers(0, INPUT_VOCABULARY, TOKENS, dtype=np.uint16)
        numbers.tofile(path)
        for batch, sequence in SHAPES:
            streams = {name: make(path, batch, sequence) for name, make in makers.items()}
            for stream in streams.values():
                rate(stream)  # starts threads, and brings the file into memory for all
            rounds = [{n: rate(s) for n, s in streams.items()} for _ in range(ROUNDS)]
            found = {name: statistics.median(r[name][0] for r in rounds) for name in makers}
            ratios = [
                statistics.median(r["tpukit"][by] / r[BY_HAND][by] for r in rounds)
                for by in range(2)
            ]
            shape = f"batch {batch} x {sequence}"
            report(
                *(Result(f"{shape}: {name}", found[name] / 1e6, "Mtokens/s") for name in makers),
                Result(f"{shape}: tpukit / hand loop", ratios[0], "×", at_least=1.0),
                Result(f"{shape}: the same by processor time", ratios[1], "×"),
            )
            for stream in streams.values():
                if hasattr(stream, "close"):
                    stream.close()


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        overhead=run_overhead,
        checkpoint=run_checkpoint,
        input=run_input,
    )
