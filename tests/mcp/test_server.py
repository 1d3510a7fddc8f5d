"""The server as agents see it, by the SDK's own client: tools, answers, errors, refusals."""

import importlib
import json
import os
import subprocess
import sys

import anyio
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mcp import Client, StdioServerParameters, stdio_client
from tpukit.cli.app import app
from tpukit.errors import MissingExtraError
from tpukit.hardware import list_chips
from tpukit.job import Job
from tpukit.mcp.access import Access
from tpukit.mcp.brief import fit
from tpukit.mcp.server import make_server
from tpukit.runtime.flags import Flag, FlagRegistry

READ_ONLY = {
    *("plan", "check", "kernels", "kernel", "slices", "slice", "check_flags", "flags", "flag"),
}


def call(tool, access=None, /, **arguments):
    """Call a tool through the SDK's client, and return what came back."""

    async def talk():
        async with Client(make_server(access)) as client:
            return await client.call_tool(tool, arguments)

    return anyio.run(talk)


def list_tools(access=None):
    async def talk():
        async with Client(make_server(access)) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    return anyio.run(talk)


def as_command(*words):
    found = CliRunner().invoke(app, [*words, "--json"])
    return json.loads(found.stdout)


def test_by_default_every_tool_only_reads():
    found = list_tools()
    assert set(found) == READ_ONLY
    assert all(tool.annotations.read_only_hint for tool in found.values())
    assert all(tool.description for tool in found.values())
    assert set(found["check"].input_schema["required"]) == {"model"}


def test_the_model_has_one_name_in_every_tool():
    names = {name for tool in list_tools().values() for name in tool.input_schema["properties"]}
    assert "model" in names
    assert not names & {"target", "preset", "model_name", "job"}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("plan", {"model": "llama3.1-8b", "tokens": "1e12", "top": 20}),
        ("kernels", {}),
        ("slices", {}),
        *(("slices", {"generation": chip.name}) for chip in list_chips()),
        ("slice", {"name": "2xv5p-128"}),
        ("flags", {"pattern": "xla_tpu"}),
        ("flags", {"pattern": "e"}),
        ("flag", {"name": "xla_tpu_scoped_vmem_limit_kib"}),
        ("check_flags", {"flags": "--xla_tpu_rwb_fusion=false --xla_tpu_nothing=1"}),
    ],
)
def test_every_answer_is_short(tool, arguments):
    found = call(tool, **arguments)
    assert not found.is_error, found.content[0].text
    assert 100 < len(found.content[0].text) < 8192


@settings(deadline=None, max_examples=30)
@given(
    st.recursive(
        st.integers() | st.text(max_size=20) | st.none(),
        lambda inner: (
            st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=9), inner, max_size=9)
        ),
        max_leaves=60,
    )
)
def test_any_answer_is_cut_to_fit_and_says_so(value):
    whole = {"kept": 1, "rows": [value] * 40}
    found = fit(whole, limit=1500)
    assert found["kept"] == 1
    if len(json.dumps(whole, indent=2, ensure_ascii=False)) < 1500:
        assert "left_out" not in found
    elif "left_out" not in found:  # figures without their sources were enough
        assert len(json.dumps(found, indent=2, ensure_ascii=False)) <= 1500


def test_a_cut_list_keeps_its_head_and_its_count():
    found = fit({"rows": list(range(5000))}, limit=500)
    assert found["rows"] == list(range(len(found["rows"])))
    assert found["left_out"] == {"rows": f"{len(found['rows'])} of 5000"}
    job = {"launch": {"zones": [f"zone-{number}" for number in range(99)]}, "rate": 1 / 3}
    assert (
        fit({"choices": [{"job": job}], "rows": list(range(999))}, 500)["choices"][0]["job"] == job
    )
    figure = {"value": 2, "unit": "s", "origin": "model", "source": "x", "date": "y", "note": "z"}
    assert fit({"a": [figure]}) == {"a": [{"value": 2, "unit": "s", "origin": "model"}]}


def test_a_slice_is_the_same_as_the_command_prints():
    found = call("slice", name="v5p-128")
    assert not found.is_error
    assert found.structured_content == fit(as_command("slice", "v5p-128"))
    assert json.loads(found.content[0].text) == found.structured_content


def test_slices_are_those_that_the_command_prints():
    found = call("slices", generation="v6e").structured_content
    typed = as_command("slices", "v6e")
    assert found["slices"][0] == "v6e-1: 1 chips, 1x1, 1 hosts, 2.70 USD/h"
    assert [one.partition(":")[0] for one in found["slices"]] == [
        one["name"] for one in typed["slices"]
    ]
    names = [one["name"] for one in call("slices").structured_content["generations"]]
    assert names == [one["name"] for one in as_command("slices")["generations"]]


def test_a_plan_is_the_same_as_the_command_prints():
    found = call("plan", model="tiny", tokens="1e9", on="v6e-4", top=1).structured_content
    typed = as_command("plan", "tiny", "--tokens", "1e9", "--on", "v6e-4", "--top", "1",
                       "--no-verify")  # fmt: skip
    for name in ("headline", "scored", "objective", "assumptions"):
        assert found[name] == typed[name]
    first, same = found["choices"][0], typed["choices"][0]
    for name in ("slice", "mesh", "job", "step_origin"):
        assert first[name] == same[name]
    assert first["step_time_s"] == pytest.approx(same["step_time_s"], rel=1e-5)


