"""Who is answered: the token, names of this machine, sizes, and no file that was not found."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor as Pool

import pytest
from served import Served

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.observe.dashboard import access, serving
from tpukit.observe.dashboard.access import LARGEST_BODY, LONGEST_QUERY, Token
from tpukit.observe.dashboard.serving import serve
from tpukit.runtime.address import is_loopback

TOKEN = "a-token-of-some-length"
PATHS = (
    *("/", "/fleet", "/run?run=first", "/plan", "/plan/page?file=plan.json", "/nothing", "/login"),
    *("/api/runs", "/api/live", "/api/fleet", "/api/plan", "/api/compile", "/api/nothing"),
    *("/api/runs/first/summary", "/api/runs/first/series?metrics=loss", "/api/compare?a=first&b=x"),
    *("/assets/app.js", "/assets/kit/pages.css", "/assets/index.html", "/favicon.ico"),
)


@pytest.fixture(scope="module")
def guarded(folder):
    with (
        pytest.MonkeyPatch.context() as patch,
        Served([folder], token=Token(TOKEN), only_loopback=False) as one,
    ):
        patch.setattr(access, "WRONG_TOKEN_S", 0.0)
        yield one


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token(guarded, path):
    for headers in ({}, {"authorization": "Bearer wrong-token-of-length"}, {"cookie": "tpukit=1"}):
        answer = guarded.ask(path, **headers)
        assert answer.status == 401
        assert b"first" not in answer.body
        assert TOKEN.encode() not in answer.body
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_token_is_known_by_header_and_by_cookie(guarded):
    assert guarded.ask("/api/runs", authorization=f"Bearer {TOKEN}").status == 200
    wrong = guarded.ask("/login", method="POST", body=b"token=wrong-token-of-length")
    assert wrong.status == 401
    assert "set-cookie" not in wrong.headers
    right = guarded.ask("/login", method="POST", body=f"token={TOKEN}".encode())
    assert (right.status, right.headers["location"]) == (303, "/")
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    held = cookie.partition(";")[0]
    assert guarded.ask("/api/runs", cookie=held).status == 200
    assert guarded.ask("/api/runs", cookie=held[:-1] + "0").status == 401
    assert guarded.ask("/api/runs", cookie='odd="; =\x7f').status == 401


def test_wrong_tokens_wait_for_each_other_and_the_right_one_does_not(folder, monkeypatch):
    monkeypatch.setattr(access, "WRONG_TOKEN_S", 0.4)
    monkeypatch.setattr(access, "MOST_WAITING", 4)
    with Served([folder], token=Token(TOKEN), only_loopback=False) as one, Pool(8) as pool:

        def guess(number):
            if number % 2:
                return one.ask("/api/runs", authorization=f"Bearer wrong-{number}-of-length").status
            return one.ask("/login", method="POST", body=b"token=wrong-token-of-length").status

        began = time.monotonic()
        guesses = [pool.submit(guess, number) for number in range(8)]
        while one.ask("/api/runs").status != 401:  # without any token there is no wait
            pass
        assert one.ask("/api/runs", authorization=f"Bearer {TOKEN}").status == 200
        codes = sorted(guess.result() for guess in guesses)
        assert time.monotonic() - began >= 4 * 0.4
        assert set(codes) == {401, 429}
        assert codes.count(401) >= 4


@pytest.mark.parametrize(("others", "options", "asks"), [
    ({1000, 1001}, {}, True),
    ({1000}, {}, False),
    ({1000, 1001}, {"no_token": True}, False),
])  # fmt: skip
def test_a_machine_that_others_use_gets_a_token_by_default(
    folder, monkeypatch, others, options, asks
):
    said, apps = [], []
    monkeypatch.setattr(serving, "people", lambda: others)
    monkeypatch.setattr(serving, "run_server", lambda app, listener: apps.append(app))
    serve([folder], port=0, progress=said.append, **options)
    (app,) = apps
    assert (app._token is not None) == asks
    assert ("login#" in " ".join(said)) == asks
    if asks:
        token = said[1].rpartition("#")[2]
        assert app._token.equals(token)
        assert len(token) >= 32


def test_the_page_that_asks_for_the_token_is_whole_without_it(guarded):
    page = guarded.ask("/run?run=first")
    for name in (b"/assets/login.css", b"/assets/login.js"):
        assert name in page.body
        assert guarded.ask(name.decode()).status == 200
    assert b"http:" not in page.body


def test_the_token_is_in_no_log(guarded, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    guarded.ask("/api/runs", authorization=f"Bearer {TOKEN}")
    guarded.ask("/login", method="POST", body=f"token={TOKEN}".encode())
    out, err = capfd.readouterr()
    assert TOKEN not in caplog.text + out + err + repr(Token(TOKEN))


def test_short_tokens_are_none():
    for text in ("", "short", "x" * 15, "ü" * 20, "a line\nand one more"):
        with pytest.raises(ConfigError, match="16 or more"):
            Token(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "pod-3.internal"])
def test_other_addresses_refuse_to_start_without_a_token(host, tmp_path):
    with pytest.raises(ConfigError, match="TPUKIT_DASHBOARD_TOKEN"):
        serve([tmp_path], host=host, port=0, progress=print)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(TPUValidationError, match="is no folder"):
        serve([tmp_path / "none"], progress=print)


def test_a_busy_port_is_said(served, tmp_path):
    with pytest.raises(ConfigError, match="--port"):
        serve([tmp_path], port=served.port, progress=print)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil"])
def test_names_that_others_point_here_are_refused(served, host):
    answer = served.ask("/api/runs", host=host)
    assert answer.status == 421
    assert b"first" not in answer.body


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "LOCALHOST:9000", "[::1]:8", "127.9.9.9"]
)
def test_names_of_this_machine_are_answered_through_any_tunnel(served, host):
    assert served.ask("/api/runs", host=host).status == 200


def test_which_addresses_are_this_machine():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.3.2.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "127.1")))


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../summary",
        "/api/runs/..%2f..%2fsecret.json/summary",
        "/api/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd/summary",
        "/api/runs/%2fetc/summary",
        "/api/runs/first%2f..%2fsecond/summary",
        "/api/runs/first%00/summary",
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/%2e%2e/runs/run.py",
        "/assets//etc/passwd",
        "/assets/pages/..%5c..%5capp.py",
        "/plan/page?file=../plan.json",
        "/plan/page?file=/etc/passwd",
        "/plan/page?file=secret.json",
        "/api/plan?file=secret.json",
        "/api/plan?file=check.json",
        "/api/compile?file=runs/first/run.json",
    ],
)
def test_no_path_leads_out(served, path):
    answer = served.ask(path)
    assert answer.status in (404, 400), answer.body
    assert b"hunter2" not in answer.body
    assert b"root:" not in answer.body
    assert b"import" not in answer.body
    assert answer.data["way_out"]


def test_what_is_too_large_is_refused(served):
    query = "x" * (LONGEST_QUERY + 1)
    assert served.ask(f"/api/runs?{query}").status == 414
    assert served.ask(f"/api/runs/{query}/summary").status == 414
    assert served.ask("/login", method="POST", body=b"x" * (LARGEST_BODY + 1)).status == 413
    assert served.ask("/api/runs", content_length=str(10**12)).status == 413
    chunked = served.ask(
        "/login", method="POST", body=b"5\r\ntoken\r\n0\r\n\r\n", transfer_encoding="chunked"
    )
    assert chunked.status == 413
    assert served.ask("/api/runs", x="y" * 100_000).status == 431


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(served, method):
    answer = served.ask("/api/runs", method=method)
    assert answer.status == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/nothing", "/assets/app.js", "/assets/no"])
def test_every_answer_has_the_policy(served, path):
    headers = served.ask(path).headers
    policy = {
        one.split()[0]: one.split()[1:] for one in headers["content-security-policy"].split(";")
    }
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == policy["trusted-types"] == ["'none'"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


def test_a_framed_page_is_of_no_server(served):
    headers = served.ask("/compile/page?file=check.json").headers
    assert headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in headers["content-security-policy"]
    assert "frame-ancestors 'self'" in headers["content-security-policy"]


def test_an_error_nobody_foresaw_is_guarded_and_says_nothing(folder):
    def broken():
        raise KeyError("hunter2")

    with Served([folder], fleet=broken) as one:
        answer = one.ask("/api/fleet")
    assert answer.status == 500
    assert b"hunter2" not in answer.body
    assert answer.headers["x-content-type-options"] == "nosniff"
