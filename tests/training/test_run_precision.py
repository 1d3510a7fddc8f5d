"""`precision` reaches the products of a run, from the settings and from TPUConfig."""

import jax
import pytest

from tpukit.errors import TPUModelError
from tpukit.job import TrainingSettings, build_step
from tpukit.job.config import TPUConfig
from tpukit.job.precision import in_precision
from tpukit.models import get_preset
from tpukit.step import Workload
from tpukit.training import TPUTrainer


@pytest.mark.parametrize("precision", ["float8", "float8_static", "int8"])
@pytest.mark.parametrize(
    "model", [get_preset("tiny"), Workload("tiny", batch_size=2, sequence_length=8)]
)
def test_eight_bits_are_put_into_reference_models(model, precision):
    found = in_precision(model, precision, None)
    config = found.model.config if isinstance(model, Workload) else found.model
    assert (config.matmul, config.dtype) == (precision, "bfloat16")
    assert "emulated on cpu" in found.note
    back = in_precision(found.model, "float32", "bfloat16")
    config = back.model.config if isinstance(model, Workload) else back.model
    assert (config.matmul, config.dtype, back.note) == ("dtype", "float32", None)
    assert config.param_dtype == "bfloat16"


def traced(work):
    return str(jax.make_jaxpr(work.train_step)(work.state_shapes(), work.batch_shapes()))


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"settings": TrainingSettings(precision="float8")}, ("f8_e4m3fn", "f8_e5m2")),
        ({"config": TPUConfig(precision="float8")}, ("f8_e4m3fn", "f8_e5m2")),
        ({"settings": TrainingSettings(precision="float8_static")}, ("f8_e4m3fn", "f8_e5m2")),
        ({"config": TPUConfig(precision="float8_static")}, ("f8_e4m3fn", "f8_e5m2")),
        ({"settings": TrainingSettings(precision="int8")}, ("i8[", "preferred_element_type=int32")),
        ({"config": TPUConfig(precision="int8")}, ("i8[", "preferred_element_type=int32")),
    ],
)
def test_a_trainer_multiplies_in_eight_bits(options, formats):
    trainer = TPUTrainer(model="tiny", devices=jax.devices()[:1], progress=False, **options)
    work = build_step(trainer.job.replace(batch_size=2, sequence_length=8)).work
    narrow, wide = traced(work), traced(work.replace(model=get_preset("tiny")))
    for name in formats:
        assert name in narrow
        assert name not in wide


def test_ones_own_model_is_cast_from_outside_or_refused():
    own = (lambda rng: {}, lambda params, batch: 0.0)
    found = in_precision(own, "bfloat16", "bfloat16")
    assert found.model is own
    assert found.options == {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"}
    for precision in ("float8", "int8"):
        with pytest.raises(TPUModelError, match=rf"matmul_in_format\(.{precision}., x, weight\)"):
            in_precision(own, precision, None)
