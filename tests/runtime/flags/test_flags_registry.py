"""The registry says what the installed parsers say: they are asked again, another way."""

import json
import re
from importlib.metadata import PackageNotFoundError

import pytest

from tpukit.errors import FlagError, MissingExtraError
from tpukit.runtime.flags import FlagRegistry, reading
from tpukit.runtime.flags.flag import Flag

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

# Right and wrong values of each type, chosen apart from the ones that told the types.
RIGHT = {
    "bool": "false", "int32": "-12", "int64": "99999999999", "uint32": "12",
    "uint64": "99999999999", "float": "0.25", "duration": "250ms",
}  # fmt: skip
WRONG = {
    "bool": "maybe", "int32": "99999999999", "int64": "0.5", "uint32": "99999999999",
    "uint64": "-12", "float": "fast", "duration": "soon", "enum": "no_such_choice",
}  # fmt: skip
FLAGS_OF_EACH_TYPE = 25


def sample(registry, parser):
    for kind in WRONG:
        same = [f for f in registry.values() if f.type == kind and f.parsers == (parser,)]
        yield from same[:: max(1, len(same) // FLAGS_OF_EACH_TYPE)]


def test_it_holds_both_parsers(registry):
    by_parser = {parser: len(registry.search(parser=parser)) for parser in ("libtpu", "xla")}
    assert by_parser["libtpu"] > 1500
    assert by_parser["xla"] > 250


def test_libtpu_agrees_with_every_type(registry):
    flags = list(sample(registry, "libtpu"))
    right = {f.name: f.choices[-1] if f.type == "enum" else RIGHT[f.type] for f in flags}
    # A quoted default marks a flag whose text is read by a compile, not by the parser.
    wrong = {f.name: WRONG[f.type] for f in flags if f.type != "enum"}
    assert len(flags) > 100
    complaints, unknown = reading.ask_libtpu(right.items())
    assert (complaints, unknown) == ({}, set())
    complaints, unknown = reading.ask_libtpu(wrong.items())
    assert (set(complaints), unknown) == (set(wrong), set())
    for flag in flags:
        assert flag.render(right[flag.name])
        with pytest.raises(FlagError, match=flag.name):
            flag.render(WRONG[flag.type])


def test_jaxlib_agrees_with_every_type(registry):
    flags = list(sample(registry, "xla"))
    right = [f"--{f.name}={f.choices[-1] if f.type == 'enum' else RIGHT[f.type]}" for f in flags]
    wrong = [f"--{f.name}={WRONG[f.type]}" for f in flags]
    (said,) = reading.ask_jaxlib([" ".join(right)])
    assert said == ""
    assert all(reading.ask_jaxlib(wrong))


def test_jaxlib_prints_the_same_defaults(registry):
    (usage,) = reading.ask_jaxlib(["--xla_backend_optimization_level=x"])
    printed = dict(re.findall(r"^\t--(\w+)=(\S*)\s*\t\w+\t", usage, re.MULTILINE)[:-1])
    bools = {name: text for name, text in printed.items() if text in ("true", "false")}
    assert len(bools) > 40
    known = {name: registry[name].default for name in bools if registry[name].default is not None}
    assert len(known) > 40
    assert known == {name: bools[name] for name in known}


def test_a_flag_in_the_wrong_variable_ends_the_process(registry):
    assert registry["xla_tpu_rwb_fusion"].variable == "LIBTPU_INIT_ARGS"
    assert registry["xla_gpu_triton_gemm_any"].variable == "XLA_FLAGS"
    (said,) = reading.ask_jaxlib(["--xla_tpu_rwb_fusion=true"])
    assert "Unknown flag in XLA_FLAGS: --xla_tpu_rwb_fusion=true" in said
    _, unknown = reading.ask_libtpu([("xla_gpu_triton_gemm_any", "true")])
    assert unknown == {"xla_gpu_triton_gemm_any"}


@pytest.mark.parametrize(
    "name", ["xla_tpu_enable_data_parallelism", "xla_gpu_enable_triton_softmax_fusion"]
)
def test_flags_of_the_documents_that_are_gone(registry, name):
    assert name not in registry
    (said,) = reading.ask_jaxlib([f"--{name}=true"])
    assert "Unknown flag" in said


def test_known_facts(registry):
    vmem = registry["xla_tpu_scoped_vmem_limit_kib"]
    assert (vmem.type, vmem.default, vmem.compile_option) == ("int64", "-1", True)
    megacore = registry["xla_tpu_enable_megacore_fusion"]
    assert megacore.choices == ("auto", "false", "disabled", "true", "enabled")
    dump = registry["xla_jf_dump_to"]
    assert (dump.type, dump.compile_option) == ("string", False)
    hang = registry["megascale_graph_hang_threshold"]
    assert (hang.type, hang.variable, hang.default) == ("duration", "LIBTPU_INIT_ARGS", None)
    assert "defaults of its compiler flags only" in hang.default_reason
    assert registry["xla_backend_optimization_level"].description.startswith("Numerical")


def test_lookup_takes_dashes_and_names_the_nearest(registry):
    assert registry.find("--xla_tpu_rwb_fusion").name == "xla_tpu_rwb_fusion"
    with pytest.raises(FlagError, match="Did you mean 'xla_tpu_scoped_vmem_limit_kib'"):
        registry.find("xla_tpu_scoped_vmem_limit")
    with pytest.raises(FlagError, match="'xla_tpu_enable_data_parallel_all_reduce_opt'"):
        registry.find("xla_tpu_enable_data_parallelism")
    with pytest.raises(FlagError, match=r"No flag 'zzz' in libtpu \S+ or jaxlib \S+\.$"):
        registry.find("zzz")


def test_search_is_for_a_part_of_a_name(registry):
    found = registry.search("--XLA_TPU_megacore_fusion_allow", parser="libtpu")
    assert [flag.name for flag in found] == ["xla_tpu_megacore_fusion_allow_ags"]
    assert registry.search("megacore", parser="xla") == []


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "^xla", "(", "xla.*", r"(\w+_)+\W", "a b"])
def test_a_regular_expression_is_refused_and_never_run(registry, pattern):
    with pytest.raises(FlagError, match="plain text and not as a pattern"):
        registry.search(pattern)


