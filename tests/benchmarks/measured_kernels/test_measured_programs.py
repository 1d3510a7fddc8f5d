"""Programs written anew from rows: the right arrays and blocks, or a reason why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured_kernels import MeasuredRow, program_of

from tpukit.errors import MissingExtraError, SliceError, TPUError, TPUKernelError
from tpukit.kernels.registry.registry import get_tpu_op

SMALL = st.none() | st.booleans() | st.integers(-1, 1000) | st.floats() | st.text(max_size=8)
JSON = SMALL | st.lists(SMALL, max_size=3) | st.dictionaries(st.text(max_size=8), SMALL, max_size=2)


def as_row(fields):
    return MeasuredRow.model_validate(fields)


def run(program, *arrays):
    return program.function(*arrays)


def test_attention_by_xla_is_attention(attention_row):
    row = as_row(attention_row(impl="xla", config={}, device="tpu7x"))
    program = program_of(row)
    assert program.kind is None
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 256, 2, 128), jnp.bfloat16) for key in keys)
    found = run(program, q, k, v)
    expected = jax.nn.dot_product_attention(q, k, v, scale=0.088, is_causal=True)
    np.testing.assert_allclose(found.astype(float), expected.astype(float), atol=0.03)


def test_a_kernel_has_the_blocks_of_its_row(attention_row):
    program = program_of(as_row(attention_row()))
    assert program.kind == "flash_attention"
    text = str(jax.make_jaxpr(program.function)(*program.arguments))
    assert "pallas_call" in text
    row = attention_row(config=attention_row()["config"] | {"block_q": 128})
    smaller = program_of(as_row(row))
    assert str(jax.make_jaxpr(smaller.function)(*smaller.arguments)) != text


@pytest.mark.parametrize("impl", ["xla", "pallas_mosaic_tpu"])
def test_group_sizes_are_values_and_not_only_shapes(ragged_dot_row, impl):
    lhs, rhs, sizes = program_of(as_row(ragged_dot_row(impl=impl))).arguments
    assert (lhs.shape, rhs.shape) == ((512, 256), (2, 256, 384))
    assert sizes.tolist() == [200, 312]


def test_a_grouped_product_by_xla_is_one(ragged_dot_row):
    program = program_of(as_row(ragged_dot_row(impl="xla")))
    lhs = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
    rhs = jax.random.normal(jax.random.key(1), (2, 256, 384), jnp.bfloat16)
    found = run(program, lhs, rhs, program.arguments[2]).astype(np.float32)
    groups = [lhs[:200].astype(float) @ rhs[0].astype(float)]
    groups.append(lhs[200:].astype(float) @ rhs[1].astype(float))
    np.testing.assert_allclose(found, np.concatenate(groups), atol=1, rtol=0.02)


def test_an_op_of_tpukit_is_named_by_its_own_name():
    fields = {
        "id": "n1",
        "device": "v6e",
        "op": "rms_norm",
        "impl": "pallas_tpu",
        "shapes": {"x": [256, 1024], "scale": [1024]},
        "dtypes": {"x": "bfloat16", "scale": "bfloat16"},
        "static_args": {"eps": 1e-6},
        "measured_us": 3.0,
        "timing_method": "xprof_device_span",
    }
    program = program_of(as_row(fields))
    assert program.kind == "rms_norm"
    case = get_tpu_op("rms_norm").cases[0]
    blocks = get_tpu_op("rms_norm").default_blocks(case, "v6e").to_dict()
    assert program_of(as_row(fields | {"config": dict(blocks)})).kind == "rms_norm"
    gradient = program_of(as_row(fields | {"op": "rms_norm_backward", "impl": "reference"}))
    assert gradient.kind is None
    assert jax.eval_shape(gradient.function, *gradient.arguments)[0].shape == (256, 1024)
    with pytest.raises(TPUKernelError, match="sizes that rms_norm does not have; it has"):
        program_of(as_row(fields | {"config": {"blok": 8}}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_devices": 16}, "it ran on 16 devices"),
        ({"timing_method": "host_wall_clock"}, "may count the host's dispatch"),
        ({"op": "paged_attention"}, "its source is not available"),
        ({"impl": "pallas_mosaic_tpu_v2"}, "its source is not available"),
        ({"impl": "xla_chunked"}, "does not say how long its chunks are"),
        ({"config": {}}, "does not state its block sizes"),
        ({"config": {"block_q": 100}}, "tokamax refuses its block sizes"),
        ({"config": {"block_x": 8}}, "has no block size 'block_x'"),
        ({"dtypes": {"q": "bfloat16"}}, "does not state the dtype of 'k'"),
        (
            {"dtypes": {"q": "bytes16", "k": "b", "v": "b"}},
            "'bytes16', the dtype of 'q', is",
        ),
        ({"shapes": {"q": [2, 256, 2, 128]}}, "cannot be traced"),
        ({"shapes": {"queries": [8]}}, "'queries' is not an argument of tokamax's attention_fwd"),
        ({"mask_kind": "window"}, "its mask kind 'window' is unknown"),
        ({"static_args": {"precision": "HALF"}}, "precision 'HALF' is unknown"),
        ({"static_args": {"sinks": True}}, "has no argument 'sinks'"),
    ],
)
def test_a_row_that_cannot_be_written_says_why(attention_row, changed, said):
    with pytest.raises(TPUKernelError, match=said):
        program_of(as_row(attention_row(**changed)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group_sizes": None}, "does not state its group sizes"),
        ({"group_sizes": {"values": [512]}}, "has 1 group sizes for group_sizes of shape"),
        ({"group_sizes": {"values": [2**40, 1]}}, "does not fit in an int32"),
        ({"dims": {"variant": "sideways", "k": 256, "n": 384}}, "no variant of ragged_dot"),
        ({"config": {"tile_m": 128, "tile_k": None, "tile_n": 128}}, "does not state tile_k"),
    ],
)
def test_a_grouped_product_that_says_too_little_is_refused(ragged_dot_row, changed, said):
    with pytest.raises(TPUKernelError, match=said):
        program_of(as_row(ragged_dot_row(**changed)))


def test_a_generation_that_is_none_is_named(attention_row):
    with pytest.raises(SliceError, match="Did you mean 'v6e'"):
        program_of(as_row(attention_row(device="v6f")))


def test_tokamax_reads_no_options_off_our_command_line(monkeypatch):
    from absl import flags

    row = {
        "id": "t1",
        "device": "tpu7x",
        "op": "triangle_multiplication",
        "impl": "xla",
        "shapes": {"x": [128, 128, 64], "mask": [128, 128]}
        | {f"{name}_in_weights": [64, 2, 64] for name in ("projection", "gate")}
        | {f"{name}_out_weights": [64, 64] for name in ("projection", "gate")}
        | {f"layernorm_{at}_{name}": [64] for at in ("in", "out") for name in ("scale", "offset")},
        "static_args": {"triangle_type": "incoming", "precision": ["DEFAULT", "DEFAULT"]}
        | {"epsilon": 1e-6},
        "measured_us": 100.0,
        "timing_method": "xprof_device_span",
    }
    dtypes = {name: "bool" if name == "mask" else "bfloat16" for name in row["shapes"]}
    monkeypatch.setattr("sys.argv", ["kernels.py", "estimate", "--timings", "x.json"])
    flags.FLAGS.unparse_flags()
    program = program_of(as_row(row | {"dtypes": dtypes}))
    assert jax.eval_shape(program.function, *program.arguments).shape == (128, 128, 64)


def test_without_tokamax_the_extra_is_named(attention_row, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("measured_kernels.programs.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[bench\]'"):
        program_of(as_row(attention_row()))


NAMES = ["dims", "shapes", "dtypes", "config", "static_args", "mask_kind", "op", "impl"]


@pytest.mark.parametrize("kind", ["attention", "ragged_dot", "rms_norm", "hbm_copy"])
@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_row_is_written_or_refused_in_one_line(attention_row, ragged_dot_row, kind, data):
    row = {"attention": attention_row, "ragged_dot": ragged_dot_row}.get(kind, attention_row)()
    if kind in ("rms_norm", "hbm_copy"):
        row |= {"op": kind, "impl": data.draw(st.sampled_from(["xla", "reference", "pallas_tpu"]))}
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)):
        part = row.get(name)
        if isinstance(part, dict) and part:
            key = data.draw(st.sampled_from(sorted(part)) | st.text(max_size=6))
            row[name] = part | {key: data.draw(JSON)}
        else:
            row[name] = data.draw(st.text(max_size=6))
    try:
        checked = as_row(row)
    except ValueError:
        return  # the reader's tests are about these
    try:
        said = repr(program_of(checked))
    except TPUError as error:
        said = str(error)
    assert said.startswith("MeasuredProgram(") or (said and "\n" not in said)
