"""Logging is off until asked for, then text or JSON lines on standard error."""

import json
import logging
import subprocess
import sys

import pytest

from tpukit.errors import TPUValidationError
from tpukit.runtime.logs import setup_logging


@pytest.fixture(autouse=True)
def clean_logger():
    logger = logging.getLogger("tpukit")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_json_lines_carry_the_extra_fields(capsys):
    setup_logging("info", json=True)
    logger = logging.getLogger("tpukit.somewhere")
    logger.info("step %d done", 3, extra={"step_time_s": 0.25, "host": "ü", "level": 7})
    logger.debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "tpukit.somewhere",
        "message": "step 3 done",
        "step_time_s": 0.25,
        "host": "ü",
        "extra_level": 7,
    }


def test_json_survives_what_json_has_no_word_for(capsys):
    setup_logging("info", json=True)
    logger = logging.getLogger("tpukit")
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("two\nlines", extra={"loss": float("nan"), "where": object})
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] == "nan"
    assert record["where"] == "<class 'object'>"
    assert record["message"] == "two\nlines"
    assert "KeyError: 'lost'" in record["exception"]


def test_text_lines(capsys):
    setup_logging()
    logging.getLogger("tpukit.a.b").warning("careful", extra={"port": 8482})
    line = capsys.readouterr().err
    assert line.endswith(" WARNING tpukit.a.b: careful port=8482\n")


def test_a_second_call_replaces_the_first_and_nothing_else(capsys):
    other = logging.NullHandler()
    logging.getLogger("tpukit").addHandler(other)
    for level in ("debug", "error", "INFO"):
        logger = setup_logging(level)
    logger.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert other in logger.handlers
    assert logger.level == logging.INFO


def test_an_unknown_level_is_refused():
    with pytest.raises(TPUValidationError, match=r"'wanring' is not known.*mean 'warning'"):
        setup_logging("wanring")


def test_import_configures_nothing():
    code = (
        "import logging, tpukit.runtime.logs, tpukit.runtime.multihost\n"
        "assert not logging.getLogger('tpukit').handlers and not logging.root.handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
