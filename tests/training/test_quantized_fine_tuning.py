"""Adapters beside a quantized folder or rounded weights: trained, gone on with, merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import ConfigError
from tpukit.job import Job, TrainingSettings
from tpukit.job.step import build_step
from tpukit.models import get_preset
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.execution import Execution
from tpukit.models.stored.parameter import is_stored
from tpukit.models.stored.running import dense_parameters
from tpukit.quantization import quantize_for_tpu, save_quantized
from tpukit.training import TPUTrainer
from tpukit.training.export import export_run
from tpukit.training.trained_model import load_trained

pytestmark = pytest.mark.usefixtures("compile_quickly")
CONFIG = get_preset(
    "tiny", d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64, vocab_size=64, n_layers=2,
    dtype="float32", param_dtype="float32",
)  # fmt: skip
SHAPE = {"batch_size": 4, "sequence_length": 16}
LORA = {"rank": 4, "alpha": 8.0}


def params():
    return TransformerAdapter(CONFIG).init(jax.random.key(3)).params


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder that `tpukit quantize` could have written."""
    folder = tmp_path_factory.mktemp("quantized") / "small"
    made = quantize_for_tpu(CONFIG, 8, params=params())
    return save_quantized(made, folder, tokenizer="bytes")


def tokens():
    steps = np.random.default_rng(0).choice([1, 2], size=4000, p=[0.9, 0.1])
    return (np.cumsum(steps) % 64).astype(np.uint16)


def trainer(run, **train):
    return TPUTrainer(
        model=CONFIG, use_bf16=False, progress=False, devices=jax.devices()[:1],
        settings=TrainingSettings(
            run_dir=str(run), learning_rate=0.01, checkpoint_every=3, **train
        ),
    )  # fmt: skip


def logits(params):
    module = TransformerAdapter(CONFIG).module(params, Execution())
    return np.asarray(module(jnp.arange(12)[None]))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["folder", "int4"])
def test_adapters_beside_quantized_weights_from_first_step_to_export(small, tmp_path, source):
    run = tmp_path / "run"
    how = {"lora": LORA, "init_from": str(small)}
    if source == "int4":
        how = {"lora": {**LORA, "base": "int4"}}
    first = trainer(run, **how).train(tokens(), 3, **SHAPE)
    second = trainer(run, **how).train(tokens(), 6, **SHAPE)
    assert second.resumed_from == 3
    assert second.losses[-1] < first.losses[0]
    merged = load_trained(run).params
    assert not any(map(is_stored, jax.tree.leaves(merged, is_leaf=is_stored)))
    export_run(run, tmp_path / "out")
    np.testing.assert_allclose(
        logits(load_trained(tmp_path / "out").params), logits(merged), atol=1e-5
    )
    if source == "folder":
        without = logits(dense_parameters(load_trained(small).params))
        assert abs(logits(merged) - without).max() > 0.01
        export_run(run, tmp_path / "adapters", adapters=True)
        beside = load_trained(tmp_path / "adapters").params
        np.testing.assert_allclose(logits(beside), logits(merged), atol=1e-5)


def test_a_job_reads_formats_from_the_folder_it_begins_with(small):
    words = {"model": str(small), "on": "v6e-4", "batch_size": 4, "sequence_length": 16}
    job = Job.from_dict({**words, "train": {"lora": LORA, "init_from": str(small)}})
    state = build_step(job).work.state_shapes()
    up = state.model_state["base"]["layers"]["mlp"]["up_proj"]["kernel"]
    assert is_stored(up)
    assert up.parts[0].format == "int8"
    plain = Job.from_dict({**words, "train": {"lora": LORA}})
    assert job.key != plain.key
    twice = {**LORA, "base": "int4"}
    with pytest.raises(ConfigError, match="leave base out"):
        build_step(Job.from_dict({**words, "train": {"lora": twice, "init_from": str(small)}}))


def test_a_rounded_base_takes_the_bytes_of_its_format():
    words = {"model": "llama3.2-1b", "on": "v6e-4", "batch_size": 4, "sequence_length": 512}

    def base_bytes(**lora):
        job = Job.from_dict({**words, "train": {"lora": {"rank": 8, "alpha": 16, **lora}}})
        base = build_step(job).work.state_shapes().model_state["base"]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(base["layers"]))

    wide = base_bytes()
    assert base_bytes(base="int8") == pytest.approx(wide / 2, rel=0.01)
    assert base_bytes(base="int4") == pytest.approx(wide * 4.25 / 16, rel=0.01)


def test_an_export_says_that_it_widens(small, tmp_path):
    written = export_run(small, tmp_path / "wide")
    assert any("dequantized to" in note for note in written.notes)
    before = sum(file.stat().st_size for file in small.iterdir())
    assert written.size_bytes > before
    again = export_run(tmp_path / "wide", tmp_path / "again")
    assert again.notes == ()
    wide = dense_parameters(load_trained(small).params)
    np.testing.assert_allclose(logits(load_trained(tmp_path / "wide").params), logits(wide))
