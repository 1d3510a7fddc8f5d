"""Levels: the data is sound, the switches work, and the real compiler takes level 3 everywhere."""

import pytest

from tpukit.errors import FlagError, MissingExtraError, SliceError, XLACompilationError
from tpukit.hardware import Accelerators
from tpukit.runtime.flags import (
    FlagRegistry,
    enable_xla_optimizations,
    explain_flag,
    trial_compile,
)
from tpukit.runtime.flags.bundles import select
from tpukit.runtime.flags.flag import GROUPS, load_bundles, published_descriptions

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

GENERATIONS = ["v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_compiler_takes_level_3(registry, generation):
    chosen, _ = select(3, generation)
    assert len(chosen) >= 9
    target = trial_compile(
        {name: flag.value for name, flag in chosen.items()}, generation, registry=registry
    )
    assert target.chip.name == generation
    assert target.devices >= 4


def test_a_refused_flag_is_an_error_with_the_compilers_words(registry):
    with pytest.raises(XLACompilationError, match="v6e-4: UNIMPLEMENTED: BRKGA"):
        trial_compile({"xla_memory_scheduler": "brkga"}, "v6e", registry=registry)


def test_every_flag_of_the_data_is_known_and_right(registry):
    for flag in load_bundles().flags:
        assert registry.find(flag.name).render(flag.value)
        assert flag.level in (1, 2, 3)
        assert flag.group in GROUPS
        assert flag.generations is None or flag.generations <= set(GENERATIONS)
        assert flag.reason.endswith(".")
        assert flag.source
    for pair in load_bundles().exclusive:
        assert all(name in registry for name in pair.flags)
    assert set(published_descriptions()) <= set(registry)


def test_what_is_excluded_is_never_chosen():
    for generation in GENERATIONS:
        chosen, skipped = select(3, generation)
        for out in load_bundles().excluded:
            if out.generations is None or generation in out.generations:
                assert out.name not in chosen
                assert out.reason in [one.reason for one in skipped if one.name == out.name]


@pytest.mark.parametrize("generation", [None, *GENERATIONS])
def test_levels_build_on_each_other(generation):
    sets = [set(select(level, generation)[0]) for level in range(4)]
    assert sets[0] == set()
    assert sets[0] < sets[1] < sets[2] <= sets[3]
    if generation in ("v5e", "v5p", "v6e", "7x"):  # nobody published more for older ones
        assert sets[2] < sets[3]


def test_the_documents_call(registry, monkeypatch):
    monkeypatch.setattr(
        "tpukit.runtime.flags.bundles.detect_accelerators",
        lambda: Accelerators(kind="tpu", count=4, generation="v4"),
    )
    environment = {}
    record = enable_xla_optimizations(
        level=3,
        enable_fusion=True,
        enable_async_collective=True,
        enable_megacore=True,
        enable_latency_hiding=True,
        environment=environment,
        registry=registry,
    )
    assert set(environment) == {"LIBTPU_INIT_ARGS"}
    assert "--xla_tpu_enable_megacore_fusion=true" in environment["LIBTPU_INIT_ARGS"]
    assert all(flag.reason and flag.source for flag in record.applied)


def test_megacore_only_where_there_is_megacore(registry):
    for generation in GENERATIONS:
        record = enable_xla_optimizations(
            1, generation=generation, environment={}, registry=registry
        )
        megacore = any("megacore" in flag.name for flag in record.applied)
        assert megacore == (generation in ("v4", "v5p"))


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_can_be_left_alone(registry, group):
    record = enable_xla_optimizations(
        3, generation="v5p", environment={}, registry=registry, **{f"enable_{group}": False}
    )
    groups = {flag.name: flag.group for flag in load_bundles().flags}
    assert group not in {groups[flag.name] for flag in record.applied}
    assert f"{group} is switched off" in {flag.reason for flag in record.skipped}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_without_a_tpu_the_flags_are_those_of_v6e_and_the_record_says_so(
    registry, monkeypatch, level
):
    monkeypatch.setattr(
        "tpukit.runtime.flags.bundles.detect_accelerators",
        lambda: Accelerators(kind="cpu", count=2),
    )
    environment = {}
    record = enable_xla_optimizations(
        level, enable_async_collective=True, environment=environment, registry=registry
    )
    assert {flag.name for flag in record.applied} == set(select(level, "v6e")[0])
    assert "--xla_tpu_enable_async_collective_fusion=true" in environment["LIBTPU_INIT_ARGS"]
    assert "those of v6e" in record.notes[-1]


def test_a_tpu_of_unknown_generation_gets_only_flags_of_every_generation(registry, monkeypatch):
    monkeypatch.setattr(
        "tpukit.runtime.flags.bundles.detect_accelerators",
        lambda: Accelerators(kind="tpu", count=4),
    )
    record = enable_xla_optimizations(3, environment={}, registry=registry)
    everywhere = {flag.name for flag in load_bundles().flags if flag.generations is None}
    assert {flag.name for flag in record.applied} == everywhere
    assert "generation='v6e'" in record.notes[-1]


def test_level_0_sets_nothing(registry):
    environment = {}
    record = enable_xla_optimizations(
        0, generation="v6e", environment=environment, registry=registry
    )
    assert (record.applied, record.skipped, environment) == ((), (), {})


def test_a_flag_this_libtpu_lacks_is_skipped_with_the_reason(registry):
    gone = "xla_tpu_dot_dot_fusion"
    older = FlagRegistry(
        [flag for name, flag in registry.items() if name != gone],
        jaxlib_version="1",
        libtpu_version="2",
    )
    record = enable_xla_optimizations(1, generation="v6e", environment={}, registry=older)
    reasons = {flag.name: flag.reason for flag in record.skipped}
    assert reasons[gone] == "no such flag in libtpu 2 and jaxlib 1"


def test_what_cannot_be_asked_for(registry):
    with pytest.raises(FlagError, match="level 4 is not an optimization level; use 0, 1, 2 or 3"):
        enable_xla_optimizations(4, environment={}, registry=registry)
    with pytest.raises(SliceError):
        enable_xla_optimizations(1, generation="v99", environment={}, registry=registry)
    without = FlagRegistry([], jaxlib_version="1", libtpu_version=None)
    with pytest.raises(MissingExtraError, match="tpu"):
        enable_xla_optimizations(1, generation="v6e", environment={}, registry=without)


def test_explaining(registry):
    explained = explain_flag("--xla_tpu_scoped_vmem_limit_kib", registry=registry)
    assert explained.description.startswith("How much VMEM")
    assert {used.value for used in explained.used_by} == {98304, 65536}
    assert explained.to_dict()["variable"] == "LIBTPU_INIT_ARGS"
    silent = explain_flag("xla_tpu_autotune_fusions", registry=registry)
    assert silent.description == "no description published"
    left_out = explain_flag("xla_memory_scheduler", registry=registry)
    assert "UNIMPLEMENTED" in left_out.excluded[0].reason
    with pytest.raises(FlagError, match="Did you mean"):
        explain_flag("xla_tpu_scoped_vmem", registry=registry)
