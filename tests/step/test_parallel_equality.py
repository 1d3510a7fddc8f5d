"""However the work is split, five steps give the numbers one device gives."""

import dataclasses
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import optax
import pytest

from tpukit.models.presets import get_preset
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.workload import Workload

STEPS = 5
MODELS = {
    "dense": get_preset("tiny", n_layers=4, d_model=32, d_ff=64, head_dim=8, vocab_size=64),
    "moe": get_preset("tiny-moe", d_model=32, d_ff=32, head_dim=8, vocab_size=64),
    "gemma-like": get_preset(
        "tiny",
        n_layers=4,
        d_model=32,
        d_ff=64,
        head_dim=8,
        vocab_size=64,
        layer_kinds={"local": {"sliding_window": 4}, "global": {}},
        layer_pattern="local, global",
        tied_embeddings=True,
    ),
    "latent": get_preset(
        "tiny-moe",
        dtype="float64",
        param_dtype="float64",
        n_layers=4,
        d_model=32,
        d_ff=32,
        head_dim=12,
        vocab_size=64,
        latent={"kv_rank": 8, "q_rank": 12, "nope_dim": 8, "rope_dim": 4, "v_dim": 8},
        shared_d_ff=16,
        router_score="sigmoid",
        router_choice_bias=True,
        router_scale=2.5,
    ),
    "predicting": get_preset(
        "tiny-moe",
        dtype="float64",
        param_dtype="float64",
        n_layers=5,
        d_model=32,
        d_ff=32,
        head_dim=8,
        vocab_size=64,
        mtp_layers=2,
        layer_kinds={"dense": {"n_experts": 0, "experts_per_token": 0}, "moe": {}},
        layer_pattern="dense then moe",
    ),
    "linear": get_preset(
        "tiny",
        dtype="float64",
        param_dtype="float64",
        n_layers=4,
        d_model=32,
        d_ff=32,
        head_dim=8,
        vocab_size=64,
        layer_kinds={
            "linear": {
                "delta": {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8},
            },
            "full": {"attention_gate": True, "qk_norm": "head"},
        },
        layer_pattern="linear, full",
    ),
    "sinks": get_preset(
        "tiny-moe",
        n_layers=4,
        d_model=32,
        d_ff=32,
        head_dim=8,
        vocab_size=64,
        attention_sinks=True,
        attention_bias="qkvo",
        attention_soft_cap=20.0,
        logit_soft_cap=30.0,
        expert_bias=True,
        router_bias=True,
        activation="clamped_swiglu",
        layer_kinds={"local": {"sliding_window": 4}, "global": {}},
        layer_pattern="local, global",
    ),
}

# Long enough for the convolution to reach no further than the piece before.
LENGTHS = {"linear": 32}
# In these a difference of float32's last digit is one of 1e-2 in the loss after five steps.
IN_FLOAT64 = ("latent", "linear", "predicting")
RATES = {"linear": 0.003}  # parts of it are float32 whatever the rest is, and that grows


@dataclass(frozen=True)
class Case:
    model: str
    strategy: str
    sizes: tuple[tuple[str, int], ...]
    microbatches: int = 1
    pipeline_schedule: str = "1f1b"
    remat: str = "none"
    loss_chunks: int | None = None

    def __str__(self):
        return f"{self.model}-{self.strategy}-{'x'.join(str(size) for _, size in self.sizes)}"


def case(model, strategy, /, **options):
    about_the_step = ("microbatches", "pipeline_schedule", "remat")
    own = {name: options.pop(name) for name in about_the_step if name in options}
    return Case(model, strategy, tuple(options.items()), **own)


