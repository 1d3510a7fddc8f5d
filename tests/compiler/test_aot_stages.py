"""How far a compile goes, what is remembered of it, and what becomes of it when things break.

Most of these play back the files of one real compile, so that only breaking is simulated.
"""

import errno
import os
import re
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from child_processes import children_running

from tpukit.compiler import compile_for, compile_many, lower_program, make_request
from tpukit.compiler.aot import run_request
from tpukit.compiler.compiled import parse_until
from tpukit.errors import (
    FlagError,
    MeshError,
    TPUOutOfMemoryError,
    TPUValidationError,
    XLACompilationError,
)
from tpukit.runtime.child import ChildError

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(181.09G) exceeds available HBM (31.25G)."
)


@pytest.fixture
def request_at_hand():
    return make_request(jnp.sin, "v6e-8", X)


@pytest.fixture
def playback(trained, monkeypatch):
    """Plays the real compile's files back into the folder a compile asked for."""
    calls = []

    def play(*, error=None, leave_out=(), reply=None, needs=None):
        def watch(module, request, *, timeout_s, stop_when, environment):
            calls.append(request)
            folder = Path(request["options"]["xla_dump_to"])
            for path in sorted(trained.folder.iterdir()):
                if path.is_file() and not any(part in path.name for part in leave_out):
                    shutil.copy(path, folder)
                    if needs is not None and "memory-usage-report" in path.name:
                        total = f"Total bytes: {needs}"
                        report = re.sub(r"Total bytes: \d+", total, path.read_text())
                        (folder / path.name).write_text(report)
                    if stop_when():
                        return None
            if error is not None:
                raise error
            return reply

        monkeypatch.setattr("tpukit.compiler.aot.watch_child", watch)
        return calls

    return play


def test_a_second_time_it_comes_from_disk(request_at_hand, playback):
    calls = playback()
    first = run_request(request_at_hand, until="memory")
    again = run_request(request_at_hand, until="schedule")
    assert len(calls) == 1
    assert not first.from_cache
    assert again.from_cache
    assert again.memory.total_bytes == first.memory.total_bytes
    assert again.compile_s == first.compile_s
    run_request(request_at_hand, until="memory", use_cache=False)
    assert len(calls) == 2


def test_options_slices_and_versions_are_part_of_the_key(request_at_hand, monkeypatch):
    same = make_request(jnp.sin, "v6e:2x4", X)
    others = [
        make_request(jnp.cos, "v6e-8", X),
        make_request(jnp.sin, "v6e-16", X),
        make_request(jnp.sin, "v6e-8", X, options={"xla_tpu_scoped_vmem_limit_kib": 1024}),
    ]
    assert same.key == request_at_hand.key
    assert len({request.key for request in [same, *others]}) == 4
    before = same.key
    monkeypatch.setattr("tpukit.runtime.versions.version", lambda name: "9.9")
    assert same.key != before


def test_a_damaged_entry_is_compiled_again(request_at_hand, playback, own_cache):
    calls = playback()
    run_request(request_at_hand, until="memory")
    (entry,) = (own_cache / "compiles").glob("*.zip")
    entry.write_bytes(entry.read_bytes()[:200])
    assert not run_request(request_at_hand, until="memory").from_cache
    assert len(calls) == 2


def test_lines_that_moved_are_not_shown(playback):
    def one(x):
        return jnp.sin(x)

    def moved(x):
        return jnp.sin(x)

    moved.__name__ = "one"
    playback()
    compile_for(one, "v6e-8", X, until="memory")
    found = compile_for(moved, "v6e-8", X, until="memory")
    assert found.from_cache
    assert all(buffer.source is None for buffer in found.memory.buffers)


def test_out_of_memory_is_an_answer_or_an_error(request_at_hand, playback):
    error = ChildError(OUT_OF_MEMORY, kind="JaxRuntimeError")
    calls = playback(error=error, leave_out=("after_buffer_assignment",), needs=181 * 2**30)
    found = run_request(request_at_hand, until="memory")
    assert not found.fits
    with pytest.raises(TPUOutOfMemoryError, match=r"does not fit on v6e-8.*largest buffers are"):
        run_request(request_at_hand, until="codegen")
    assert len(calls) == 1  # the refusal of the schedule answers for the code


def test_what_clearly_fits_does_not_wait_for_the_compilers_word(request_at_hand, playback):
    playback(leave_out=("after_buffer_assignment",))
    assert run_request(request_at_hand, until="memory").fits


