"""The search for compiler options: what it keeps, what it refuses, and one real search."""

import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tpukit.capturing.captured import Captured, CapturedProgram
from tpukit.checker.flag_tuning import search as flag_search
from tpukit.checker.flag_tuning.search import (
    CandidateGroup,
    OptionSet,
    is_better,
    load_candidates,
    tune_flags,
)
from tpukit.checker.flag_tuning.trials import FlagTrial
from tpukit.compiler import make_request
from tpukit.errors import FlagError, TPUValidationError, XLACompilationError
from tpukit.hardware import get_chip, list_chips
from tpukit.runtime.flags import FlagRegistry, as_compiler_options, parse_flags

# Reading all flags of libtpu takes seconds: on the worker that has done it for other tests.
pytestmark = pytest.mark.xdist_group("libtpu")
VMEM, RERUN = "xla_tpu_scoped_vmem_limit_kib", "xla_latency_hiding_scheduler_rerun"


@pytest.fixture(scope="module")
def registry():
    return FlagRegistry.installed()


@pytest.fixture(scope="module")
def request_for_one_chip():
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    return make_request(lambda x: jnp.tanh(x @ x), "v6e-1", x)


def candidate(group, label, **options):
    return OptionSet(group, label, options, None, "a test", "here")


def group(name, *candidates, needs="", unseen=""):
    return CandidateGroup(name, "?", needs, unseen, tuple(candidates))


SIZES = group("size", *[candidate("size", str(kib), **{VMEM: kib}) for kib in (20000, 30000)])
ALL = [one for each in load_candidates() for one in each.candidates]
RERUNS = group("rerun", candidate("rerun", "3", **{RERUN: 3}))


@pytest.fixture
def pretend(monkeypatch):
    """Replace compiler and predictor by a table: seconds and bytes by the options set."""
    calls = []

    def install(table, *, refused=()):
        def answer(request):
            calls.append(dict(request.options))
            if any(request.options.get(name) == value for name, value in refused):
                return XLACompilationError("UNIMPLEMENTED: not on this chip")
            return request.options

        def judge(answer, trial):
            if isinstance(answer, XLACompilationError):
                return dataclasses.replace(trial, refusal=str(answer))
            seconds, size = table(answer)
            return dataclasses.replace(
                trial, fits=seconds is not None, step_time_s=seconds, total_bytes=size
            )

        def run_request(request, **how):
            answer(request)
            return SimpleNamespace(name="step", slice=request.slice, collectives={})

        def compile_many(requests, **how):
            return [answer(one) for one in requests]

        def judge_any(answered, trial):
            plain = answered if isinstance(answered, dict | XLACompilationError) else trial.options
            return judge(plain, trial)

        monkeypatch.setattr(flag_search, "run_request", run_request)
        monkeypatch.setattr(flag_search, "compile_many", compile_many)
        monkeypatch.setattr(flag_search, "judge", judge_any)
        return calls

    return install


