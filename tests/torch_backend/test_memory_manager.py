"""Tensors within limits: what is counted, what comes back, what is refused."""

import gc
import logging

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from tpukit.errors import (
    TPUMemoryError,
    TPUMemoryPoolError,
    TPUOutOfMemoryError,
    TPUValidationError,
)
from tpukit.hardware import get_chip
from tpukit.torch import KernelPyTorchConfig, TPUMemoryManager

KIB = 1024


def manager_of(limit_bytes, **more):
    config = KernelPyTorchConfig(memory_per_chip=limit_bytes, **more)
    return TPUMemoryManager(config.hardware.tpu)


class TestLimits:
    def test_of_the_configured_chip_times_the_fraction(self):
        limit = TPUMemoryManager(KernelPyTorchConfig(version="v5p", memory_fraction=0.5)).limit
        assert limit.value == get_chip("v5p").hbm_usable_bytes.value // 2
        assert limit.origin == "compiler"

    @pytest.mark.parametrize(
        ("version", "field"), [("v6e", "v6e_memory_gb"), ("v7", "v7_memory_gb")]
    )
    def test_of_the_documents_own_settings(self, version, field):
        config = KernelPyTorchConfig(version=version, **{field: 4.0})
        limit = TPUMemoryManager(config).limit
        assert (limit.value, limit.origin) == (4 * 2**30, "user")

    def test_more_than_the_compiler_may_use_is_not_had(self):
        limit = TPUMemoryManager(KernelPyTorchConfig(version="v6e", v6e_memory_gb=32.0)).limit
        assert limit.value == get_chip("v6e").hbm_usable_bytes.value

    def test_of_the_host_where_nothing_else_is(self):
        limit = TPUMemoryManager(KernelPyTorchConfig(memory_fraction=0.25)).limit
        assert limit.value == pytest.approx(psutil.virtual_memory().total / 4, abs=1)
        assert "this host" in limit.source


