"""Logs are read to their end, also of a container that ends while nobody answers."""

import pytest
from kubernetes.client.exceptions import ApiException

from tpukit.errors import ProviderError
from tpukit.pods.providers.gke import following

POD = {
    "metadata": {"name": "one", "namespace": "default", "uid": "1"},
    "status": {"phase": "Succeeded"},
}


class Answers:
    """A cluster with one Pod that has ended, whose log is refused at first."""

    def __init__(self, refusals):
        self.refusals = refusals

    def get(self, path):
        return POD

    def stream(self, path, **query):
        if self.refusals:
            raise self.refusals.pop()
        return self

    def lines(self):
        yield "2026-11-16T00:00:00.000000000Z the last words"

    def close(self):
        pass


@pytest.mark.parametrize(
    ("refusal", "heard"),
    [
        (ApiException(status=503), ["the last words"]),
        (ProviderError("nobody answers"), ["the last words"]),
        (ApiException(status=400), []),  # it never started, and has nothing to say
    ],
)
def test_a_log_that_could_not_be_read_is_asked_for_again(monkeypatch, refusal, heard):
    monkeypatch.setattr(following, "PAUSE_S", 0.01)
    lines = []
    stream = following.LogStream(Answers([refusal, refusal]), POD, "main", lines.append)
    stream.join(10)
    assert lines == heard
    assert not stream._thread.is_alive()
