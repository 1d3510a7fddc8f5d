"""A step's matmuls and their algorithms: read from XLA's texts, and given back to it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit import create_mesh
from tpukit.job.train import TrainingSettings
from tpukit.step import Workload
from tpukit.training import TPUTrainer
from tpukit.training.matmul_tuning import (
    Matmul,
    Matrix,
    matmuls_in,
    result_key,
    results_file,
    split_results,
    tuned_options,
    with_algorithm,
)
from tpukit.training.recompile import StepProgram

CONFIG = (
    'backend_config={{"gemm_backend_config":{{"beta":{beta},"dot_dimension_numbers":{{'
    '"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["{left}"],'
    '"rhs_batch_dimensions":[],"rhs_contracting_dimensions":["{right}"]}}{chosen}}}}}'
)


def call(name, out, operands, left, right, *, beta=0, chosen=',"selected_algorithm":"6"'):
    names = ", ".join(f"%{operand}" for operand in operands)
    config = CONFIG.format(beta=beta, left=left, right=right, chosen=chosen)
    return (
        f"  %{name} = ({out}, s8[33554432]{{0}}) custom-call({names}), "
        f'custom_call_target="__cublas$lt$matmul", metadata={{op_name="dot"}}, {config}'
    )


TEXT = "\n".join(
    [
        "HloModule jit_train_step",
        "  %x = bf16[64,32]{1,0} parameter(0)",
        "  %w.1 = bf16[32,128]{1,0} bitcast(%stack)",
        "  %turned = bf16[128,64]{0,1} bitcast(%dy)",
        "  %wide = f32[32,128]{1,0} parameter(3)",
        call("y.1", "bf16[64,128]{1,0}", ("x", "w.1"), 1, 0),
        call("y.2", "bf16[64,128]{1,0}", ("x", "w.1"), 1, 0, chosen=',"selected_algorithm":"0"'),
        call("added", "bf16[64,128]{1,0}", ("x", "w.1", "y.1"), 1, 0, beta=1),
        call("sliced", "bf16[64,128]{1,0}", ("x", "w.1"), 1, 0, chosen=""),
        call("single", "f32[64,128]{1,0}", ("x", "wide"), 1, 0),
        call("gradient", "bf16[128,32]{1,0}", ("turned", "x"), 1, 0),
    ]
)
FORWARD = Matmul(
    Matrix("bf16", (64, 32)), Matrix("bf16", (32, 128)), Matrix("bf16", (64, 128)), (1, 0)
)
GRADIENT = Matmul(
    Matrix("bf16", (128, 64), by_rows=False),
    Matrix("bf16", (64, 32)),
    Matrix("bf16", (128, 32)),
    (1, 0),
)


def test_plain_narrow_products_whose_algorithm_was_chosen_are_found_and_counted():
    assert matmuls_in(TEXT) == {FORWARD: 2, GRADIENT: 1}


def test_flops_are_those_of_the_shapes():
    assert FORWARD.flops == 2 * 64 * 32 * 128
    assert GRADIENT.flops == 2 * 128 * 64 * 32


sizes = st.tuples(st.integers(1, 10**6), st.integers(1, 10**6))
matrices = st.builds(Matrix, st.sampled_from(["bf16", "f16"]), sizes, st.booleans())
axes = st.tuples(st.integers(0, 1), st.integers(0, 1))


@given(st.builds(Matmul, matrices, matrices, matrices, axes))
def test_a_product_survives_json(product):
    assert Matmul.from_dict(json.loads(json.dumps(product.to_dict()))) == product


@given(st.text())
def test_any_text_is_read_without_complaint(text):
    assert matmuls_in(text) == {}
    for block in split_results(text):
        result_key(block)


def result(key: int, value: str) -> str:
    return (
        f'entries {{\n  key {{ target {{ hlo_fingerprint: "{key}" }} }}\n'
        f"  value {{ optimal_config {{ {value} }} }}\n}}"
    )


gemms = st.one_of(
    st.builds(
        "backend_config {{ gemm {{\n algorithm: {}\n autotune_workspace_size: 33 }} }}".format,
        st.integers(0, 99),
    ),
    st.just("backend_config { gemm {\n autotune_workspace_size: 33\n } }"),
)


@given(st.dictionaries(st.integers(0, 10**9), gemms), st.integers(0, 99), st.integers(0, 99))
def test_an_algorithm_is_put_into_a_result_and_nothing_else_changes(entries, one, other):
    blocks = [result(key, value) for key, value in entries.items()]
    native = result(-1, "backend_config { native_emitter { } }")
    read = split_results("\n".join([native, *blocks]))
    assert read == [native, *blocks]
    assert result_key(read[0]) is None
    assert len({result_key(block) for block in read[1:]}) == len(entries)
    for block in read[1:]:
        changed = with_algorithm(block, one)
        assert changed.count(f"algorithm: {one} ") == 1 == changed.count("algorithm:")
        assert "autotune_workspace_size: 33" in changed
        assert (
            result_key(changed) == result_key(block) == result_key(with_algorithm(changed, other))
        )


def test_what_cannot_be_timed_leaves_the_choice_to_xla_and_is_not_kept(tmp_path):
    notes = []
    # The real program, on a machine whose XLA does not know cuBLAS.
    assert tuned_options(TEXT, progress=notes.append, folder=tmp_path / "products") == {}
    assert "timing 2 matmuls" in notes[0]
    assert "XLA's choice stays" in notes[1]
    assert list((tmp_path / "products").iterdir()) == []


def test_what_was_timed_before_is_not_timed_again(tmp_path):
    kept = results_file([FORWARD, GRADIENT], tmp_path)
    kept.write_text(with_algorithm(result(1, "backend_config { gemm { } }"), 3))
    rates = {"0": 650.0, "3": 700.0}
    report = [{"product": FORWARD.to_dict(), "usual": 0, "best": 3, "tflops": rates}]
    kept.with_suffix(".json").write_text(json.dumps(report))
    notes = []
    options = tuned_options(TEXT, progress=notes.append, folder=tmp_path)
    assert options == {"xla_gpu_load_autotune_results_from": str(kept)}
    assert len(notes) == 1
    assert "for 1 another algorithm" in notes[0]


def test_a_step_without_products_has_nothing_to_time(tmp_path):
    assert tuned_options("HloModule empty", progress=str, folder=tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_compiled_again_with_what_tuning_found():
    work = Workload("tiny", batch_size=2, sequence_length=16, optimizer=optax.sgd(0.1))
    mesh = create_mesh(mesh_shape=(1,), axis_names=("data",), devices=jax.devices()[:1])
    texts = []

    def tune(text):
        texts.append(text)
        return {"xla_there_is_no_such_option": True}

    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_there_is_no_such_option"):
        StepProgram(work, mesh, tune=tune).compile()
    assert len(texts) == 1
    assert "HloModule" in texts[0]


def test_elsewhere_than_on_one_gpu_tuning_says_that_it_does_nothing(tmp_path, capsys):
    settings = TrainingSettings(
        run_dir=str(tmp_path / "run"), tune_products=True, checkpoint_every=0
    )
    trainer = TPUTrainer(model="tiny", settings=settings)
    tokens = np.asarray(jnp.arange(2000) % 256, np.int32)
    trainer.train(tokens, num_steps=1, batch_size=8, sequence_length=16)
    assert "tune_products has no effect here" in capsys.readouterr().err
