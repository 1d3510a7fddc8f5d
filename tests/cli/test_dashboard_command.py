"""`tpukit dashboard`: what it says, and the pods it shows without asking anybody."""

import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.cli.dashboard import _fleet
from tpukit.errors import ConfigError
from tpukit.job.sections import LaunchSettings
from tpukit.observe.dashboard import serving
from tpukit.pods import PodConfig
from tpukit.pods.store import ProviderRecord, Store


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("TPUKIT_DASHBOARD_TOKEN", raising=False)


def test_it_says_where_it_is_and_never_the_token(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "run_server", lambda app, listener: None)
    token = "a-token-nobody-reads"
    monkeypatch.setenv("TPUKIT_DASHBOARD_TOKEN", token)
    said = CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", "0"])
    assert said.exit_code == 0, said.exception
    assert said.output.startswith("http://127.0.0.1:")
    assert str(tmp_path) in said.output
    assert token not in said.output


def test_other_addresses_need_a_token():
    said = CliRunner().invoke(app, ["dashboard", "--host", "0.0.0.0", "--port", "0"])
    assert isinstance(said.exception, ConfigError)
    assert "--token" in str(said.exception)


def test_a_browser_is_opened_on_request(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(serving, "run_server", lambda app, listener: None)
    monkeypatch.setattr(serving.webbrowser, "open", opened.append)
    CliRunner().invoke(app, ["dashboard", str(tmp_path), "--port", "0", "--open"])
    assert len(opened) == 1
    assert opened[0].startswith("http://127.0.0.1:")


def test_pods_are_shown_as_they_were_last_seen():
    store = Store()
    provider = ProviderRecord.of("gcp", LaunchSettings(project="none", zone="us-east5-b"))
    config = PodConfig(tpu_type="v6e-8").with_preemptible(True)
    store.wanted.want("llama", config, provider)  # no such project: asking would be an error
    store.close()
    found = _fleet()
    (pod,) = found["pods"]
    assert (pod["name"], pod["state"], pod["tier"]) == ("llama", "wanted", "spot")
    assert pod["asked_for"] == "v6e-8"
    assert found["costs"]["runs"] == []
