"""Variables of a job's processes: read back from files, and shown nowhere."""

import json
import logging

import pytest
from rich.console import Console

from tpukit.checker.next_command import command, job_settings
from tpukit.checker.report import read_report
from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.job.hidden import HIDDEN
from tpukit.job.reading import read_job
from tpukit.job.settings import SettingsView
from tpukit.pods.launching.launch import read_variables
from tpukit.pods.settings import PodSettings

CANARY = "canary-value-0123456789"
JOB = {
    "model": "tiny",
    "on": "v6e-8",
    "launch": {"environment": {"PLAIN": CANARY, "HF_TOKEN": CANARY, "TAKEN": "$SHELL"}},
}


def test_no_form_of_a_job_that_is_shown_has_a_literal_value():
    job = Job.from_dict(JOB)
    shown = [repr(job), str(job), str(job.to_dict()), str(job.replace(batch_size=8).to_dict())]
    shown += [str(SettingsView.of_job(job).to_dict()), command("check", *job_settings(job))]
    settings = PodSettings.gather(JOB["launch"])
    shown += [str(settings.to_dict()), repr(settings), settings.to_yaml()]
    console = Console(width=200)
    with console.capture() as printed:
        console.print(SettingsView.of_job(job))
        console.print(settings)
    assert not [text for text in (*shown, printed.get()) if CANARY in text]
    hidden = {"PLAIN": HIDDEN, "HF_TOKEN": HIDDEN, "TAKEN": "$SHELL"}
    assert job.to_dict()["launch"]["environment"] == hidden


def test_files_processes_and_comparisons_have_every_value(tmp_path):
    job = Job.from_dict(JOB)
    job.to_yaml(tmp_path / "job.yaml")
    assert Job.from_yaml(tmp_path / "job.yaml") == job
    assert Job.from_dict(job.to_dict(with_variables=True)) == job
    assert job.replace(batch_size=8).launch == job.launch
    assert Job.from_dict(job.to_dict()) != job


def test_a_job_read_from_a_report_is_not_launched_with_the_hidden_value():
    job = Job.from_dict(Job.from_dict(JOB).to_dict())
    with pytest.raises(ConfigError, match=r"PLAIN: \$PLAIN and set the variable"):
        read_variables(job.launch.environment)


@pytest.mark.parametrize("value", [{"HF_TOKEN": [CANARY]}, CANARY, [CANARY]])
def test_a_wrong_value_is_refused_without_repeating_it(value):
    with pytest.raises(ConfigError, match=r"launch\.environment") as refused:
        Job.from_dict({**JOB, "launch": {"environment": value}})
    assert CANARY not in str(refused.value)


def test_reports_of_older_versions_are_read_without_the_values(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"schema": "tpukit.report/1", "job": JOB}))
    assert CANARY not in str(read_report(report))


def test_a_typed_variable_is_not_in_the_next_command():
    typed = {"on": "v6e-8", "launch.environment": {"A": CANARY}, "launch.spot": True}
    assert command("check", "tiny", typed) == "tpukit check tiny --on v6e-8 --set launch.spot=true"


def test_literals_that_look_like_secrets_are_warned_of_once(tmp_path, caplog):
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: tiny\non: v6e-8\nlaunch:\n  environment:\n"
        f"    HF_TOKEN: {CANARY}\n    ANY: hf_{'a' * 34}\n    PROXY: http://me:{CANARY}@proxy\n"
        "    TOKENIZERS_PARALLELISM: 'false'\n    MAX_TOKENS: '1000000000'\n    MODE: fast\n"
        "    MY_TOKEN: $MY_TOKEN\n    GOOGLE_APPLICATION_CREDENTIALS: /etc/key.json\n"
    )
    with caplog.at_level(logging.WARNING, "tpukit"):
        read_job(str(file))
        read_job(str(file))
    warned = [record.getMessage() for record in caplog.records]
    named = [text.split()[0].rpartition(".")[2] for text in warned]
    assert named == ["HF_TOKEN", "ANY", "PROXY"]
    assert f"({'file'} {file}:4) looks like a secret; write HF_TOKEN: $HF_TOKEN" in warned[0]
    assert not [text for text in warned if CANARY in text]
