import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.program import entry
from tpukit.compiler.program.entry import built, load_function, parse_argument
from tpukit.errors import TPUValidationError


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[8,128]", (8, 128), "bfloat16"),
        ("float32[]", (), "float32"),
        (" s32 [ 4 , 5 ] ", (4, 5), "int32"),
        ("pred[3]", (3,), "bool"),
        ("F8E4M3FN[2]", (2,), "float8_e4m3fn"),
    ],
)
def test_arguments(text, shape, dtype):
    argument = parse_argument(text)
    assert argument.shape == shape
    assert argument.dtype.name == dtype


@pytest.mark.parametrize("text", ["", "bf16", "bf16[8,]", "bf16[8,,8]", "bf16[-1]", "bf16[1e3]"])
def test_wrong_arguments(text):
    with pytest.raises(TPUValidationError):
        parse_argument(text)


def test_unknown_formats_are_guessed():
    with pytest.raises(TPUValidationError, match="Did you mean 'bf16'"):
        parse_argument("bf6[8]")


@given(st.text())
def test_only_clear_errors(text):
    with suppress(TPUValidationError):
        parse_argument(text)


def test_functions_by_module_and_by_file(tmp_path):
    assert load_function("math:sqrt")(9.0) == 3.0
    path = tmp_path / "mine.py"
    path.write_text("def step(x):\n    return x + 1\nlimit = 3\n")
    assert load_function(f"{path}:step")(1) == 2
    with pytest.raises(TPUValidationError, match="Did you mean 'step'"):
        load_function(f"{path}:stp")
    with pytest.raises(TPUValidationError, match="is not a function"):
        load_function(f"{path}:limit")
    with pytest.raises(TPUValidationError, match="no file"):
        load_function(f"{tmp_path}/none.py:step")
    with pytest.raises(TPUValidationError, match="no module"):
        load_function("no_such_module_here:step")
    with pytest.raises(TPUValidationError, match="module:function"):
        load_function("step")


def test_what_takes_nothing_is_called(tmp_path):
    path = tmp_path / "made.py"
    path.write_text(
        "import numpy as np\n"
        "def step(x):\n    return x + 1\n"
        "def build():\n    return step\n"
        "def zeros():\n    return np.zeros(3)\n"
        "value = (step, step)\n"
    )
    assert built(f"{path}:build").__name__ == "step"
    assert built(f"{path}:step").__name__ == "step"
    assert built(f"{path}:zeros").__name__ == "zeros"  # a function of no arguments, not a builder
    assert isinstance(built(f"{path}:value"), tuple)


def test_the_environment_is_ready_before_somebodys_code_runs(tmp_path, monkeypatch):
    """Else jax looks for a TPU, and libtpu prints its own errors where there is none."""
    order = []
    monkeypatch.setattr(entry, "configure_tpu_environment", lambda: order.append("environment"))
    monkeypatch.setitem(sys.modules, "noted", type("noted", (), {"order": order}))
    (tmp_path / "touching.py").write_text("import noted\nnoted.order.append('code')\nf = abs\n")
    entry.load_function(f"{tmp_path}/touching.py:f")
    assert order == ["environment", "code"]