class TestAllocation:
    def test_bytes_are_counted_until_torch_frees_them(self):
        manager = manager_of(64 * KIB)
        first = manager.allocate_tensor((16, 16))
        second = manager.allocate_tensor(8, dtype=torch.bfloat16)
        assert (first.shape, first.dtype) == ((16, 16), torch.float32)
        assert (second.shape, second.dtype) == ((8,), torch.bfloat16)
        stats = manager.get_memory_stats()
        assert (stats.allocated_memory, stats.tensors) == (1024 + 16, 2)
        assert stats.available_memory == 64 * KIB - 1040
        view = first[3:].numpy()
        del first
        assert manager.get_memory_stats().allocated_memory == 1040  # the view uses it
        del view, second
        gc.collect()
        after = manager.get_memory_stats()
        assert (after.allocated_memory, after.peak_memory, after.allocations) == (0, 1040, 2)

    def test_what_does_not_fit_says_what_was_asked_and_left(self):
        manager = manager_of(10 * KIB)
        held = manager.allocate_tensor((1024,))
        with pytest.raises(
            TPUOutOfMemoryError,
            match=r"float32\[64, 32\] needs 8 KiB, but 6 KiB of 10 KiB are left .*drop tensors",
        ):
            manager.allocate_tensor((64, 32))
        del held
        assert manager.allocate_tensor((64, 32)).numel() == 2048

    def test_what_the_machine_does_not_have(self):
        manager = manager_of(None, version="v6e")
        manager._limit_bytes = 2**62
        with pytest.raises(TPUOutOfMemoryError, match="cannot be allocated on this machine's cpu"):
            manager.allocate_tensor((2**50,))
        assert manager.get_memory_stats().allocated_memory == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (((-1, 2),), "a negative size"),
            (((2,), "float32"), "is not a torch.dtype; give e.g. torch.bfloat16"),
        ],
    )
    def test_what_describes_no_tensor(self, arguments, message):
        with pytest.raises(TPUValidationError, match=message):
            manager_of(KIB).allocate_tensor(*arguments)

    def test_history_is_kept_as_long_as_configured(self):
        now = [0.0]
        config = KernelPyTorchConfig(memory_per_chip=KIB, allocation_history_retention_seconds=10.0)
        manager = TPUMemoryManager(config, clock=lambda: now[0])
        tensor = manager.allocate_tensor(4)
        now[0] = 4.0
        del tensor
        kept = manager.allocate_tensor(2)
        events = [(one.at_s, one.event, one.size_bytes) for one in manager.allocation_history()]
        assert events == [(0.0, "allocate", 16), (4.0, "free", 16), (4.0, "allocate", 8)]
        assert [one.allocated_bytes for one in manager.allocation_history()] == [16, 0, 8]
        now[0] = 12.0
        assert [one.at_s for one in manager.allocation_history()] == [4.0, 4.0]
        now[0] = 99.0
        assert manager.allocation_history() == []
        assert manager.get_memory_stats().allocated_memory == kept.nbytes

    @settings(max_examples=40, deadline=None)
    @given(some.lists(some.integers(0, 40) | some.none(), max_size=30))
    def test_the_count_is_that_of_a_list_of_live_tensors(self, actions):
        manager, live, peak = manager_of(512), [], 0
        for rows in actions:
            if rows is None:
                del live[: len(live) // 2]
                continue
            fits = sum(one.nbytes for one in live) + 4 * rows <= 512
            try:
                live.append(manager.allocate_tensor(rows))
                assert fits
            except TPUOutOfMemoryError:
                assert not fits
            peak = max(peak, sum(one.nbytes for one in live))
            assert manager.get_memory_stats().allocated_memory == sum(one.nbytes for one in live)
        assert manager.get_memory_stats().peak_memory == peak


class TestPools:
    def test_buffers_are_made_once_and_used_again(self):
        manager = manager_of(64 * KIB)
        pool = manager.create_memory_pool(pool_size=3, tensor_size=(4, 8))
        made = manager.get_memory_stats().allocations
        seen = set()
        for _ in range(50):
            lent = [manager.get_tensor_from_pool(pool) for _ in range(3)]
            seen |= {one.data_ptr() for one in lent}
            for one in lent:
                manager.return_tensor_to_pool(pool, one)
        assert len(seen) == 3
        assert manager.get_memory_stats().allocations == made == 3
        assert manager.get_memory_stats().pooled_memory == 3 * 4 * 8 * 4

    def test_counts(self):
        manager = manager_of(64 * KIB)
        pool = manager.create_memory_pool(4, 16, dtype=torch.bfloat16)
        first = manager.get_tensor_from_pool(pool)
        details = manager.get_pool_stats()["pool_details"][pool]
        assert details == {
            "pool_size": 4,
            "tensor_size": (16,),
            "dtype": "bfloat16",
            "in_use": 1,
            "available": 3,
            "utilization": 0.25,
            "most_in_use": 1,
            "gets": 1,
            "refusals": 0,
            "size_bytes": 4 * 32,
        }
        manager.return_tensor_to_pool(pool, first)
        whole = manager.get_pool_stats()
        assert (whole["total_pools"], whole["total_bytes"], whole["tensors_in_use"]) == (1, 128, 0)

    def test_a_deleted_pool_gives_its_memory_back(self):
        manager = manager_of(KIB)
        pool = manager.create_memory_pool(4, 64)
        with pytest.raises(TPUOutOfMemoryError, match="0 B of 1 KiB are left"):
            manager.allocate_tensor(1)
        manager.delete_memory_pool(pool)
        assert manager.get_memory_stats().allocated_memory == 0
        with pytest.raises(TPUMemoryPoolError, match=r"pools: none.*create_memory_pool"):
            manager.get_tensor_from_pool(pool)


class TestPoolErrorPaths:
    @pytest.fixture
    def manager(self):
        return manager_of(64 * KIB)

    @pytest.fixture
    def pool(self, manager):
        return manager.create_memory_pool(2, (4,))

    def test_all_are_lent(self, manager, pool):
        lent = [manager.get_tensor_from_pool(pool) for _ in range(2)]
        with pytest.raises(TPUMemoryPoolError, match="all 2 tensors of pool_1 are in use; return"):
            manager.get_tensor_from_pool(pool)
        assert manager.get_pool_stats()["pool_details"][pool]["refusals"] == 1
        manager.return_tensor_to_pool(pool, lent[0])
        assert manager.get_tensor_from_pool(pool) is lent[0]

    def test_returned_twice(self, manager, pool):
        tensor = manager.get_tensor_from_pool(pool)
        manager.return_tensor_to_pool(pool, tensor)
        with pytest.raises(TPUMemoryPoolError, match="returned to pool_1 already; return each"):
            manager.return_tensor_to_pool(pool, tensor)
        assert manager.get_pool_stats()["pool_details"][pool]["available"] == 2

    @pytest.mark.parametrize("make", [lambda one: torch.empty(4), lambda one: one[:], list])
    def test_never_lent(self, manager, pool, make):
        tensor = manager.get_tensor_from_pool(pool)
        with pytest.raises(TPUMemoryPoolError, match=r"that is not of pool_1 .* not a copy"):
            manager.return_tensor_to_pool(pool, make(tensor))

    def test_of_another_pool(self, manager, pool):
        other = manager.create_memory_pool(1, (4,))
        with pytest.raises(TPUMemoryPoolError, match="is not of pool_2"):
            manager.return_tensor_to_pool(other, manager.get_tensor_from_pool(pool))

    def test_with_other_memory(self, manager, pool):
        tensor = manager.get_tensor_from_pool(pool)
        tensor.data = torch.empty(4)
        with pytest.raises(TPUMemoryPoolError, match="has other memory now"):
            manager.return_tensor_to_pool(pool, tensor)

    def test_no_such_pool(self, manager, pool):
        for call in (
            lambda: manager.get_tensor_from_pool("pool_7"),
            lambda: manager.return_tensor_to_pool("pool_7", torch.empty(1)),
            lambda: manager.delete_memory_pool("pool_7"),
        ):
            with pytest.raises(TPUMemoryPoolError, match=r"no pool 'pool_7'.*mean 'pool_1'"):
                call()

    def test_a_pool_that_does_not_fit_leaves_nothing_behind(self, manager):
        with pytest.raises(TPUOutOfMemoryError, match=r"100 tensors float32\[256\] needs 100 KiB"):
            manager.create_memory_pool(100, 256)
        assert manager.get_memory_stats().allocated_memory == 0
        assert manager.get_pool_stats()["total_pools"] == 0

    def test_a_pool_of_nothing(self, manager):
        with pytest.raises(TPUValidationError, match="pool_size=0; give"):
            manager.create_memory_pool(0, 4)

    def test_all_of_them_are_memory_errors(self, manager):
        with pytest.raises(TPUMemoryError):
            manager.get_tensor_from_pool("x")


class TestStats:
    def test_every_figure_says_where_it_came_from(self):
        manager = manager_of(KIB)
        manager.allocate_tensor(4)
        stats = manager.get_memory_stats()
        origins = {name: one.origin for name, one in stats.figures().items()}
        assert origins["allocated_memory"] == origins["peak_memory"] == "measured"
        assert origins["limit"] == "user"
        assert origins["available_memory"] == "user"  # as sure as the least sure of its inputs
        assert stats.device_memory.value is None
        assert stats.device_memory.reason
        assert stats.to_dict()["limit"]["value"] == KIB

    def test_a_watch_is_a_list_of_stats(self):
        manager = manager_of(
            KIB, monitoring_interval_seconds=0.01, monitoring_duration_seconds=0.03
        )
        kept = manager.allocate_tensor(4)
        readings = manager.monitor_memory()
        assert 2 <= len(readings) <= 4
        assert max(one.allocated_memory for one in readings) == kept.nbytes
        assert len(manager.monitor_memory(interval=1.0, duration=0.0)) == 1

    def test_memory_is_logged_with_its_facts(self, caplog):
        manager = manager_of(KIB)
        with caplog.at_level(logging.DEBUG, "tpukit.torch"):
            manager.create_memory_pool(2, 4)
            with pytest.raises(TPUOutOfMemoryError):
                manager.allocate_tensor(1000)
        facts = {one.getMessage(): vars(one) for one in caplog.records}
        assert facts["pool created"]["bytes"] == 32
        assert facts["allocated"]["bytes"] == 16
        assert facts["out of memory"]["asked_bytes"] == 4000
        assert {one.name for one in caplog.records} == {"tpukit.torch.memory_manager"}
