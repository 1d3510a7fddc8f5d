"""`precision` reaches the products of a run, from the settings and from TPUConfig."""

import jax
import pytest

from tpukit.config import TPUConfig
from tpukit.errors import TPUModelError
from tpukit.models import Workload, get_preset
from tpukit.training import TPUTrainer, TrainingSettings
from tpukit.training.precision import in_precision


@pytest.mark.parametrize("model", ["tiny", Workload("tiny", batch_size=2, sequence_length=8)])
def test_float8_is_put_into_reference_models(model):
    found, note = in_precision(model, "float8")
    config = found.config if isinstance(found, Workload) else found
    assert (config.matmul, config.dtype) == ("float8", "bfloat16")
    assert "imitated on cpu" in note
    back, silent = in_precision(found, "float32")
    config = back.config if isinstance(back, Workload) else back
    assert (config.matmul, config.dtype, silent) == ("dtype", "float32", None)


def traced(work):
    return str(jax.make_jaxpr(work.train_step)(work.state_shapes(), work.batch_shapes()))


@pytest.mark.parametrize(
    "options",
    [
        {"settings": TrainingSettings(precision="float8")},
        {"config": TPUConfig(precision="float8")},
    ],
)
def test_a_trainer_multiplies_in_float8(options):
    trainer = TPUTrainer(model="tiny", devices=jax.devices()[:1], progress=False, **options)
    work = trainer._choice.workload(batch_size=2, sequence_length=8)
    jaxpr = traced(work)
    assert "f8_e4m3fn" in jaxpr
    assert "f8_e5m2" in jaxpr
    wide = work.replace(model=get_preset("tiny"))
    assert "f8_" not in str(
        jax.make_jaxpr(wide.train_step)(wide.state_shapes(), wide.batch_shapes())
    )


def test_ones_own_model_is_cast_from_outside_or_refused():
    own = (lambda rng: {}, lambda params, batch: 0.0)
    assert in_precision(own, "bfloat16") == (own, None)
    with pytest.raises(TPUModelError, match=r"call tpukit.models.float8.float8_matmul"):
        in_precision(own, "float8")
