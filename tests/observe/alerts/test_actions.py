"""Actions: each kind does its work, and none that fails or hangs hurts anyone."""

import http.server
import json
import logging
import sys
import threading
import time

import pytest

from tpukit.errors import TPUValidationError
from tpukit.hardware.missing import Missing
from tpukit.observe.alerts import Alert, AlertRule
from tpukit.observe.alerts.actions import (
    MOST_WAITING,
    ActionWorker,
    AlertBook,
    as_action,
    run_command,
    send_webhook,
)
from tpukit.observe.alerts.alert import NOTHING, likely_cause

RULE = AlertRule(metric="utilization", condition="<", threshold=0.7, for_s=90)
ALERT = Alert(
    rule=RULE, value=0.41, since=1_700_000_000.0, time=1_700_000_090.0, host="h3", cause="input"
)


class Server:
    """Keeps what is posted to it."""

    def __init__(self, status=200, delay_s=0.0):
        seen = self.seen = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                seen.append((self.headers["Content-Type"], json.loads(body)))
                time.sleep(delay_s)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook?key=secret"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    made = []

    def start(**about):
        made.append(Server(**about))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_the_explanation_names_value_threshold_time_host_and_cause():
    assert ALERT.explanation == (
        "utilization on h3 is 41.0%, below 70.0% for 90 s, since 22:13:20 UTC. Likely cause: input."
    )


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("step_time_s", "step time on h is 2 s, above 1 s since"),
        ("memory_usage_gb", "memory usage on h is 2 GB, above 1 GB since"),
        ("power_watts", "power on h is 2 W, above 1 W since"),
        ("current_tflops", "current tflops on h is 2 TFLOP/s, above 1 TFLOP/s since"),
        ("idle_seconds", "idle on h is 2 s, above 1 s since"),
        ("communication_overhead", "communication overhead on h is 200.0%, above 100.0% since"),
        ("hlo_queue_size", "hlo queue size on h is 2, above 1 since"),
    ],
)
def test_values_are_said_with_their_units(metric, said):
    rule = AlertRule(metric=metric, condition=">", threshold=1)
    alert = Alert(rule=rule, value=2.0, since=5.0, time=5.0, host="h", cause="none")
    assert said in alert.explanation


def test_callables_get_the_alert_if_they_take_it():
    seen = []
    as_action(lambda: seen.append("called"))(ALERT)
    as_action(seen.append)(ALERT)
    as_action(lambda alert: seen.append(alert.value))(ALERT)
    as_action(lambda *arguments: seen.append(arguments))(ALERT)
    assert seen == ["called", ALERT, 0.41, (ALERT,)]


def test_a_builtin_is_told_what_happened(capsys):
    as_action(print)(ALERT)
    assert "utilization on h3 is 41.0%" in capsys.readouterr().out


def test_the_log_has_the_explanation(caplog):
    with caplog.at_level(logging.WARNING):
        as_action("log")(ALERT)
        as_action(None)(ALERT)
    assert caplog.messages == [f"alert: {ALERT.explanation}"] * 2


def test_a_webhook_gets_json(serve):
    server = serve()
    as_action(server.url)(ALERT)
    ((kind, body),) = server.seen
    assert kind == "application/json"
    assert body == ALERT.to_dict()
    assert body["threshold"] == 0.7
    assert body["explanation"] == ALERT.explanation


def test_a_webhook_that_hangs_is_given_up(serve):
    with pytest.raises(OSError, match="timed out"):
        send_webhook(serve(delay_s=5.0).url, ALERT, timeout_s=0.2)


def test_a_command_gets_the_alert_and_no_shell(tmp_path):
    told = tmp_path / "told; touch $(whoami)"
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(sys.stdin.buffer.read())"
    as_action([sys.executable, "-c", script, str(told)])(ALERT)
    assert json.loads(told.read_text())["metric"] == "utilization"
    assert [path.name for path in tmp_path.iterdir()] == [told.name]


def test_a_command_that_hangs_is_killed():
    with pytest.raises(Exception, match="timed out"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], ALERT, timeout_s=0.3)


@pytest.mark.parametrize("action", ["rm -rf /", "ftp://x", [], [1, 2]])
def test_what_cannot_be_done_is_refused_when_it_is_set(action):
    with pytest.raises(TPUValidationError, match="action="):
        as_action(action)


