"""What the server bounds: connections, the time for a request, memory, lines of log."""

import asyncio
import socket
import time

import pytest
from sample_runs import make_run
from served import Served

from tpukit.observe.dashboard.answers import Query
from tpukit.observe.dashboard.app import answer_about
from tpukit.observe.dashboard.library import AnswerMemory, Library, Reader
from tpukit.observe.dashboard.serving import AcceptErrors, Connections

HALF = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def half_request(port):
    line = socket.create_connection(("127.0.0.1", port), timeout=30)
    line.sendall(HALF)
    return line


def is_closed(line):
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def rest_of(line):
    """Return what comes until the connection is closed."""
    found = b""
    try:
        while more := line.recv(1 << 16):
            found += more
    except ConnectionResetError:
        pass
    return found


def test_half_requests_make_room_for_whole_ones(tmp_path, capfd):
    make_run(tmp_path / "run", steps=10, hosts=1, chips=1)
    with Served([tmp_path], connections=Connections(20)) as one:
        held = [half_request(one.port) for _ in range(100)]
        for _ in range(5):
            assert one.ask("/api/runs").status == 200
        assert all(map(is_closed, held[:70])), "those that waited longest are closed first"
        for line in held:
            line.close()
    assert capfd.readouterr().err == ""


def test_viewers_keep_their_stream_when_others_fill_the_server(tmp_path):
    make_run(tmp_path / "run", steps=10, hosts=1, chips=1)
    with Served([tmp_path], connections=Connections(10)) as one:
        stream = one.follow()
        assert next(stream)[0] == "runs"
        held = [half_request(one.port) for _ in range(30)]
        assert one.ask("/api/runs").status == 200
        (tmp_path / "run" / "run.json").write_text("{ }")
        make_run(tmp_path / "other", steps=5, hosts=1, chips=1)
        assert next(stream)[0] in ("runs", "beat")
        for line in held:
            line.close()


def test_a_request_that_does_not_come_is_not_waited_for(tmp_path):
    make_run(tmp_path / "run", steps=10, hosts=1, chips=1)
    with (
        Served([tmp_path], connections=Connections(request_s=0.3)) as one,
        socket.create_connection(("127.0.0.1", one.port), timeout=30) as silent,
        half_request(one.port) as half,
        socket.create_connection(("127.0.0.1", one.port), timeout=30) as again,
    ):
        again.sendall(HALF + b"\r\n")
        assert again.recv(15) == b"HTTP/1.1 200 OK"
        again.sendall(HALF)
        assert is_closed(silent)
        assert is_closed(half)
        assert b"HTTP" not in rest_of(again), "the half request has no answer"


def test_refused_connections_are_one_line_a_minute(caplog):
    loop, errors = asyncio.new_event_loop(), AcceptErrors()
    try:
        context = {
            "message": "socket.accept() out of system resource",
            "exception": OSError(24, "Too many open files"),
        }
        for _ in range(1000):
            errors(loop, context)
        assert [record.getMessage() for record in caplog.records] == [
            "connections are refused: [Errno 24] Too many open files"
        ]
        errors(loop, {"message": "another error"})
        assert "another error" in caplog.text
    finally:
        loop.close()


@pytest.fixture
def runs(tmp_path):
    for number in range(6):
        make_run(tmp_path / f"run-{number}", steps=2000, hosts=1, chips=1)
    return tmp_path


def test_runs_that_are_not_looked_at_leave_memory(runs):
    library = Library([runs])
    one_run = 2000 * 9 * 8
    library._memory = memory = AnswerMemory(run_bytes=3 * one_run)
    asked = Query({"metrics": "loss", "points": "100"})
    first = {}
    for name, one in library.runs().items():
        first[name] = answer_about(one, "series", asked)
        assert one_run <= memory.loaded_bytes <= 3 * one_run
    for name, one in library.runs().items():
        assert (
            answer_about(one, "series", Query({"metrics": "loss", "points": "100"})) == first[name]
        )
        zoomed = answer_about(one, "series", Query({"metrics": "loss", "points": "50"}))
        assert zoomed != first[name], "a run that was dropped is read again"
        assert memory.loaded_bytes <= 3 * one_run


def test_answers_that_were_not_asked_for_longest_are_forgotten(runs):
    made = []
    reader = Reader(runs / "run-0", AnswerMemory(answer_bytes=1000))

    def ask(what):
        return reader.answer(what, 1, lambda _: made.append(what) or "x" * 300)

    for what in ("a", "b", "a", "c", "a", "d", "a", "b"):
        ask(what)
    assert made == ["a", "b", "c", "d", "b"]
    assert reader.answer("large", 1, lambda _: "x" * 5000)
    ask("a")
    assert made[-1] == "a", "one that is larger than all room pushes the others out"


def test_a_run_that_ended_is_not_summarised_again_and_again(tmp_path, monkeypatch):
    from tpukit.observe.dashboard import app

    make_run(tmp_path / "ended", steps=10, hosts=1, chips=1, ended="done")
    make_run(tmp_path / "running", steps=10, hosts=1, chips=1)
    seen, now = [], [0.0]
    right = app.summary_view
    monkeypatch.setattr(
        app, "summary_view", lambda name, run: seen.append(name) or right(name, run)
    )
    monkeypatch.setattr(app.time, "monotonic", lambda: now[0])
    library = Library([tmp_path], clock=time.perf_counter)
    for _ in range(5):
        app.look(library)
        now[0] += app.LOOKED_AT_LEAST_EVERY_S
    assert seen.count("ended") <= 2
    assert seen.count("running") == 5