class TestTheSearch:
    def test_the_best_of_a_group_stays_on_for_the_next(
        self, pretend, request_for_one_chip, registry
    ):
        def table(options):
            return 1.0 - options.get(VMEM, 0) / 1e5 - options.get(RERUN, 0) / 100, 1000

        calls = pretend(table)
        found = tune_flags(request_for_one_chip, groups=[SIZES, RERUNS], registry=registry)
        assert found.best.options == {VMEM: 30000, RERUN: 3}
        assert calls[-1] == {VMEM: 30000, RERUN: 3}
        assert found.speedup == pytest.approx(1 / 0.67)
        assert found.exit_code == 0

    def test_the_result_can_be_set_and_checked_as_it_is_printed(
        self, pretend, request_for_one_chip, registry
    ):
        pretend(lambda options: (1.0 - options.get(VMEM, 0) / 1e5, 1000))
        found = tune_flags(request_for_one_chip, groups=[SIZES], registry=registry)
        assert found.variables == {"LIBTPU_INIT_ARGS": f"--{VMEM}=30000"}
        again = as_compiler_options(parse_flags(found.flags), registry=registry)
        assert again == found.best.options

    def test_a_difference_no_model_can_see_changes_nothing(
        self, pretend, request_for_one_chip, registry
    ):
        pretend(lambda options: (1.0 - options.get(VMEM, 0) / 1e8, 1000))
        found = tune_flags(request_for_one_chip, groups=[SIZES], registry=registry)
        assert found.best is found.baseline
        assert found.flags == ""
        assert found.variables == {}
        assert "nothing tried is better" in _text(found)

    def test_what_makes_it_fit_beats_everything(self, pretend, request_for_one_chip, registry):
        pretend(lambda options: (9.0, 10) if options.get(VMEM) == 20000 else (None, 99))
        found = tune_flags(request_for_one_chip, groups=[SIZES], registry=registry)
        assert found.best.options == {VMEM: 20000}
        assert found.exit_code == 0
        assert "fit" in _text(found)

    def test_what_the_prediction_is_blind_to_is_tried_and_not_chosen(
        self, pretend, request_for_one_chip, registry
    ):
        calls = pretend(lambda options: (1.0 - options.get(VMEM, 0) / 1e5, 1000))
        blind = dataclasses.replace(SIZES, unseen="the gain of larger tiles")
        found = tune_flags(request_for_one_chip, groups=[blind], registry=registry)
        assert len(calls) == 3
        assert found.best is found.baseline
        assert found.skipped == (("size by its time", "the gain of larger tiles"),)

    def test_when_nothing_fits_it_says_so(self, pretend, request_for_one_chip, registry):
        pretend(lambda options: (None, 99))
        found = tune_flags(request_for_one_chip, groups=[SIZES], registry=registry)
        assert found.exit_code == 3

    def test_a_refusal_is_recorded_with_its_reason_and_the_search_goes_on(
        self, pretend, request_for_one_chip, registry
    ):
        pretend(lambda options: (1.0 - options.get(RERUN, 0) / 100, 1), refused=[(VMEM, 30000)])
        unknown = group("gone", candidate("gone", "it", xla_sc_disjoint_spmem=False))
        found = tune_flags(request_for_one_chip, groups=[unknown, SIZES, RERUNS], registry=registry)
        reasons = {trial.names[-1]: trial.refusal for trial in found.refused}
        assert "UNIMPLEMENTED" in reasons["size: 30000"]
        assert "xla_sc_disjoint_spmem" in reasons["gone: it"]
        assert found.best.options == {RERUN: 3}

    def test_the_budget_holds(self, pretend, request_for_one_chip, registry):
        calls = pretend(lambda options: (1.0, 1))
        found = tune_flags(
            request_for_one_chip, groups=[SIZES, RERUNS], registry=registry, budget=2
        )
        assert len(calls) == 2
        assert found.stopped == "the budget of 2 compiles is spent"

    def test_so_does_the_time(self, pretend, request_for_one_chip, registry):
        calls = pretend(lambda options: (1.0, 1))
        found = tune_flags(request_for_one_chip, groups=[SIZES], registry=registry, seconds=0)
        assert len(calls) == 1
        assert found.stopped == "the time is spent"

    def test_a_beam_finds_what_pays_only_together(self, pretend, request_for_one_chip, registry):
        def table(options):
            both = options.get(VMEM) == 20000 and RERUN in options
            return (0.1 if both else 1.0 - options.get(VMEM, 0) / 1e5), 1

        pretend(table)
        greedy, wide = (
            tune_flags(request_for_one_chip, groups=[SIZES, RERUNS], registry=registry, beam=beam)
            for beam in (1, 2)
        )
        assert greedy.best.options == {VMEM: 30000}
        assert wide.best.options == {VMEM: 20000, RERUN: 3}

    def test_the_default_and_what_cannot_matter_are_not_compiled(
        self, pretend, request_for_one_chip, registry
    ):
        calls = pretend(lambda options: (1.0, 1))
        default = group("default", candidate("default", "1", **{RERUN: 1}))
        links = group("links", candidate("links", "2", **{RERUN: 2}), needs="collectives")
        found = tune_flags(request_for_one_chip, groups=[default, links], registry=registry)
        assert len(calls) == 1
        assert dict(found.skipped) == {
            "default: 1": "already the default",
            "links": "it needs collectives, and step on v6e-1 has none",
        }

    def test_wrong_limits_and_options_are_refused(self, request_for_one_chip, registry):
        with pytest.raises(TPUValidationError, match="at least one compile"):
            tune_flags(request_for_one_chip, budget=0, registry=registry)
        with pytest.raises(TPUValidationError, match="Name one, for example"):
            tune_flags(lambda x: x, registry=registry)
        with pytest.raises(FlagError, match="xla_tpu_scoped_vmem"):
            tune_flags(
                request_for_one_chip, options={"xla_tpu_scoped_vmem_limit": 1}, registry=registry
            )


