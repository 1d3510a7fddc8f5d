import os
import re
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.checker.compiling import lower_job
from tpukit.cli.job_options import lower_function
from tpukit.compiler.program import entry
from tpukit.compiler.program.entry import built, load_function, load_object, parse_argument
from tpukit.errors import ConfigError, TPUModelError, TPUValidationError
from tpukit.job import Job


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


def test_a_wrong_name_is_told_what_there_is(tmp_path):
    file = tmp_path / "my_model.py"
    file.write_text("from math import sqrt\ndef build(): return 1\ndef step(x): return x\n")
    for wrong, said in (
        (f"{file}:stepp", "Did you mean 'step'?"),
        (f"{file}:elsewhere", "It has build, step."),
        (f"{tmp_path}/my_modl.py:build", "Did you mean 'my_model.py'?"),
    ):
        with pytest.raises(TPUValidationError, match=re.escape(said)):
            load_object(wrong)


def test_a_function_without_its_arguments(tmp_path):
    file = tmp_path / "bare_step.py"
    file.write_text("def step(x, w): return x @ w\n")
    with pytest.raises(ConfigError, match=r"takes x, w; write a shape for each: --arg 'bf16"):
        lower_function(f"{file}:step", {"on": "v6e-8"}, ["f32[2,2]"], None, progress=print)


def test_a_model_that_takes_no_tokens_is_told_how_to_say_so(tmp_path):
    file = tmp_path / "by_feature.py"
    file.write_text(
        "import flax.nnx as nnx\ndef build(): return nnx.Linear(256, 4, rngs=nnx.Rngs(0))\n"
    )
    with pytest.raises(TPUModelError, match=r"token numbers, int32 of \(8, \d+\); .*Workload"):
        lower_job(Job(model=f"{file}:build", on="v6e-8"))


def test_a_file_runs_once_and_again_when_it_has_changed(tmp_path):
    file, ran = tmp_path / "counted.py", tmp_path / "ran.txt"
    text = f"with open({str(ran)!r}, 'a') as ran: ran.write('x')\ndef step(x): return x\n"
    file.write_text(text)
    assert load_object(f"{file}:step") is load_object(f"{file}:step")
    assert ran.read_text() == "x"
    file.write_text(text + "def other(x): return x\n")
    os.utime(file, ns=(1, 1))
    assert load_object(f"{file}:other")(3) == 3
    assert ran.read_text() == "xx"