def test_what_hardly_fits_is_left_to_the_compiler(request_at_hand, playback):
    usable = request_at_hand.slice.chip.hbm_usable_bytes.require("this test")
    error = ChildError(OUT_OF_MEMORY, kind="JaxRuntimeError")
    playback(error=error, leave_out=("after_buffer_assignment",), needs=int(0.9995 * usable))
    assert not run_request(request_at_hand, until="memory").fits


def test_out_of_memory_without_a_report(request_at_hand, playback):
    error = ChildError(OUT_OF_MEMORY, kind="JaxRuntimeError")
    playback(error=error, leave_out=("after_optimizations",))
    with pytest.raises(TPUOutOfMemoryError, match=r"needs 181\.09G .* has 31\.25G"):
        run_request(request_at_hand, until="memory")


def test_files_cut_short_are_noticed(request_at_hand, playback, trained, tmp_path, monkeypatch):
    playback(reply={"hlo": "", "code_bytes": 0}, leave_out=("live-range",))
    with pytest.raises(XLACompilationError, match=r"live-range.*may be full"):
        run_request(request_at_hand, until="memory")
    cut = tmp_path / "cut"
    shutil.copytree(trained.folder, cut)
    (program,) = cut.glob("*.jit_call.*.after_optimizations.txt")
    program.write_text(program.read_text()[:2000])
    monkeypatch.setattr(trained, "folder", cut)
    playback()
    with pytest.raises(XLACompilationError, match="is truncated"):
        run_request(request_at_hand, until="memory")


def test_a_full_disk_names_the_way_out(request_at_hand, monkeypatch):
    def no_space(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(XLACompilationError, match=r"program\.bin cannot be written .*set TMPDIR"):
        run_request(request_at_hand, until="memory")


def test_a_cache_that_cannot_be_written_does_not_stop_a_compile(
    request_at_hand, playback, own_cache
):
    playback()
    own_cache.parent.mkdir(parents=True, exist_ok=True)
    own_cache.write_text("a file where the folder should be")
    assert run_request(request_at_hand, until="memory").fits


def test_options_of_our_own_are_refused():
    with pytest.raises(FlagError, match="dump_to"):
        make_request(jnp.sin, "v6e-1", X, options={"xla_dump_to": "/somewhere"})


def test_a_killed_child_is_an_error_and_nothing_is_left(request_at_hand):
    def kill_worker():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for child in children_running("tpukit.compiler.worker"):
                child.kill()
                return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_worker)
    killer.start()
    with pytest.raises(XLACompilationError, match=r"ended by SIGKILL"):
        run_request(request_at_hand, until="memory")
    killer.join()
    assert not children_running("tpukit.compiler.worker")


def test_several_at_once_each_with_its_own_answer():
    requests = [
        make_request(jnp.sin, "v6e-1", X),
        make_request(jnp.sin, "v6e-1", X, options={"xla_tpu_nonsense": True}),
    ]
    fine, wrong = compile_many(requests, workers=2, until="memory")
    assert fine.fits
    assert isinstance(wrong, FlagError)


class Doubling:
    """The least a workload is."""

    def jit_train_step(self, mesh):
        return jax.jit(lambda state, batch: (state * 2, batch.sum()))

    def abstract_args(self, mesh):
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        leaf = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=place)
        return leaf, leaf


def test_a_workload_brings_its_step_and_its_arguments():
    request = make_request(Doubling(), "v6e-8", mesh={"fsdp": -1})
    assert request.program.facts.mesh_axes == (("fsdp", 8),)
    assert request.program.facts.donated == (0,)
    assert request.program.facts.argument_copies == (1, 1)
    with pytest.raises(MeshError, match=r"needs a mesh.*'fsdp': 8"):
        make_request(Doubling(), "v6e-8")
    with pytest.raises(MeshError, match="has 4 devices, but v6e-8 has 8"):
        make_request(Doubling(), "v6e-8", mesh={"fsdp": 4})
    with pytest.raises(MeshError, match="at most once"):
        make_request(Doubling(), "v6e-8", mesh={"fsdp": -1, "tensor": -1})


def test_facts_survive_json():
    import json

    from tpukit.compiler.program.lowered import ProgramFacts

    facts = lower_program(jnp.sin, X).facts
    assert ProgramFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


def test_the_last_stage_is_named_or_guessed():
    assert parse_until("schedule") == "schedule"
    with pytest.raises(TPUValidationError, match="Did you mean 'codegen'"):
        parse_until("codgen")