def test_an_error_is_the_sentence_of_the_command():
    found = call("slice", name="v6e-5")
    assert found.is_error
    typed = subprocess.run(
        [sys.executable, "-m", "tpukit", "slice", "v6e-5"], capture_output=True, text=True
    )
    sentence = typed.stderr.strip().removeprefix("error: ")
    assert found.content[0].text == f"Error executing tool slice: {sentence}"


@pytest.fixture
def few_flags(monkeypatch):
    """A registry of one flag: reading the installed one takes libtpu ten seconds."""
    one = Flag(name="xla_tpu_rwb_fusion", parsers=("libtpu",), type="bool")
    registry = FlagRegistry([one], jaxlib_version="1", libtpu_version="2")
    monkeypatch.setattr(FlagRegistry, "installed", lambda: registry)


def test_an_unknown_flag_is_refused_with_the_nearest(few_flags):
    found = call("check_flags", flags="--xla_tpu_rwb_fusions=true").structured_content
    assert found["ok"] is False
    assert "xla_tpu_rwb_fusion" in json.dumps(found)


def test_flags_are_found_and_explained(few_flags):
    assert call("flags", pattern="rwb").structured_content["matching"] == 1
    assert call("flags", pattern="rwc").structured_content["matching"] == 0
    assert "bool" in json.dumps(call("flag", name="xla_tpu_rwb_fusion").structured_content)


def test_kernels_are_listed():
    found = call("kernels").structured_content
    assert found["flash_attention"]["cases"]


@pytest.mark.parametrize("tool", ["check", "plan"])
def test_no_code_is_run_unless_that_is_allowed(tool, tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    name = f"{tmp_path / 'own.py'}:build"
    asked = {"model": name, "on": "v6e-1"} if tool == "check" else {"model": name, "tokens": "1e9"}
    found = call(tool, **asked)
    assert found.is_error
    assert "start it with --allow-code" in found.content[0].text
    assert not (tmp_path / "ran").exists()


def test_nor_by_way_of_a_job_file(tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"model": f"{tmp_path / 'own.py'}:build", "on": "v6e-1"}))
    found = call("check", model=str(job))
    assert found.is_error
    assert "--allow-code" in found.content[0].text
    assert not (tmp_path / "ran").exists()


def test_allowed_code_is_run(tmp_path):
    (tmp_path / "own.py").write_text("def build():\n    raise RuntimeError('was run')\n")
    found = call("check", Access(code=True), model=f"{tmp_path / 'own.py'}:build", on="v6e-1")
    assert found.is_error
    assert "was run" in found.content[0].text


def test_job_files_are_written_into_one_folder_alone(tmp_path):
    access = Access(folder=tmp_path)
    assert set(list_tools(access)) == {*READ_ONLY, "write_job"}
    job = {"model": "tiny", "on": "v6e-4", "batch_size": 8}
    found = call("write_job", access, name="job.yaml", job=job)
    assert Job.from_yaml(tmp_path / "job.yaml").to_dict() == job
    assert found.structured_content["next_command"].endswith("job.yaml")
    for name in ("job.yaml", "../job.yaml", "job.py"):
        assert call("write_job", access, name=name, job=job).is_error
    refused = call("write_job", access, name="other.yaml", job={**job, "batch_sise": 8})
    assert "batch_size" in refused.content[0].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_nothing_is_written_by_default(tmp_path):
    assert call("write_job", name="job.yaml", job={"model": "tiny"}).is_error


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "tpukit.mcp.server")
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[mcp\]'"):
        importlib.import_module("tpukit.mcp.server")


@pytest.mark.slow
def test_a_check_over_standard_input_and_output():
    """The command itself, as an agent starts it, with progress and a real compile."""
    told = []

    async def progress(done, total, message):
        told.append(message)

    async def talk():
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "tpukit", "mcp"], env=dict(os.environ)
        )
        async with Client(stdio_client(server)) as client:
            return await client.call_tool(
                "check",
                {"model": "tiny", "on": "v6e-1", "settings": {"sequence_length": 64}},
                progress_callback=progress,
            )

    found = anyio.run(talk).structured_content
    typed = as_command("check", "tiny", "--on", "v6e-1", "--sequence-length", "64")
    assert "spans" not in found
    assert len(json.dumps(found, indent=2)) < 8192
    assert found["memory"]["total_bytes"] == typed["memory"]["total_bytes"]
    # Answers to agents are short: six digits of a figure.
    step_s = typed["prediction"]["step_time_s"]
    assert found["prediction"]["step_time_s"] == pytest.approx(step_s, rel=1e-5)
    assert told  # "compile" is among them, unless an earlier run has compiled it


@pytest.mark.slow
def test_a_kernel_is_estimated():
    found = call("kernel", op="rms_norm", on="v6e").structured_content
    assert {row["chip"] for row in found["rows"]} == {"v6e"}