class TestCache:
    @pytest.fixture(autouse=True)
    def small_parsers(self, tmp_path, monkeypatch):
        """Stand-ins for the two slow readings, counted."""
        self.readings = 0

        def read_jaxlib():
            self.readings += 1
            return {"xla_cpu_x": Flag("xla_cpu_x", ("xla",), "bool", default="false")}

        monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(reading, "read_jaxlib", read_jaxlib)
        monkeypatch.setattr(
            reading, "read_libtpu", lambda: {"xla_tpu_x": Flag("xla_tpu_x", ("libtpu",), "int64")}
        )
        monkeypatch.setattr("tpukit.runtime.flags.registry._LOADED", {})
        self.forget = lambda: monkeypatch.setattr("tpukit.runtime.flags.registry._LOADED", {})

    def path(self, tmp_path):
        (path,) = (tmp_path / "flags").iterdir()  # and no partial file beside it
        return path

    def test_the_second_time_comes_from_disk(self, tmp_path):
        assert not FlagRegistry.is_cached()
        first = FlagRegistry.installed()
        self.forget()
        assert FlagRegistry.is_cached()
        assert dict(FlagRegistry.installed()) == dict(first)
        assert self.readings == 1
        assert first.libtpu_version in self.path(tmp_path).name
        assert first.jaxlib_version in self.path(tmp_path).name
        FlagRegistry.installed(refresh=True)
        assert self.readings == 2

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"flags": [{}]}', '{"flags": 3}', "\0"])
    def test_a_damaged_file_is_read_anew(self, tmp_path, damage):
        good = dict(FlagRegistry.installed())
        self.path(tmp_path).write_text(damage)
        self.forget()
        assert dict(FlagRegistry.installed()) == good
        assert self.readings == 2
        assert json.loads(self.path(tmp_path).read_text())["flags"]

    def test_a_folder_that_cannot_be_written_is_no_obstacle(self, tmp_path, monkeypatch):
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("TPUKIT_CACHE_DIR", str(blocked))
        assert "xla_tpu_x" in FlagRegistry.installed()

    def test_without_libtpu_a_tpu_flag_names_the_extra(self, monkeypatch):
        def only_jaxlib(package):
            if package != "jaxlib":
                raise PackageNotFoundError(package)
            return "9.9"

        monkeypatch.setattr("tpukit.runtime.versions.version", only_jaxlib)
        registry = FlagRegistry.installed()
        assert registry.find("xla_cpu_x").type == "bool"
        with pytest.raises(MissingExtraError, match=r"xla_tpu_x needs 'libtpu'.*tpukit\[tpu\]"):
            registry.find("xla_tpu_x")
        with pytest.raises(FlagError, match="No flag 'xla_gpu_x' in jaxlib"):
            registry.find("xla_gpu_x")
