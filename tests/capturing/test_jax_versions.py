"""Programs whose own environment has another jax than tpukit's, up to the verdict."""

import pytest
from jax_environments import VERSIONS, python_with
from trainers import APART, CARELESS, DECIDES, GATHERS, KERNEL, ONE_STEP

import tpukit
from tpukit.capturing.running import run_captured
from tpukit.checker.captured import check_captured
from tpukit.compiler.program.request import compiler_versions
from tpukit.errors import XLACompilationError

pytestmark = [pytest.mark.slow, pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
WIDTH, LAYERS = 2048, 4


@pytest.fixture(params=VERSIONS)
def jax_version(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    texts = {"one": ONE_STEP, "apart": APART, "decides": DECIDES, "kernel": KERNEL}
    texts |= {"careless": CARELESS, "gathers": GATHERS}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return request.param


def test_the_step_is_judged(jax_version, tmp_path):
    found = tpukit.check_program([str(python_with(jax_version)), "one.py"], "v6e-16")
    captured = found.captured
    (step,) = captured.programs
    assert captured.versions["jax"] == jax_version
    assert captured.processes == 4
    assert step.about.kind == "training step"
    assert step.about.line.startswith(str(tmp_path / "one.py"))
    assert step.argument_types[-1] == "f32[512,2048]"
    assert step.program.facts.donated == (0, 1, 2, 3)
    assert sorted(step.program.facts.device_order) == list(range(16))
    assert not (tmp_path / "checkpoint-0").exists()
    held = 4 * (LAYERS * WIDTH * WIDTH // 16 + WIDTH)
    assert found.fits
    assert found.step_time_s > 0
    assert found.memory.purposes["parameters"] == held
    assert found.memory.purposes["optimizer state"] == held
    report = found.to_dict()
    assert report["versions"] == compiler_versions()
    assert report["capture"]["versions"]["jax"] == jax_version
    assert not captured.notes
    lines = [buffer.source for buffer in found.memory.buffers if buffer.source]
    assert any("one.py" in line for line in lines)


def test_programs_of_one_step_and_a_branch_on_a_value(jax_version):
    python = str(python_with(jax_version))
    apart = run_captured([python, "apart.py"], "v6e-8")
    assert {one.name: one.calls for one in apart.programs} == {"loss": 2, "<lambda>": 1, "apply": 1}
    decides = run_captured([python, "decides.py"], "v6e-8")
    assert [one["line"].rsplit("/", 1)[-1].split(":")[0] for one in decides.reads] == ["decides.py"]
    assert {one["how"] for one in decides.reads} == {"decided"}


def test_traces_of_every_version_show_the_same(jax_version):
    python = str(python_with(jax_version))
    (step,) = run_captured([python, "careless.py"], "v6e-8").programs
    seen = step.evidence
    line = next(n for n, text in enumerate(CARELESS.splitlines(), 1) if "bhqd,bhkd" in text)
    assert [one["line"].rsplit("/", 1)[-1] for one in seen["scores"]] == [f"careless.py:{line}"]
    assert [one["argument"] for one in seen["changes"]] == ["state['count']"]
    assert (step.about.callbacks, len(seen["callbacks"])) == (2, 2)
    assert seen["from_host"] == [len(step.argument_types) - 1]
    (step,) = run_captured([python, "gathers.py"], "v6e-8").programs
    # Six matmuls, each forward and twice backward; jax.checkpoint asks for two of them again.
    matmul = 2 * 256 * WIDTH * WIDTH
    assert step.about.model_flops == 18 * matmul
    assert step.about.recomputed_flops == 2 * matmul


def test_a_kernel_is_compiled_by_a_jax_that_can_read_it(jax_version):
    captured = run_captured([str(python_with(jax_version)), "kernel.py"], "v6e-8")
    (step,) = captured.programs
    assert step.about.kernels == {"double": 1}
    if jax_version == "0.6.2":
        assert check_captured(captured, memory_only=True).fits
        return
    # From jax 0.11 on, kernels are exported as an operation that jax 0.10 does not know.
    with pytest.raises(XLACompilationError, match=f"compile it with --toolchain jax-{jax_version}"):
        check_captured(captured)