# Every strategy at least once, in the products that people run. One device computes its loss from
# whole logits; here it is cut into chunks, 3 of which never come out even.
QUICK = [
    case("dense", "fsdp+megatron+sequence", data=4, model=2),
    case("dense", "fsdp+context", fsdp=2, context=4),
    case("moe", "fsdp+expert+megatron", fsdp=2, expert=2, model=2),
    case("latent", "fsdp+expert+megatron", fsdp=2, expert=2, model=2),
    case("linear", "fsdp+context", fsdp=2, context=4),
]
SLOW = [
    case("dense", "pipeline+fsdp+megatron", stage=2, fsdp=2, model=2, microbatches=2),
    *QUICK,
    case("dense", "fsdp", fsdp=8),
    case("gemma-like", "pipeline+fsdp+megatron", stage=2, fsdp=2, model=2, microbatches=2),
    case("dense", "data", data=8, remat="full"),
    case("dense", "megatron", model=4),
    case("dense", "megatron+sequence", model=2),
    case("dense", "fsdp+megatron", replica=2, fsdp=2, model=2),
    case("dense", "context", context=8),
    case("dense", "megatron+context", model=2, context=4, remat="minimal"),
    case("gemma-like", "fsdp+context", fsdp=2, context=2, remat="full"),
    case("dense", "pipeline", stage=4, microbatches=4, pipeline_schedule="gpipe"),
    case("dense", "pipeline", stage=4, microbatches=8),
    case("dense", "pipeline+context", stage=2, context=2, microbatches=2),
    case("moe", "fsdp", fsdp=8),
    case("moe", "fsdp", fsdp=4, zero=2),
    case("moe", "megatron", model=4),
    case("moe", "expert", expert=4),
    case("moe", "fsdp+expert", fsdp=2, expert=4, remat="full"),
    case("moe", "fsdp+context", fsdp=2, context=4),
    case("moe", "pipeline+expert", stage=2, data=2, expert=2, microbatches=2),
    case("moe", "pipeline+fsdp+megatron", stage=2, fsdp=2, model=2, microbatches=2),
    case("latent", "fsdp", fsdp=4, zero=2),
    case("latent", "fsdp+context", fsdp=2, context=4),
    case("latent", "pipeline+expert", stage=2, data=2, expert=2, microbatches=2),
    case("linear", "fsdp+megatron", fsdp=4, model=2, remat="full"),
    case("linear", "pipeline+fsdp", stage=2, fsdp=4, microbatches=2),
    case("predicting", "fsdp+expert+megatron", fsdp=2, expert=2, model=2),
    case("predicting", "fsdp+context", fsdp=2, context=4),
    case("predicting", "pipeline+fsdp", stage=2, fsdp=4, microbatches=2),
    case("predicting", "pipeline", stage=4, microbatches=2, pipeline_schedule="gpipe"),
    case("sinks", "fsdp+expert+megatron", fsdp=2, expert=2, model=2),
    case("sinks", "fsdp+context", fsdp=2, context=4),
]


def workload(case):
    return Workload(
        MODELS[case.model],
        batch_size=8,
        sequence_length=LENGTHS.get(case.model, 16),
        optimizer=optax.sgd(RATES.get(case.model, 0.3)),
        strategy=case.strategy,
        microbatches=case.microbatches,
        pipeline_schedule=case.pipeline_schedule,
        remat=case.remat,
        loss_chunks=case.loss_chunks,
    )


@cache
def first_state(model):
    """Made by numpy: a compiled initialisation would cost more than the steps."""
    rng = np.random.default_rng(0)
    work = Workload(
        MODELS[model],
        batch_size=8,
        sequence_length=LENGTHS.get(model, 16),
        optimizer=optax.sgd(RATES.get(model, 0.3)),
    )

    def draw(path, leaf):
        if path[-1].key == "scale":
            return np.ones(leaf.shape, leaf.dtype)
        return rng.normal(0, leaf.shape[-2] ** -0.5, leaf.shape).astype(leaf.dtype)

    shapes = work.state_shapes()
    params = jax.tree_util.tree_map_with_path(draw, shapes.params)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return dataclasses.replace(zeros, params=params)


def run(work, step, state):
    losses, norms = [], []
    for number in range(STEPS):
        state, metrics = step(state, work.example_batch(number))
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    return np.asarray(losses), np.asarray(norms), jax.device_get(state.params)


@cache
def on_one_device(model, microbatches):
    work = workload(Case(model, "data", (), microbatches=microbatches))
    state = first_state(model)
    return run(work, jax.jit(work.train_step), state)


def check(case):
    names, sizes = zip(*case.sizes, strict=True)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = create_mesh(mesh_shape=sizes, axis_names=names, devices=devices)
    work = workload(case)
    compiled = work.jit_train_step(mesh)
    places = work.shardings(mesh)
    # The balance loss of a micro-batch is its own, so an MoE is compared piece for piece.
    pieces = case.microbatches if MODELS[case.model].has_experts else 1
    losses, norms, params = run(
        work,
        lambda state, batch: compiled(state, jax.device_put(batch, places.batch)),
        jax.device_put(first_state(case.model), places.state),
    )
    expected_losses, expected_norms, expected_params = on_one_device(case.model, pieces)
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected_params)


def precisely(case):
    with jax.enable_x64(case.model in IN_FLOAT64):
        check(case)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equal(case):
    precisely(dataclasses.replace(case, loss_chunks=3))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_equal_in_every_product(case):
    precisely(case)


def test_the_comparison_can_fail():
    losses, _, _ = on_one_device("dense", 1)
    assert len(set(losses.tolist())) == STEPS, "training moves, so a frozen model would show"
