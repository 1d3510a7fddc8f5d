"""What the compiler refuses, and what it says then."""

import pytest
import torch
from child_processes import children_running
from torch import nn

from tpukit.errors import (
    ConfigError,
    TPUModelError,
    TPUValidationError,
    XLACompilationError,
)
from tpukit.torch import KernelPyTorchConfig, XLACompiler


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Odd:
    """Neither a tensor nor plain."""


class GivesAnObject(nn.Module):
    def forward(self, x):
        return Odd()


def strict(**changes):
    return XLACompiler(KernelPyTorchConfig("development", **changes))


class TestCompilerErrorPaths:
    def test_a_configuration_that_is_none(self):
        with pytest.raises(ConfigError, match="got dict"):
            XLACompiler({"cache_max_size": 3})

    @pytest.mark.parametrize("model", [nn.Linear, torch.ones(2), lambda x: x, None])
    def test_what_is_no_module(self, model):
        with pytest.raises(TPUValidationError, match=r"compile_model (expects|got)"):
            XLACompiler().compile_model(model, torch.ones(2))

    def test_inputs_that_the_forward_does_not_take(self):
        with pytest.raises(TPUValidationError, match="missing a required argument: 'input'"):
            XLACompiler().compile_model(nn.Linear(2, 2), {"imput": torch.ones(2)})

    def test_too_many_inputs(self):
        with pytest.raises(TPUValidationError, match="too many positional arguments"):
            XLACompiler().compile_model(nn.Linear(2, 2), (torch.ones(2), torch.ones(2)))

    def test_an_input_that_is_no_plain_value(self):
        class Unhashable(Odd):
            __hash__ = None

        with pytest.raises(TPUValidationError, match="neither a tensor nor a plain value"):
            XLACompiler().compile_model(nn.Identity(), Unhashable())

    def test_an_input_without_values(self):
        compiled = XLACompiler().compile_model(nn.Linear(2, 2))
        with pytest.raises(TPUValidationError, match=r"meta device.*compile_for"):
            compiled(torch.empty(2, device="meta"))

    def test_a_module_without_values(self):
        model = nn.Linear(2, 2, device="meta")
        with pytest.raises(TPUModelError, match=r"Linear is on torch's meta device.*compile_for"):
            XLACompiler().compile_model(model, torch.ones(2))

    def test_a_branch_on_values_is_refused_with_its_line(self):
        with pytest.raises(TPUModelError, match=r"branches on the value.*refusals\.py:\d+"):
            XLACompiler().compile_model(Branching(), torch.ones(2))

    def test_nothing_is_kept_of_a_failed_compile(self):
        compiler = XLACompiler()
        for _ in range(2):
            with pytest.raises(TPUModelError):
                compiler.compile_model(Branching(), torch.ones(2))
        stats = compiler.get_compilation_stats()
        assert stats["compilation_cache"]["size"] == 0
        assert stats["compilations"] == 0
        assert stats["traces"] == 2

    def test_an_output_that_cannot_leave_a_program(self):
        with pytest.raises(TPUModelError, match="returns a Odd, whose tensors cannot leave"):
            XLACompiler().compile_model(GivesAnObject(), torch.ones(2))

    def test_shapes_that_do_not_go_together(self):
        with pytest.raises(
            TPUModelError,
            match=r"Linear cannot be traced: .*It was called with input float32\[3,5\]",
        ):
            XLACompiler().compile_model(nn.Linear(2, 2), torch.ones(3, 5))

    def test_a_compile_past_its_time_is_stopped_and_says_what_to_raise(self):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(15)]
        compiler = XLACompiler(KernelPyTorchConfig(compilation_timeout_seconds=0.01))
        with pytest.raises(
            XLACompilationError,
            match=r"Sequential took longer than 0.01 s and was stopped; raise .*timeout_seconds",
        ):
            compiler.compile_model(nn.Sequential(*layers), torch.ones(3, 8))
        assert not children_running("tpukit.torch.compiling.building")
        assert compiler.get_compilation_stats()["compilation_cache"]["size"] == 0

    def test_strict_validation_makes_an_error_of_another_shape(self):
        compiled = strict().compile_model(nn.Linear(2, 2), torch.ones(3, 2))
        with pytest.raises(
            TPUValidationError, match=r"input changed from float32\[3,2\] to float32\[4,2\]"
        ):
            compiled(torch.ones(4, 2))
        assert compiled(torch.ones(3, 2)).shape == (3, 2)

    def test_strict_validation_makes_an_error_of_narrowing(self):
        with pytest.raises(TPUValidationError, match=r"in 32 bits, but torch\.float64 has 64"):
            strict().compile_model(nn.Identity(), torch.ones(2, dtype=torch.float64))
        with pytest.raises(TPUValidationError, match=r"in 32 bits, but weight, bias has 64"):
            strict().compile_model(nn.Linear(2, 2).double(), torch.ones(2))

    def test_without_it_narrowing_is_a_warning(self, caplog):
        compiled = XLACompiler().compile_model(nn.Identity())
        assert compiled(torch.ones(2, dtype=torch.float64)).dtype == torch.float32
        assert "computes in 32 bits, but torch.float64 has 64" in caplog.text

    @pytest.mark.parametrize(
        ("sample", "message"),
        [
            ((), "the sample has none"),
            ({"input": [torch.ones(2)]}, "the sample has input, a container of several"),
            ((torch.ones(2), torch.ones(2)), "does not accept these inputs"),
        ],
    )
    def test_a_sample_that_is_no_batch(self, sample, message):
        with pytest.raises(TPUValidationError, match=message):
            XLACompiler().compile_for("v6e-4", nn.Linear(2, 2), sample)

    def test_a_loss_that_nobody_named(self):
        class Pair(nn.Module):
            def forward(self, x):
                return x, x

        with pytest.raises(TPUModelError, match=r"neither a loss nor logits.*loss=lambda"):
            XLACompiler().compile_for("v6e-4", Pair(), torch.ones(4, 2))

    def test_a_slice_that_does_not_exist(self):
        with pytest.raises(TPUValidationError, match="No v6e slice has 7 chips"):
            XLACompiler().compile_for("v6e-7", nn.Linear(2, 2), torch.ones(4, 2))

    def test_where_no_child_can_compile_the_waiting_ends_and_the_error_says_so(self, monkeypatch):
        """As on a TPU or GPU, which belongs to this process; here the CPU plays one."""
        from tpukit.torch.compiling import building

        monkeypatch.setattr(building, "_choose", lambda operations, timeout_s: "thread")
        compiler = XLACompiler(KernelPyTorchConfig(compilation_timeout_seconds=1e-4))
        with pytest.raises(XLACompilationError, match=r"0\.0001 s and is still running .* cannot"):
            compiler.compile_model(nn.Sequential(nn.Linear(9, 9), nn.Dropout()), torch.ones(5, 9))
