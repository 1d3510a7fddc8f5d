"""`tpukit kernel`: what it prints, what it keeps, and how it answers a typing error."""

import json

import pytest
from typer.testing import CliRunner

from tpukit.cli import kernel
from tpukit.cli.kernel_options import choose_cases, chosen_chips, read_values
from tpukit.errors import SliceError, TPUKernelError, TPUValidationError, XLACompilationError
from tpukit.kernels import use_tuned_blocks
from tpukit.kernels.registry.registry import get_tpu_op
from tpukit.kernels.timing import ErrorBand, KernelEstimate


def made_up(op, case, chip, blocks=None, *, direction="forward", implementation="pallas_tpu", **_):
    """An estimate that no compiler made: the kernel takes half as long as XLA."""
    seconds = 1e-4 if implementation == "pallas_tpu" else 2e-4
    return KernelEstimate(
        name=op.name, chip=chip, kind=op.name, time_s=seconds, kernel_s=seconds, surrounding_s=0.0,
        error=ErrorBand(0.1, 0.2, 0.3, {"grouped_matmul": 7}), calls={}, times={}, bundle_count=10,
    )  # fmt: skip


@pytest.fixture
def estimates(monkeypatch):
    monkeypatch.setattr("tpukit.kernels.timing.bench.estimate", made_up)
    monkeypatch.setattr("tpukit.kernels.tuning.search.estimate", made_up)


def run(*words):
    return CliRunner().invoke(kernel.app, list(words))


