"""Whatever a child does, the parent gets its reply or a clear error, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tpukit.errors import MissingExtraError
from tpukit.runtime.child import ChildError, offline_environment, run_child, watch_child

HERE = str(Path(__file__).parent)
MODULE = "child_under_test"


def ask(do, *, timeout_s=20, **request):
    environment = offline_environment({"PYTHONPATH": HERE})
    return run_child(MODULE, {"do": do, **request}, timeout_s=timeout_s, environment=environment)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids):
    for _ in range(200):
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def read_note(path):
    for _ in range(200):
        if path.exists() and len(words := path.read_text().split()) == 2:
            return [int(word) for word in words]
        time.sleep(0.05)
    raise AssertionError("the child never wrote its note")


def test_a_reply_comes_back():
    assert ask("echo", say={"ü": [1, None, 2.5]}) == {"echo": {"ü": [1, None, 2.5]}}


def test_an_exception_keeps_its_name_and_words():
    with pytest.raises(ChildError, match="no such thing") as caught:
        ask("raise")
    assert caught.value.kind == "KeyError"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("abort", r"was ended by SIGABRT before it answered. Its last words:\n[\s\S]*last words"),
        ("segfault", r"was ended by SIGSEGV before it answered"),
        ("exit", r"exited with code 7 before it answered. Its last words:\nleaving"),
        ("not json", r"exited with code 1 [\s\S]*not JSON serializable"),
    ],
)
def test_a_death_is_told_with_its_last_words(do, message):
    with pytest.raises(ChildError, match=message) as caught:
        ask(do)
    assert caught.value.kind == "exit"


def test_a_module_that_does_not_exist():
    with pytest.raises(ChildError, match=r"No module named tpukit\.nowhere"):
        run_child("tpukit.nowhere", {}, timeout_s=20)


def test_a_request_that_is_not_json_starts_nothing():
    with pytest.raises(TypeError, match="not JSON serializable"):
        ask("echo", say=object())


def test_output_of_any_size_and_encoding_is_harmless():
    assert ask("chatter", bytes=3_000_000) == {"chattered": 3_000_000}
    assert len(ask("big reply", bytes=3_000_000)["big"]) == 3_000_000


def test_a_reply_counts_even_if_the_child_crashes_on_its_way_out():
    assert ask("crash after the reply") == {"said": "before"}


def test_a_grandchild_left_behind_neither_delays_the_reply_nor_stays():
    started = time.monotonic()
    pid = ask("leave a grandchild")["pid"]
    assert time.monotonic() - started < 15
    assert wait_until_gone(pid)


def test_the_time_out_kills_grandchildren_too(tmp_path):
    note = tmp_path / "note"
    with pytest.raises(ChildError, match="did not answer within 3 s and was killed") as caught:
        ask("hang with a grandchild", timeout_s=3, note=str(note))
    assert caught.value.kind == "timeout"
    assert wait_until_gone(*read_note(note))


def watch(do, *, stop_when, timeout_s=20, **request):
    environment = offline_environment({"PYTHONPATH": HERE})
    return watch_child(
        MODULE,
        {"do": do, **request},
        timeout_s=timeout_s,
        environment=environment,
        stop_when=stop_when,
    )


def test_a_watched_child_is_stopped_with_all_it_started(tmp_path):
    note = tmp_path / "note"
    stopped = watch("hang with a grandchild", stop_when=lambda: read_note(note), note=str(note))
    assert stopped is None
    assert wait_until_gone(*read_note(note))


def test_a_watched_child_that_is_never_stopped_answers_or_runs_out_of_time(tmp_path):
    assert watch("echo", stop_when=lambda: False, say="hi") == {"echo": "hi"}
    with pytest.raises(ChildError, match=r"did not answer within 0\.5 s"):
        watch(
            "hang with a grandchild",
            stop_when=lambda: False,
            timeout_s=0.5,
            note=str(tmp_path / "note"),
        )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_the_child_ends_with_its_parent(tmp_path, how):
    note = tmp_path / "note"
    code = (
        # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tpukit.runtime.child import run_child, offline_environment\n"
        f"run_child({MODULE!r}, {{'do': 'hang with a grandchild', 'note': {str(note)!r}}},"
        f" timeout_s=60, environment=offline_environment({{'PYTHONPATH': {HERE!r}}}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    pids = read_note(note)
    parent.send_signal(how)
    parent.wait(10)
    assert wait_until_gone(*pids)


@pytest.mark.parametrize(
    "message",
    ["No module named 'libtpu'", "JAX TPU support not installed; cannot generate TPU topology."],
)
def test_a_missing_libtpu_names_the_extra(message):
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[tpu\]'"):
        ask("lose libtpu", message=message)


def test_the_offline_environment_drops_what_was_set_for_a_real_tpu(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=true")
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=true")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    monkeypatch.setenv("KEPT", "yes")
    seen = ask("environment")
    assert seen["TPU_SKIP_MDS_QUERY"] == "1"
    assert seen["JAX_PLATFORMS"] == "cpu"
    assert seen["KEPT"] == "yes"
    assert not {"LIBTPU_INIT_ARGS", "XLA_FLAGS", "TPU_VISIBLE_CHIPS"} & set(seen)
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0,1", "the user's own environment is untouched"
