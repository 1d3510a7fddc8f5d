"""The registry of model kinds: whose model it is, in which order, and how to add a framework."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx

from tpukit.errors import TPUModelError
from tpukit.models import (
    Applied,
    Variables,
    enable_gradient_checkpointing,
    register_adapter,
    unregister_adapter,
)
from tpukit.models.adapters.registry import BUILT_IN, adapt, kind_of, known_kinds
from tpukit.observe import diagnose_performance
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step import Workload
from tpukit.training import TPUTrainer

SHAPES = {
    "x": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    "y": jax.ShapeDtypeStruct((8, 4), jnp.float32),
}


# A framework of somebody's own: a model is an object that knows its layers and owns no arrays.
class Module:
    def __init__(self, *widths):
        self.widths = widths

    def start(self, key):
        pairs = list(zip(self.widths, self.widths[1:], strict=False))
        keys = jax.random.split(key, len(pairs))
        return [jax.random.normal(k, pair) / 4 for k, pair in zip(keys, pairs, strict=True)]

    def __call__(self, x):
        raise AssertionError("a model of this framework runs by run(weights, x)")

    def run(self, weights, x):
        for weight in weights[:-1]:
            x = jnp.tanh(x @ weight)
        return x @ weights[-1]


@dataclass(frozen=True)
class ModuleAdapter:
    model: Module
    inputs: Any
    initialised: bool = False

    def init(self, rng):
        return Variables(self.model.start(rng), {})

    def apply(self, variables, batch, *, rng, execution):
        run = execution.remat.wrap(self.model.run)
        return Applied(run(variables.params, *self.inputs.arguments(batch)), {})


def is_module(model):
    return isinstance(model, Module)


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


@pytest.fixture
def registered():
    with register_adapter("layers", recognises=is_module, build=ModuleAdapter):
        yield


def workload(model=None, **options):
    return Workload(
        model or Module(16, 32, 4), batch=SHAPES, inputs=("x",), loss=mean_square, **options
    )


@pytest.mark.usefixtures("registered")
class TestAFrameworkOfOnesOwn:
    def test_a_step_is_the_step_of_the_same_functions(self):
        model = Module(16, 32, 4)
        pair = (model.start, lambda params, batch: model.run(params, batch["x"]))
        results = []
        for one in (model, pair):
            work = workload(one, optimizer=optax.sgd(0.1), remat="full")
            state, metrics = jax.jit(work.train_step)(
                work.init(jax.random.key(0)), work.example_batch()
            )
            results.append((metrics["loss"], state.params))
        jax.tree.map(np.testing.assert_array_equal, *results)

    def test_it_is_sharded_over_a_mesh(self):
        mesh = create_mesh(mesh_shape=(8,), axis_names=("fsdp",))
        work = workload(Module(16, 1024, 4))
        state = work.init_on(mesh, jax.random.key(0))
        assert not state.params[0].sharding.is_fully_replicated
        _, metrics = work.jit_train_step(mesh)(state, work.put_batch(mesh, work.example_batch()))
        assert np.isfinite(float(metrics["loss"]))

    def test_it_trains_through_the_trainer(self, tmp_path):
        def batches():
            draw = np.random.default_rng(0)
            while True:
                x = draw.normal(size=(8, 16)).astype(np.float32)
                yield {"x": x, "y": x[:, :4]}

        trainer = TPUTrainer(
            model=Module(16, 32, 4),
            run_dir=tmp_path,
            settings={"learning_rate": 0.03, "checkpoint_every": 0},
            progress=False,
            devices=jax.devices()[:1],
            inputs=("x",),
            loss=mean_square,
        )
        result = trainer.train(batches(), 30)
        assert result.losses[-1] < 0.7 * result.losses[0]

    def test_it_is_diagnosed(self):
        batch = {name: np.zeros(shape.shape, shape.dtype) for name, shape in SHAPES.items()}
        found = diagnose_performance(
            Module(16, 32, 4), [batch] * 2, steps=1, inputs=("x",), loss=mean_square
        )
        assert found.step_time_s.origin == "measured"

    def test_checkpoints_need_a_way_to_set_them(self):
        with pytest.raises(TPUModelError, match=r"'layers' has no gradient.*remat='full'"):
            enable_gradient_checkpointing(Module(2, 2), checkpoint_policy="full")

    def test_a_name_is_taken_once(self):
        for name in ("layers", "equinox"):
            with pytest.raises(TPUModelError, match=f"'{name}' is registered already"):
                register_adapter(name, recognises=is_module, build=ModuleAdapter)


def test_registered_ones_are_asked_first_and_the_newest_of_them():
    def as_first(model, inputs):
        return ModuleAdapter(Module(1, 1), inputs)

    def as_second(model, inputs):
        return ModuleAdapter(Module(2, 2), inputs)

    def everything(model):
        return True

    def width():
        return adapt("tiny", inputs=("x",), batch_shapes=SHAPES).model.widths[0]

    with register_adapter("first", recognises=everything, build=as_first):
        assert width() == 1
        with register_adapter("second", recognises=everything, build=as_second):
            assert width() == 2
            assert [kind.name for kind in known_kinds()][:3] == [
                *("second", "first"),
                BUILT_IN[0].name,
            ]
        assert width() == 1
    assert kind_of("tiny").name == "reference transformer"


def test_one_registered_with_checkpoints_sets_them():
    def remember(model, remat):
        return ("checkpointed", str(remat))

    with register_adapter("layers", recognises=is_module, build=ModuleAdapter, checkpoint=remember):
        assert enable_gradient_checkpointing(Module(2, 2), 3) == (
            "checkpointed",
            "nothing_saveable every=3",
        )


def test_what_was_not_registered_cannot_be_unregistered():
    with pytest.raises(TPUModelError, match=r"'equinox' is not a registered adapter; .* none"):
        unregister_adapter("equinox")
    layers = register_adapter("layers", recognises=is_module, build=ModuleAdapter)
    with layers, pytest.raises(TPUModelError, match="Did you mean 'layers'"):
        unregister_adapter("layer")


def test_an_adapter_that_lacks_a_method_is_named():
    layers = register_adapter("layers", recognises=is_module, build=lambda model, inputs: model)
    with layers, pytest.raises(TPUModelError, match="'layers' built a Module without initialised"):
        workload()


def derived_from(package, name):
    """A class that could come from `package`: its base says it is from there."""
    base = type(name, (), {"__module__": package, "__call__": lambda self, x: x})
    return type("Net", (base,), {})


class Transformed(NamedTuple):
    init: Any
    apply: Any


Transformed.__module__ = "haiku._src.transform"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (derived_from("keras.src.models.model", "Model")(), "Net belongs to Keras"),
        (Transformed(len, len), r"Transformed belongs to Haiku.*init\(rng\)"),
        (torch.nn.Linear, "the class Linear is not a supported model; pass an instance"),
        (Module(2, 2), "Module is not a supported model"),
        (linen.Dense, "the class Dense is not a supported model; pass an instance"),
        (functools.partial(Module, 2), "partial is not a supported model"),
        (optax.sgd(0.1), "GradientTransformation.* is not a supported model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_model(model, message):
    with pytest.raises(TPUModelError, match=message) as refused:
        Workload(model, batch=SHAPES)
    text = str(refused.value)
    assert all(kind.accepts in text for kind in BUILT_IN)
    assert "tpukit.models.register_adapter" in text


def make_module(width, rngs):
    return nnx.Linear(16, width, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (linen.Dense(4), "flax linen"),
        (nnx.bridge.ToLinen(nnx.Linear, args=(16, 4)), "flax linen"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "flax nnx"),
        (nnx.Linear, "flax nnx function"),
        (functools.partial(make_module, 4), "flax nnx function"),
        (functools.partial(nnx.Linear, 16, 4), "flax nnx function"),
        (jax.jit(make_module), "flax nnx function"),
        (torch.nn.Linear(2, 2), "PyTorch"),
        ((len, len), "functions"),
        ([len, len], "functions"),
    ],
)
def test_whose_model_it_is(model, name):
    assert kind_of(model).name == name


def test_a_framework_that_is_not_loaded_is_not_imported():
    program = (
        "import sys; from tpukit.models.adapters.registry import kind_of;"
        "from flax import linen; assert kind_of(linen.Dense(4)).name == 'flax linen';"
        "sys.exit(bool({'equinox', 'torch', 'keras', 'haiku'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
