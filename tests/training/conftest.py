"""A language model of one table: it compiles at once, and the trainer is what is tested."""

import jax
import numpy as np
import pytest

from tpukit.job import TrainingSettings
from tpukit.training import TPUTrainer

VOCABULARY = 32


def init(rng):
    return {"table": 0.1 * jax.random.normal(rng, (VOCABULARY, VOCABULARY))}


def apply(params, batch):
    return params["table"][batch["inputs"]]


@pytest.fixture(scope="module")
def compile_quickly():
    """What is compiled here runs a few times: optimising it takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tokens():
    """A walk that mostly goes up by one: there is something to learn."""
    steps = np.random.default_rng(0).choice([1, 2], size=8000, p=[0.9, 0.1])
    return (np.cumsum(steps) % VOCABULARY).astype(np.uint16)


@pytest.fixture
def table_trainer(tmp_path):
    """(settings, options of the trainer) -> a trainer on one device."""

    def make(model=(init, apply), **options):
        own = options.pop("own_hooks", ())
        names = TrainingSettings.model_fields
        given = {name: options.pop(name) for name in list(options) if name in names}
        defaults = {"learning_rate": 0.1, "checkpoint_every": 0, "run_dir": str(tmp_path / "run")}
        return TPUTrainer(
            model=model,
            use_bf16=options.pop("use_bf16", False),
            settings=TrainingSettings(**{**defaults, **given}),
            hooks=own,
            progress=options.pop("progress", False),
            devices=options.pop("devices", jax.devices()[:1]),
            **options,
        )

    return make
