"""Plans that train adapters alone (LoRA): held to the step's own arrays, and to counts by hand."""

import jax
import pytest

from tpukit.cli.plan import _lora
from tpukit.errors import ConfigError, TPUModelError, TPUValidationError
from tpukit.job import Job
from tpukit.job.step import build_step
from tpukit.models import get_preset
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.lora.spec import LoraSpec, lora_multiply_adds
from tpukit.planner.cost.memory_model import MeshRoles, estimate_memory_bytes
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.planning import plan
from tpukit.quantization import quantize_for_tpu, save_quantized

RANK = {"rank": 16}


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def planned(model="llama3.1-8b", **asked):
    return plan(model, **{"tokens": 1e9, "on": "v6e", "max_chips": 16, "verify": 0, **asked})


@pytest.mark.parametrize("base", [None, pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_state_is_that_of_the_steps_own_arrays(base):
    lora = RANK | ({} if base is None else {"base": base})
    job = Job.from_dict(
        {"model": "llama3.2-1b", "on": "v6e-1", "mesh": {"fsdp": 1}, "batch_size": 1,
         "sequence_length": 512, "train": {"lora": lora}}
    )  # fmt: skip
    state = build_step(job, values=False).work.state_shapes()
    shape = shape_of(get_preset("llama3.2-1b"), LoraSpec(**lora))
    found = estimate_memory_bytes(shape, MeshRoles(), per_device_batch=1, sequence_length=512)
    kept = nbytes(state.model_state) + nbytes(state.params)
    assert found.weights == pytest.approx(kept, rel=0.01)
    assert found.optimizer == pytest.approx(nbytes(state.opt_state), rel=0.01)
    assert shape.thin.parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_experts_are_counted_by_what_a_token_meets():
    config = get_preset("mixtral-8x7b")
    spec = LoraSpec(rank=4, targets=("experts/down_proj",))
    each = 4 * (config.expert_d_ff + config.d_model)
    assert lora_multiply_adds(spec, config) == config.n_layers * config.experts_per_token * each
    thin = shape_of(config, spec).thin
    assert thin.parameters == config.n_layers * config.n_experts * each
    assert thin.sums_experts


def test_no_gradients_of_the_model_and_two_gathers_of_three():
    how = {"on": "v6e-16", "objective": "fastest", "max_batch_tokens": "512k"}
    whole, thin, four = (
        planned(**how, lora=lora).best for lora in (None, RANK, {**RANK, "base": "int4"})
    )
    assert (thin.batch_size, thin.mesh, thin.remat) == (whole.batch_size, whole.mesh, whole.remat)
    gathered = thin.seconds_by_cause["ici"] / whole.seconds_by_cause["ici"]
    assert gathered == pytest.approx(2 / 3, rel=0.02)
    # Three products of a weight without what is recomputed, of which one is not made.
    gradients = whole.seconds_by_cause["matrix"] - thin.seconds_by_cause["matrix"]
    assert 0.2 < gradients / whole.seconds_by_cause["matrix"] < 0.34
    assert thin.step_time_s < whole.step_time_s < four.step_time_s * 1.1
    assert thin.memory["optimizer"] < whole.memory["optimizer"]
    flops = [one.model_flops / one.tokens_per_step for one in (whole, thin)]
    assert 0.66 < flops[1] / flops[0] < 0.72
    assert four.memory["weights"] < thin.memory["weights"]


def test_fewer_chips_hold_adapters_and_fewer_still_quantized_weights():
    chips = {
        str(lora): planned(
            "llama3.1-70b", objective="fewest-chips", max_chips=256, lora=lora
        ).best.slice.chips
        for lora in (None, RANK, {**RANK, "base": "int4"})
    }
    whole, wide, narrow = chips.values()
    assert narrow < wide < whole


def test_the_job_asks_for_it_and_the_next_command_too(tmp_path):
    lora = {"rank": 8, "base": "int4", "targets": ["q_proj", "v_proj"]}
    found = planned(on="v6e-4", lora=lora)
    assert any("adapters are trained" in line and "in int4" in line for line in found.assumptions)
    assert "--set train.lora.rank=8" in found.next_command
    found.to_yaml(tmp_path / "job.yaml")
    settings = Job.from_yaml(tmp_path / "job.yaml").train.lora
    assert (settings.rank, settings.base) == (8, "int4")
    assert settings.targets == ("q_proj", "v_proj")


@pytest.mark.slow
def test_a_quantized_folder_counts_as_it_is_kept(tmp_path):
    config = get_preset("tiny").replace(vocab_size=64, max_seq_len=64)
    params = TransformerAdapter(config).init(jax.random.key(0)).params
    made = quantize_for_tpu(config, bits=8, params=params)
    arrays = save_quantized(made, tmp_path / "small") / "quantized.safetensors"
    found = planned(str(tmp_path / "small"), tokens=1e6, on="v6e-1", lora={"rank": 4})
    thin = found.ask.subject.shape.thin
    assert thin.kept_bytes == pytest.approx(arrays.stat().st_size)
    assert thin.stored
    assert "bits a weight, as they are kept" in thin.base
    assert found.best.job.train.init_from == str(tmp_path / "small")


@pytest.mark.parametrize(
    ("lora", "error", "said"),
    [
        ({"ranc": 8}, TPUValidationError, "ranc"),
        ({"rank": 8, "base": "int3"}, TPUValidationError, "int3"),
        ({"rank": 8, "targets": ["q_porj"]}, TPUModelError, "q_proj"),
    ],
)
def test_wrong_adapters_are_told_what_is_right(lora, error, said):
    with pytest.raises(error, match=said):
        planned(lora=lora)


def test_options_without_a_rank_are_refused():
    with pytest.raises(ConfigError, match="--lora-rank"):
        _lora(None, None, "int4")
    assert _lora(4, "q_proj, v_proj", None) == {"rank": 4, "targets": ["q_proj", "v_proj"]}
