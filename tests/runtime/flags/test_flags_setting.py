"""Flags go to the variable their parser reads, all or none, and the old ones stay."""

import os

import pytest

from tpukit.errors import FlagError, MissingExtraError
from tpukit.runtime.flags import FlagRegistry, as_compiler_options, set_xla_flags
from tpukit.runtime.flags.flag import Flag

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

FROM_THE_DOCUMENTS = {
    "xla_tpu_enable_data_parallelism": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_megacore_fusion": True,
    "xla_gpu_enable_triton_softmax_fusion": True,
    "xla_gpu_triton_gemm_any": True,
    "xla_tpu_megacore_fusion_allow_ags": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
}
GONE = ("xla_tpu_enable_data_parallelism", "xla_gpu_enable_triton_softmax_fusion")


def test_the_documents_example_names_every_bad_flag_and_sets_none(registry):
    environment = {"XLA_FLAGS": "--xla_cpu_ftz=true"}
    with pytest.raises(FlagError) as caught:
        set_xla_flags(FROM_THE_DOCUMENTS, environment=environment, registry=registry)
    message = str(caught.value)
    for name in GONE:
        assert f"No flag '{name}'" in message
    assert "Did you mean 'xla_tpu_enable_data_parallel_all_reduce_opt'" in message
    assert message.count("Did you mean") == 2
    assert environment == {"XLA_FLAGS": "--xla_cpu_ftz=true"}


def test_the_rest_of_the_documents_example_goes_to_two_variables(registry):
    environment = {}
    flags = {name: on for name, on in FROM_THE_DOCUMENTS.items() if name not in GONE}
    record = set_xla_flags(flags, environment=environment, registry=registry)
    assert environment == {
        "LIBTPU_INIT_ARGS": "--xla_tpu_enable_async_collective_fusion=true "
        "--xla_tpu_enable_megacore_fusion=true --xla_tpu_megacore_fusion_allow_ags=true "
        "--xla_tpu_enable_ag_backward_pipelining=true",
        "XLA_FLAGS": "--xla_gpu_triton_gemm_any=true",
    }
    assert record.variables == environment
    assert record.takes_effect
    assert [flag.name for flag in record.applied] == list(flags)
    assert record.to_dict()["applied"][1]["default"] == "false"


def test_what_was_there_stays_and_the_same_flag_is_replaced(registry):
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to='/tmp/a b'",
        "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib 5000 --noxla_tpu_dot_dot_fusion",
        "HOME": "/root",
    }
    set_xla_flags(
        {"--xla_tpu_scoped_vmem_limit_kib": 98304, "xla_cpu_ftz": False},
        environment=environment,
        registry=registry,
    )
    assert environment == {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to='/tmp/a b' "
        "--xla_cpu_ftz=false",
        "LIBTPU_INIT_ARGS": "--noxla_tpu_dot_dot_fusion --xla_tpu_scoped_vmem_limit_kib=98304",
        "HOME": "/root",
    }


def test_a_flag_in_the_wrong_variable_is_moved_when_set_and_reported_when_not(registry):
    environment = {"XLA_FLAGS": "--xla_tpu_rwb_fusion=true --xla_tpu_dot_dot_fusion=true --xla_z"}
    record = set_xla_flags({"xla_tpu_rwb_fusion": 0}, environment=environment, registry=registry)
    assert environment["LIBTPU_INIT_ARGS"] == "--xla_tpu_rwb_fusion=false"
    assert environment["XLA_FLAGS"] == "--xla_tpu_dot_dot_fusion=true --xla_z"
    assert any("xla_tpu_dot_dot_fusion, which belongs in LIBTPU" in note for note in record.notes)
    assert any("already held xla_z" in note for note in record.notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"xla_tpu_rwb_fusion": "maybe", "xla_cpu_ftz": 7}, "rwb_fusion takes.*xla_cpu_ftz takes"),
        ({"xla_tpu_rwb_fusion": True, "--xla_tpu_rwb_fusion": False}, "both true and false"),
        ({"xla_tpu_rwb_fusion": True, "noxla_tpu_rwb_fusion": True}, "both true and false"),
        ({"xla_tpu_bf16_emission_mode": "fast"}, "one of PROMOTE_F32, NATIVE_EMISSION"),
        ({"noxla_tpu_rwb_fusion": "false"}, "No flag 'noxla_tpu_rwb_fusion'"),
        ({"xla_jf_dump_to": "/tmp/a b"}, "knows no quotes"),
        ({"deepsea_host_bounds": "many"}, "libtpu does not take 'many' for deepsea_host_bounds"),
        ({"xla_gpu_enable_command_buffer": "@@"}, "jaxlib does not take --xla_gpu_enable_command"),
        (
            {
                "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
                "xla_tpu_enable_sparse_core_collective_offload_all_gather": "enabled",
            },
            "exclude each other: an all-gather is either fused",
        ),
    ],
)
def test_what_is_wrong_is_refused_whole(registry, flags, message):
    environment = {}
    with pytest.raises(FlagError, match=message):
        set_xla_flags(
            {"xla_tpu_dot_dot_fusion": True, **flags}, environment=environment, registry=registry
        )
    assert environment == {}


def test_a_conflict_with_what_was_set_before(registry):
    environment = {
        "LIBTPU_INIT_ARGS": "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true"
    }
    before = dict(environment)
    with pytest.raises(FlagError, match="exclude each other"):
        set_xla_flags(
            {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True},
            environment=environment,
            registry=registry,
        )
    assert environment == before


def test_after_jax_has_started_the_record_says_so(registry, monkeypatch):
    import jax

    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(FlagRegistry, "installed", lambda: registry)
    record = set_xla_flags({"xla_cpu_ftz": True})
    assert not record.takes_effect
    assert "only in a new one" in record.notes[-1]
    assert os.environ["XLA_FLAGS"].endswith("--xla_cpu_ftz=true")
    elsewhere = set_xla_flags({"xla_cpu_ftz": True}, environment={})
    assert elsewhere.takes_effect


def test_compiler_options_keep_their_type(registry):
    options = as_compiler_options(
        {
            "xla_tpu_scoped_vmem_limit_kib": "98304",
            "xla_dump_latency_hiding_schedule": "true",
            "xla_enable_async_all_gather": True,
            "xla_tpu_licm_size_inflation_ratio": 2,
        },
        registry=registry,
    )
    assert options == {
        "xla_tpu_scoped_vmem_limit_kib": 98304,
        "xla_dump_latency_hiding_schedule": True,
        "xla_enable_async_all_gather": "true",
        "xla_tpu_licm_size_inflation_ratio": 2.0,
    }
    with pytest.raises(FlagError, match="xla_jf_dump_to cannot be set for one compile"):
        as_compiler_options({"xla_jf_dump_to": "/tmp"}, registry=registry)


def test_without_libtpu_the_extra_is_named():
    bare = FlagRegistry(
        [Flag("xla_cpu_ftz", ("xla",), "bool")], jaxlib_version="1", libtpu_version=None
    )
    environment = {}
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[tpu\]'"):
        set_xla_flags(
            {"xla_cpu_ftz": True, "xla_tpu_rwb_fusion": True},
            environment=environment,
            registry=bare,
        )
    assert environment == {}
    set_xla_flags({"xla_cpu_ftz": True}, environment=environment, registry=bare)
    assert environment == {"XLA_FLAGS": "--xla_cpu_ftz=true"}
