"""The gathering of hosts, with threads as hosts: who comes, who lies, who goes away."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from free_ports import free_port
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import CommunicationTimeout, TPUDistributedError
from tpukit.runtime.address import Address, listen
from tpukit.runtime.multihost import LONGEST_LINE_BYTES, Gathering, Hello, report_to_host_0

TIMEOUT_S = 10.0


def hello(host_id, num_hosts=2, jax_version="1.2.3"):
    return Hello(host_id=host_id, num_hosts=num_hosts, jax_version=jax_version)


@pytest.fixture
def listener():
    with listen(Address("127.0.0.1", free_port())) as listening:
        yield listening


@pytest.fixture
def pool():
    with ThreadPoolExecutor(20) as executor:
        yield executor


def gather(pool, listener, num_hosts, timeout_s=TIMEOUT_S):
    return pool.submit(Gathering(listener, hello(0, num_hosts)).wait_for_all, timeout_s)


def joining(pool, listener, own, timeout_s=TIMEOUT_S):
    return pool.submit(
        report_to_host_0, listener.getsockname(), own, timeout_s=timeout_s, retry_s=0.02
    )


def test_all_hosts_go_at_once(pool, listener):
    others = [joining(pool, listener, hello(host, 16)) for host in range(1, 16)]
    gather(pool, listener, 16).result(TIMEOUT_S)
    assert {other.result(TIMEOUT_S) for other in others} == {"127.0.0.1"}


def test_host_zero_may_come_last(pool, listener):
    address = listener.getsockname()
    listener.close()
    other = pool.submit(report_to_host_0, address, hello(1), timeout_s=TIMEOUT_S, retry_s=0.02)
    time.sleep(0.1)
    with listen(Address(*address)) as late:
        gather(pool, late, 2).result(TIMEOUT_S)
    assert other.result(TIMEOUT_S) == "127.0.0.1"


def test_missing_hosts_are_named_to_all(pool, listener):
    other = joining(pool, listener, hello(3, 12))
    message = r"2 of 12 hosts came within 0.3 s; missing: host 1, 2, 4, 5, 6, 7, 8, 9 and 2 more"
    with pytest.raises(CommunicationTimeout, match=message):
        gather(pool, listener, 12, timeout_s=0.3).result(TIMEOUT_S)
    with pytest.raises(CommunicationTimeout, match=message):
        other.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (hello(1, 4), r"Host 1 \(127.0.0.1\) has num_hosts 4 and host 0 has 3"),
        (hello(1, 3, "0.1"), r"has jax version 0.1 and host 0 has 1.2.3"),
        (hello(0, 3), r"A second process, at 127.0.0.1, says it is host 0"),
        (hello(7, 3), r"says it is host 7; give every process its own host_id from 0 to 2"),
    ],
    ids=["other size", "other jax", "second host 0", "no such host"],
)
def test_hosts_that_disagree_are_told_so(pool, listener, said, message):
    job = gather(pool, listener, 3)
    with pytest.raises(TPUDistributedError, match=message) as told:
        joining(pool, listener, said).result(TIMEOUT_S)
    assert not isinstance(told.value, CommunicationTimeout)
    with pytest.raises(TPUDistributedError, match=message):
        job.result(TIMEOUT_S)


def test_two_hosts_with_one_number(pool, listener):
    job = gather(pool, listener, 3)
    twins = [joining(pool, listener, hello(1, 3)) for _ in range(2)]
    for waiting in (job, *twins):
        with pytest.raises(TPUDistributedError, match="says it is host 1"):
            waiting.result(TIMEOUT_S)


def test_a_host_that_dies_may_come_again(pool, listener):
    job = gather(pool, listener, 3)
    with socket.create_connection(listener.getsockname()) as died:
        died.sendall(hello(1, 3).to_line())
        time.sleep(0.1)
    again = [joining(pool, listener, hello(host, 3)) for host in (1, 2)]
    job.result(TIMEOUT_S)
    assert [host.result(TIMEOUT_S) for host in again] == ["127.0.0.1"] * 2


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * (2 * LONGEST_LINE_BYTES), b"[]\n", b"\xff\n", b""],
    ids=["http", "endless line", "not an object", "not UTF-8", "silence"],
)
def test_strangers_do_not_disturb_the_job(pool, listener, noise):
    job = gather(pool, listener, 2)
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(noise)
        time.sleep(0.05)
        other = joining(pool, listener, hello(1))
        job.result(TIMEOUT_S)
        assert other.result(TIMEOUT_S) == "127.0.0.1"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answers, but not as host 0 of a tpukit job"),
        (b"", "hangs up without an answer"),
    ],
    ids=["another service", "hangs up"],
)
def test_someone_else_at_the_address(listener, answer, reason):
    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(LONGEST_LINE_BYTES)
                connection.sendall(answer)

    server = threading.Thread(target=serve)
    server.start()
    try:
        with pytest.raises(CommunicationTimeout, match=reason):
            report_to_host_0(listener.getsockname(), hello(1), timeout_s=0.3, retry_s=0.02)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def test_a_silent_service_cannot_hold_a_host(listener):
    started = time.monotonic()
    with pytest.raises(CommunicationTimeout, match=r"within 0.2 s \(no answer\)"):
        report_to_host_0(listener.getsockname(), hello(1), timeout_s=0.2)
    assert time.monotonic() - started < 2


def test_a_name_that_does_not_resolve(monkeypatch):
    def no_such_name(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    with pytest.raises(CommunicationTimeout, match="the name 'pod-0' does not resolve"):
        report_to_host_0(("pod-0", 1), hello(1), timeout_s=0.1)
    with pytest.raises(TPUDistributedError, match=r"'pod-0' does not resolve on this machine"):
        Address("pod-0", 1).resolved()


@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader(line):
    Hello.from_line(line)


@given(st.integers(), st.integers(), st.text())
def test_hello_round_trips(host_id, num_hosts, jax_version):
    said = hello(host_id, num_hosts, jax_version)
    assert Hello.from_line(said.to_line().rstrip(b"\n")) == said


@pytest.mark.parametrize("field", ["host_id", "num_hosts", "jax_version"])
def test_a_hello_with_a_wrong_type_is_none(field):
    line = (
        hello(1).to_line().replace(b'"%s": ' % field.encode(), b'"%s": [], "x": ' % field.encode())
    )
    assert Hello.from_line(line) is None