def captured_of(request, *, calls, own=""):
    """A capture whose programs are all the same one."""
    about = SimpleNamespace(flops=1.0)
    return Captured(
        slice=request.slice,
        programs=tuple(
            CapturedProgram(request.program, count, about, (), (), ()) for count in calls
        ),
        listed=(),
        command=("python", "train.py"),
        versions={"jax": "0.10.2"},
        processes=1,
        libtpu_init_args=own,
    )


class TestACapturedProgram:
    def test_programs_of_one_step_are_tried_together(self, pretend, request_for_one_chip, registry):
        calls = pretend(lambda options: (1.0 - options.get(VMEM, 0) / 1e5, 1000))
        captured = captured_of(request_for_one_chip, calls=(4, 1))
        found = tune_flags(captured, groups=[SIZES], registry=registry)
        assert found.baseline.step_time_s == pytest.approx(5.0)
        assert found.best.step_time_s == pytest.approx(3.5)
        assert found.best.total_bytes == 1000
        assert len(calls) == 6

    def test_the_budget_counts_compiles(self, pretend, request_for_one_chip, registry):
        calls = pretend(lambda options: (1.0, 1))
        captured = captured_of(request_for_one_chip, calls=(1, 1))
        found = tune_flags(captured, groups=[SIZES], registry=registry, budget=5)
        assert len(calls) == 4
        assert found.stopped == "the budget of 5 compiles is spent"

    def test_its_own_flags_stay_and_are_not_tried_again(
        self, pretend, request_for_one_chip, registry
    ):
        calls = pretend(lambda options: (1.0 - options.get(RERUN, 0) / 100, 1000))
        captured = captured_of(request_for_one_chip, calls=(1,), own=f"--{VMEM}=30000")
        found = tune_flags(captured, groups=[SIZES, RERUNS], registry=registry)
        assert found.variables == {"LIBTPU_INIT_ARGS": f"--{VMEM}=30000 --{RERUN}=3"}
        assert dict(found.skipped) == {"size: 30000": "the program sets it already"}
        assert {VMEM: 30000} not in calls


def test_a_step_that_is_shorter_because_something_was_not_seen_is_no_gain():
    before = FlagTrial(options={}, fits=True, step_time_s=1.0, total_bytes=10)
    blind = dataclasses.replace(before, step_time_s=0.5, caveats=("2 kernels count as nothing",))
    assert is_better(dataclasses.replace(before, step_time_s=0.5), before)
    assert not is_better(blind, before)


class TestTheCandidates:
    @pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
    def test_each_is_known_to_the_installed_compiler(self, one, registry):
        assert as_compiler_options(one.options, registry=registry)
        assert one.reason
        assert one.source
        for name in one.generations or ():
            assert get_chip(name).name == name

    def test_no_two_of_one_generation_have_the_same_name(self):
        for chip in list_chips():
            names = [
                one.name for each in load_candidates() for one in each.candidates_for(chip.name)
            ]
            assert len(names) == len(set(names))

    def test_scratch_memory_is_less_than_a_core_has(self):
        (sizes,) = (each for each in load_candidates() if each.name == "scoped VMEM")
        for chip in list_chips():
            for one in sizes.candidates_for(chip.name):
                vmem = chip.vmem_bytes.value
                assert vmem is None or one.options[VMEM] * 1024 <= vmem, (chip.name, one.label)


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_real_search_records_what_the_compiler_refuses(request_for_one_chip, registry):
    lines = []
    refused = group("order", candidate("order", "brkga", xla_memory_scheduler="brkga"))
    found = tune_flags(
        request_for_one_chip, groups=[refused], registry=registry, progress=lines.append
    )
    assert found.best is found.baseline
    assert found.baseline.fits
    assert found.baseline.step_time_s > 0
    assert "UNIMPLEMENTED" in found.refused[0].refusal
    assert len(lines) == 3
    assert json.loads(json.dumps(found.to_dict()))["best"]["total_bytes"]["origin"] == "compiler"
    assert "UNIMPLEMENTED" in _text(found)


def _text(found):
    console = Console(width=200, file=io.StringIO())
    console.print(found)
    return console.file.getvalue()