class TestWorker:
    def failing(self, error):
        def perform(_):
            raise error

        return perform

    @pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(1), OSError("no route")])
    def test_an_action_that_fails_is_logged_and_the_next_one_runs(self, error, caplog):
        seen = []

        def perform(alert):
            seen.append(alert)
            if len(seen) == 1:
                raise error

        worker = ActionWorker("w", perform)
        with caplog.at_level(logging.WARNING):
            worker.submit(ALERT)
            worker.submit(ALERT)
            worker.close(timeout_s=30)
        assert len(seen) == 2
        assert len([one for one in caplog.messages if "its action failed" in one]) == 1

    def test_submitting_waits_for_nothing_and_the_queue_is_bounded(self, caplog):
        free = threading.Event()
        worker = ActionWorker("slow", lambda _: free.wait(30))
        with caplog.at_level(logging.WARNING):
            for _ in range(3 * MOST_WAITING):
                worker.submit(ALERT)  # would hang here if it waited
        assert worker.dropped >= 3 * MOST_WAITING - MOST_WAITING - 1
        assert "still busy" in caplog.text
        free.set()
        worker.close(timeout_s=30)

    def test_secrets_in_addresses_and_arguments_are_not_logged(self, caplog, serve):
        server = serve(status=500)
        url = server.url
        secret = [sys.executable, "-c", "raise SystemExit(3)", "secret-token"]
        with caplog.at_level(logging.WARNING):
            for action in (url, "http://127.0.0.1:1/secret", secret, ["/no/such/secret"]):
                worker = ActionWorker("w", as_action(action))
                worker.submit(ALERT)
                worker.close(timeout_s=30)
        failed = [one for one in caplog.messages if "failed" in one]
        assert len(failed) == 4
        assert "exited with code 3" in caplog.text
        assert "key=secret" not in caplog.text
        assert "secret-token" not in caplog.text


class TestBook:
    def test_a_slow_action_of_one_rule_delays_no_other(self):
        book, seen, free = AlertBook("h"), threading.Event(), threading.Event()
        book.add(AlertRule(metric="a", condition=">", threshold=0), lambda: free.wait(30))
        book.add(AlertRule(metric="b", condition=">", threshold=0), seen.set)
        told = book.observe({"a": 1.0, "b": 1.0}, now=0.0)
        assert [alert.name for alert in told] == ["a > 0", "b > 0"]
        assert seen.wait(30)
        free.set()
        book.close()

    def test_a_metric_nobody_measures_stays_quiet(self):
        book = AlertBook("h")
        book.add(AlertRule(metric="x", condition=">=", threshold=0), "log")
        assert book.observe({}, now=0.0) == []
        assert book.observe({"x": Missing("gone")}, now=1.0) == []
        assert book.firing == []

    def test_since_is_when_it_went_out_of_bounds(self):
        book = AlertBook("h")
        book.add(AlertRule(metric="x", condition=">", threshold=0, for_s=30), "log")
        assert book.observe({"x": 1.0}, now=500.0) == []
        (alert,) = book.observe({"x": 1.0}, now=540.0)
        assert alert.time - alert.since == pytest.approx(40.0)
        assert [rule.name for rule in book.firing] == ["x > 0"]
        book.close()


class TestCauses:
    BASE = {"step_time_s": 1.0, "input_stall_s": 0.0, "hlo_queue_size": 3.0}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("metric", "measured", "says"),
        [
            ("utilization", {"input_stall_s": 0.4}, "input pipeline: 0.4 s of a step of 1 s"),
            ("utilization", {"throttle_score": 3.0}, "throttled (score 3 of 10)"),
            ("step_time_s", {"ici_link_health": 10.0}, "ICI link"),
            ("mfu", {"host_cpu_utilization": 0.97}, "CPUs are 97% busy"),
            ("duty_cycle", {"idle_seconds": 12.0}, "no work for 12 s"),
            ("duty_cycle", {"hlo_queue_size": 0.0}, "dispatches too slowly"),
            ("mfu", {"communication_overhead": 0.3}, "communication takes 30%"),
            (
                "memory_usage_gb",
                {"memory_usage_gb": 28.0, "memory_total_gb": 33.6},
                "28.0 of 33.6 GB in use, 5.6 GB are left",
            ),
            (
                "host_memory_usage_gb",
                {"host_memory_usage_gb": 19.0, "host_memory_total_gb": 20.0},
                "memory is 95% full",
            ),
        ],
    )
    def test_the_evidence_is_named(self, metric, measured, says):
        assert says in likely_cause(metric, {**self.BASE, **measured})

    def test_no_evidence_is_said_to_be_none(self):
        assert likely_cause("utilization", self.BASE) == NOTHING
        gone = dict.fromkeys(self.BASE, Missing("gone"))
        assert likely_cause("utilization", gone) == NOTHING
        assert likely_cause("jax_orbax_write_gbytes", self.BASE) == NOTHING