def test_bench_sets_the_kernel_beside_xla(estimates):
    found = run("bench", "rms_norm", "--on", "v6e,v5p", "--case", "bfloat16_1024x1024", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    assert {(row["chip"], row["implementation"]) for row in rows} == {
        (chip, name) for chip in ("v6e", "v5p") for name in ("pallas_tpu", "reference")
    }
    kernel_rows = [row for row in rows if row["implementation"] == "pallas_tpu"]
    assert [row["speedup"] for row in kernel_rows] == [2.0, 2.0]
    assert all(row["estimate"]["origin"] == "model" for row in rows)
    assert "rms_norm bfloat16_1024x1024 on v5p as reference" in found.stderr


def test_bench_prints_a_table(estimates):
    found = run("bench", "rms_norm", "--on", "v6e", "--case", "bfloat16_1024x1024")
    assert "origin: model" in found.stdout
    assert "2.00x" in found.stdout
    assert "100 µs" in found.stdout


def test_bench_ends_with_a_code_of_its_own_where_the_kernel_does_not_compile(monkeypatch):
    def refused(op, case, chip, *rest, implementation, **how):
        if implementation == "pallas_tpu" and chip == "v6e":
            raise XLACompilationError("a kernel of f needs 256 MiB of VMEM, but has 128 MiB")
        return made_up(op, case, chip, *rest, implementation=implementation, **how)

    monkeypatch.setattr("tpukit.kernels.timing.bench.estimate", refused)
    words = ("bench", "rms_norm", "--case", "bfloat16_1024x1024", "--on")
    found = run(*words, "v6e")
    assert found.exit_code == 4
    assert "but has 128 MiB" in " ".join(found.stdout.split())
    assert "200 µs" in found.stdout  # what XLA makes of it is shown all the same
    assert run(*words, "v5p").exit_code == 0
    assert run(*words, "v5p,v6e").exit_code == 4
    assert run(*words, "v6e", "--implementation", "reference").exit_code == 0


def test_results_are_shown_as_they_come_and_quick_is_one_compile_a_chip(monkeypatch):
    printed = []

    def interrupted(op, case, chip, *rest, **how):
        printed.append(case.name)
        if len(printed) == 3:  # the second case: the first was shown before
            raise KeyboardInterrupt
        return made_up(op, case, chip, *rest, **how)

    monkeypatch.setattr("tpukit.kernels.timing.bench.estimate", interrupted)
    found = run("bench", "rms_norm", "--on", "v6e")
    assert f"{printed[0]} on v6e" in found.stdout
    assert "2.00x" in found.stdout
    assert f"{printed[2]} on v6e\n" not in found.stdout
    printed.clear()
    quick = run("bench", "rms_norm", "--on", "v6e,v5p", "--quick", "--json")
    rows = json.loads(quick.stdout)["rows"]
    assert [(row["chip"], row["implementation"]) for row in rows] == [
        ("v6e", "pallas_tpu"),
        ("v5p", "pallas_tpu"),
    ]


def test_tune_writes_where_it_is_told(estimates, tmp_path):
    words = ["tune", "rms_norm", "--on", "v6e", "--case", "bfloat16_1024x1024"]
    found = run(*words, "--output", str(tmp_path), "--json")
    assert found.exit_code == 0, found.output
    (result,) = json.loads(found.stdout)["results"]
    path = tmp_path / "rms_norm" / "v6e.json"
    entries = json.loads(path.read_text())["entries"]
    assert [entry["blocks"] for entry in entries] == [result["chosen"]["blocks"]]
    before = path.read_text()
    assert run(*words, "--dry-run", "--json").exit_code == 0
    assert path.read_text() == before


def test_tune_says_where_the_blocks_are_and_what_makes_dispatch_take_them(estimates, tmp_path):
    words = ["tune", "rms_norm", "--on", "v6e", "--case", "bfloat16_1024x1024"]

    def said(*more):
        return "".join(run(*words, *more).stdout.split())  # a long path is folded

    assert "Nothingwaswritten(--dry-run)." in said("--dry-run")
    assert f"use_tuned_blocks('{tmp_path}')letsdispatchtakethem" in said("--output", str(tmp_path))
    use_tuned_blocks(tmp_path)
    use_tuned_blocks(None)


def test_an_op_of_ones_own_is_named_by_its_file(estimates, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from tpukit.kernels import tpu_kernel\n"
        "def plain(x): return x\n"
        "@tpu_kernel(on_tpu=lambda x: 2 * x)\n"
        "def doubled(x): return 2 * x\n"
    )
    words = ["--on", "v6e", "--shape", "f32[8,128]"]
    found = run("bench", f"{path}:doubled", *words, "--json")
    assert json.loads(found.stdout)["op"] == "doubled", found.output
    assert "give -o" in str(run("tune", f"{path}:doubled", *words).exception)
    assert "decorate it with @tpu_kernel" in str(run("bench", f"{path}:plain", *words).exception)
    assert "Did you mean 'doubled'" in str(run("bench", f"{path}:dubled", *words).exception)


def test_list_names_ops_and_cases():
    data = json.loads(run("list", "--json").stdout)
    assert "pallas_tpu" in data["rms_norm"]["implementations"]
    assert data["rms_norm"]["cases"][0]["arguments"][0].startswith("bfloat16[")


def test_typing_errors_are_answered_with_the_nearest_name():
    with pytest.raises(TPUKernelError, match="Did you mean 'rms_norm'"):
        get_tpu_op("rms_nrm")
    with pytest.raises(SliceError, match="Did you mean 'v6e'"):
        chosen_chips("v5e,v6f")
    with pytest.raises(TPUKernelError, match="Did you mean 'bfloat16_1024x1024'"):
        choose_cases(get_tpu_op("rms_norm"), ["bfloat16_1024x102"], None, None)


def test_a_case_of_ones_own():
    op = get_tpu_op("flash_attention")
    shapes = ["bf16[1,256,2,128]"] * 3
    (case,) = choose_cases(op, None, shapes, ["causal=false", "window=64"])
    assert [array.shape for array in case.arguments] == [(1, 256, 2, 128)] * 3
    assert case.options == {"causal": False, "window": 64}
    with pytest.raises(TPUValidationError, match="write name=value"):
        choose_cases(op, None, shapes, ["causal"])
    with pytest.raises(TPUValidationError, match="give one of them"):
        choose_cases(op, ["causal_4096"], shapes, None)


def test_values_of_integer_arguments():
    (case,) = choose_cases(
        get_tpu_op("grouped_matmul"), None, ["bf16[10,128]", "bf16[4,128,128]", "s32[4]"], None
    )
    assert read_values(["2=even"])(case)[2].tolist() == [3, 3, 2, 2]
    assert read_values(["2=7,0,1,2"])(case)[2].tolist() == [7, 0, 1, 2]
    assert read_values(None) is None
    with pytest.raises(TPUValidationError, match="2=100,28,0"):
        read_values(["group=even"])
    with pytest.raises(TPUValidationError, match=r"has 3 numbers; that array .* has 4"):
        read_values(["2=1,2,3"])(case)
    with pytest.raises(TPUValidationError, match="has arrays 0 to 2"):
        read_values(["5=even"], [case])


def test_what_to_tune_for_must_be_said():
    found = run("tune", "rms_norm")
    assert isinstance(found.exception, TPUValidationError)
    assert "--on v6e" in str(found.exception)
    assert "one of the two" in str(run("tune", "rms_norm", "--on", "v6e", "--measure").exception)


def test_shapes_an_op_does_not_take_are_refused_before_anything_compiles():
    with pytest.raises(TPUValidationError, match=r"'rhs' and 'group_sizes'; its case .* --shape"):
        choose_cases(get_tpu_op("grouped_matmul"), None, ["bf16[8,8]"], None)
    shapes = ["bf16[8,128]", "s8[128,8]", "f32[1,8]"]
    with pytest.raises(TPUValidationError, match=r"--option format=int8 .*activations=bfloat16"):
        choose_cases(get_tpu_op("quantized_matmul"), None, shapes, None)


def test_an_unknown_implementation_and_no_generation_are_refused_at_once(estimates):
    words = ["bench", "rms_norm", "--on", "v6e", "--implementation", "cuda"]
    assert "it has pallas_tpu, reference" in str(run(*words).exception)
    assert "names no generation" in str(run("bench", "rms_norm", "--on", ",").exception)


def test_a_folder_that_cannot_be_written_is_refused_before_tuning(estimates, tmp_path):
    (tmp_path / "file").write_text("")
    words = ["tune", "rms_norm", "--on", "v6e", "--case", "bfloat16_1024x1024"]
    found = run(*words, "--output", str(tmp_path / "file"))
    assert "is a file; choose another place" in str(found.exception)


def test_list_prints_names_whole():
    text = run("list").stdout
    for name in ("flash_attention", "quantized_matmul"):
        assert all(case.name in text for case in get_tpu_op(name).cases)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "name an op and --on v6e to time it"),
        (["bench", "rms_norm"], "name an op and --on v6e"),
    ],
)
def test_what_bench_cannot_make_sense_of_is_answered(words, said):
    assert said in str(run(*words).exception)
