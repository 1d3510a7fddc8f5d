"""Documents come back from YAML as they were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError
from tpukit.pods.manifests.documents import read_files, read_yaml, to_yaml


@given(st.dictionaries(st.text(min_size=1), st.text(), min_size=1))
def test_any_text_comes_back(data):
    document = {"kind": "ConfigMap", "data": data}
    assert read_yaml(to_yaml([document]), name="x") == [document]


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_any_file_is_read_or_refused(text):
    try:
        documents = read_yaml(text, name="x.yaml")
    except ConfigError as error:
        refusal = str(error)
    else:
        assert all(isinstance(one, dict) for one in documents)
        return
    assert "x.yaml" in refusal


def test_lists_are_taken_apart_and_folders_read(tmp_path):
    (tmp_path / "a.yaml").write_text("kind: List\nitems: [{kind: Pod}, {kind: Job}]\n---\n---\n")
    (tmp_path / "b.json").write_text('{"kind": "JobSet"}')
    (tmp_path / "c.txt").write_text("- no manifest")
    assert [one["kind"] for one in read_files(tmp_path)] == ["Pod", "Job", "JobSet"]
    with pytest.raises(ConfigError, match=r"document 1 is a list"):
        read_files(tmp_path / "c.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_files(tmp_path / "d.yaml")
