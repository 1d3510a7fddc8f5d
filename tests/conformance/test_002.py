"""Document 002, block by block, with only its import lines changed.

`kernel_pytorch.backends.tpu` is `tpukit.torch`, `kernel_pytorch.core.config` its `config`. Where a
block leaves a name open (`model`, `dataloader`), it is filled in above it; asserts below say what
must have come of it.
"""
# ruff: noqa: T201  the document prints

import ast
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from document_blocks import conforms

from tpukit.torch import KernelPyTorchConfig, TPUBackend, TPUOptimizer


@pytest.fixture
def config():
    return KernelPyTorchConfig()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.fixture
def dataloader():
    torch.manual_seed(0)
    pairs = torch.utils.data.TensorDataset(torch.randn(64, 784), torch.randint(0, 10, (64,)))
    return torch.utils.data.DataLoader(pairs, batch_size=32)


@conforms("002", 1, "TPUBackend and TPUOptimizer on a Sequential")
def test_quick_start(capsys):
    # The document forgets to import torch itself.
    from tpukit.torch import KernelPyTorchConfig, TPUBackend, TPUOptimizer

    # Initialize TPU backend
    config = KernelPyTorchConfig()
    backend = TPUBackend(config)

    # Prepare model for TPU
    model = nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 10))
    prepared_model = backend.prepare_model(model)

    # Optimize for TPU
    optimizer = TPUOptimizer(config)
    result = optimizer.optimize(
        model, sample_inputs=torch.randn(32, 512), optimization_level="balanced"
    )

    print("Optimized model ready for TPU execution")

    assert prepared_model is model
    assert result.level == "balanced"
    assert result.optimized_model(torch.randn(32, 512)).shape == (32, 10)
    assert "ready" in capsys.readouterr().out


@conforms("002", 3, "device and world size")
def test_verify_installation(capsys):
    config = KernelPyTorchConfig()
    backend = TPUBackend(config)

    print(f"TPU Device: {backend.device}")
    print(f"World Size: {backend.world_size}")

    assert capsys.readouterr().out == "TPU Device: cpu\nWorld Size: 1\n"


@conforms("002", 2, "what to install: extras of tpukit instead of torch_xla")
@conforms("002", 24, "PyTorch/XLA is not needed: torchax stands in, torch_tpu is found on TPU VMs")
def test_installation():
    from importlib.metadata import metadata

    from tpukit.torch import detect_torch_tpu

    needs = metadata("tpukit").get_all("Requires-Dist")
    assert any(line.startswith("torchax") and "torch" in line.split(";")[1] for line in needs)
    assert not any(line.startswith(("torch_xla", "torch-xla")) for line in needs)
    assert detect_torch_tpu().runs_on == "torchax"


@conforms("002", 32, "its own tests, those of error paths among them")
def test_testing():
    written = (Path(__file__).parents[1] / "torch_backend" / "test_backend.py").read_text()
    tests = [node for node in ast.walk(ast.parse(written)) if isinstance(node, ast.FunctionDef)]
    refused = [one for one in tests if "pytest.raises" in (ast.get_source_segment(written, one))]
    assert len(refused) > 5


class TestConfiguration:
    @conforms("002", 4, "KernelPyTorchConfig and TPUVersion")
    def test_basic(self):
        from tpukit.torch.config import KernelPyTorchConfig, TPUConfig, TPUVersion

        config = KernelPyTorchConfig()

        # TPU-specific configuration
        config.hardware.tpu.version = TPUVersion.V5P
        config.hardware.tpu.memory_fraction = 0.90
        config.hardware.tpu.mixed_precision = True
        config.hardware.tpu.precision = "bfloat16"

        assert isinstance(config.hardware.tpu, TPUConfig)
        assert config.hardware.tpu.version == "v5p"
        assert config.hardware.tpu.memory_fraction == 0.9

    @conforms("002", 5, "cache, memory, validation and monitoring settings")
    def test_new_options(self, config):
        # Cache management
        config.hardware.tpu.cache_max_size = 100  # Max cached models/compilations
        config.hardware.tpu.compilation_timeout_seconds = 300  # XLA timeout

        # Memory management
        config.hardware.tpu.allocation_history_retention_seconds = 3600  # 1 hour
        config.hardware.tpu.v6e_memory_gb = 32.0  # Override v6e capacity
        config.hardware.tpu.v7_memory_gb = 128.0  # Override v7 capacity

        # Validation
        config.hardware.tpu.enable_strict_validation = False  # Strict error mode

        # Monitoring
        config.hardware.tpu.monitoring_interval_seconds = 1.0
        config.hardware.tpu.monitoring_duration_seconds = 60.0

        assert config.hardware.tpu.cache_max_size == 100
        assert config.hardware.tpu.v7_memory_gb == 128.0

    @conforms("002", 6, "mode=inference")
    def test_inference_mode(self):
        config = KernelPyTorchConfig(mode="inference")
        config.hardware.tpu.gradient_checkpointing = False
        config.hardware.tpu.mixed_precision = True
        assert not config.hardware.tpu.gradient_checkpointing

    @conforms("002", 7, "mode=training")
    def test_training_mode(self):
        config = KernelPyTorchConfig(mode="training")
        config.hardware.tpu.gradient_checkpointing = True
        config.hardware.tpu.mixed_precision = True
        config.hardware.tpu.xla_optimization_level = 2
        assert config.hardware.tpu.xla_optimization_level == 2

    @conforms("002", 8, "mode=development")
    def test_development_mode(self):
        config = KernelPyTorchConfig(mode="development")
        config.hardware.tpu.enable_strict_validation = True
        config.hardware.tpu.xla_optimization_level = 0  # Debug mode
        assert config.hardware.tpu.enable_strict_validation


class TestCoreComponents:
    @conforms("002", 9, "TPUBackend: device, model, data, synchronize, memory stats")
    @conforms("002", 20, "synchronize after a step")
    def test_1_backend(self, config, model, capsys):
        data = (torch.randn(2, 784), torch.tensor([1, 2]))

        backend = TPUBackend(config)

        # Device information
        print(f"Device: {backend.device}")
        print(f"World Size: {backend.world_size}")
        print(f"Rank: {backend.rank}")
        print(f"Is Distributed: {backend.is_distributed}")

        # Model preparation
        prepared_model = backend.prepare_model(model)

        # Data preparation
        prepared_data = backend.prepare_data(data)

        # Synchronization
        backend.synchronize()

        # Memory stats
        stats = backend.get_memory_stats()
        print(f"Cache Stats: {stats['model_cache_stats']}")

        assert "'size': 1" in capsys.readouterr().out
        assert prepared_model(prepared_data[0]).shape == (2, 10)

    @conforms("002", 10, "TPUOptimizer.optimize and its result")
    def test_2_optimizer(self, config, model, capsys):
        sample_input = torch.randn(8, 784)

        optimizer = TPUOptimizer(config)

        # Optimize model
        result = optimizer.optimize(
            model,
            sample_inputs=sample_input,
            optimization_level="balanced",  # "conservative", "balanced", "aggressive"
        )

        # Access optimized model
        optimized_model = result.optimized_model

        # View metrics
        print(f"Optimization Time: {result.optimization_time:.2f}s")
        print(f"Performance Metrics: {result.performance_metrics}")

        assert optimized_model(sample_input).shape == (8, 10)
        assert "forward_time_after" in capsys.readouterr().out

    @conforms("002", 11, "XLACompiler: compile, cache statistics")
    def test_3_compiler(self, config, model, capsys):
        sample_input = torch.randn(8, 784)
        from tpukit.torch import XLACompiler

        compiler = XLACompiler(config.hardware.tpu)

        # Compile model
        compiled_model = compiler.compile_model(model, sample_inputs=sample_input, use_cache=True)

        # Get compilation stats
        stats = compiler.get_compilation_stats()
        print(f"Cache Hit Rate: {stats['compilation_cache']['hit_rate']:.2%}")
        print(f"Evictions: {stats['compilation_cache']['evictions']}")

        assert "Evictions: 0" in capsys.readouterr().out
        torch.testing.assert_close(compiled_model(sample_input), model(sample_input))

    @conforms("002", 12, "TPUMemoryManager: allocate, pools, stats")
    def test_4_memory_manager(self, config, capsys):
        from tpukit.torch import TPUMemoryManager

        manager = TPUMemoryManager(config.hardware.tpu)

        # Allocate tensor
        tensor = manager.allocate_tensor((1000, 1000), dtype=torch.float32)

        # Create memory pool
        pool_id = manager.create_memory_pool(pool_size=10, tensor_size=(512, 512))

        # Get tensor from pool
        tensor = manager.get_tensor_from_pool(pool_id)

        # Return to pool
        manager.return_tensor_to_pool(pool_id, tensor)

        # Memory stats
        stats = manager.get_memory_stats()
        print(f"Allocated: {stats.allocated_memory / 1e9:.2f} GB")

        assert "Allocated: 0.0" in capsys.readouterr().out
        assert tensor.shape == (512, 512)

    @conforms("002", 13, "create_xla_integration")
    def test_5_integration(self, config, model, capsys):
        tensor = torch.ones(3)
        from tpukit.torch import create_xla_integration

        device_manager, distributed, optimizations = create_xla_integration(config.hardware.tpu)

        # Device management
        print(f"Devices: {device_manager.devices}")
        print(f"Current Device: {device_manager.device}")

        # Distributed training
        if distributed.is_distributed:
            wrapped_model = distributed.wrap_model(model)

            # All-reduce operation
            reduced_tensor = distributed.all_reduce(tensor, op="sum")
            assert wrapped_model is not None
            assert reduced_tensor is not None

        assert "Current Device: " in capsys.readouterr().out
        assert optimizations.level == config.hardware.tpu.xla_optimization_level


class TestExamples:
    """Example 3 in two processes: `test_torch_distributed`."""

    @conforms("002", 14, "a training loop whose loss falls")
    def test_1_basic_training(self, dataloader):
        # Setup
        config = KernelPyTorchConfig(mode="training")
        backend = TPUBackend(config)

        # Model
        model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
        model = backend.prepare_model(model)
        losses = []

        # Training loop
        optimizer = torch.optim.Adam(model.parameters())
        for _epoch in range(10):
            for batch in dataloader:
                data, target = backend.prepare_data(batch)

                optimizer.zero_grad()
                output = model(data)
                loss = nn.functional.cross_entropy(output, target)
                loss.backward()
                optimizer.step()

                backend.synchronize()  # Important for TPU
                losses.append(loss.item())

        assert losses[-1] < 0.1 * losses[0]

    @conforms("002", 15, "optimize_for_inference, optimize, optimize_for_training")
    def test_2_optimization(self, config, model):
        sample_inputs = torch.randn(8, 784)
        levels = []

        optimizer = TPUOptimizer(config)

        # Conservative (safest, good for debugging)
        result = optimizer.optimize_for_inference(model, sample_inputs)
        levels.append(result.level)

        # Balanced (recommended for most use cases)
        result = optimizer.optimize(model, sample_inputs, optimization_level="balanced")
        levels.append(result.level)

        # Aggressive (maximum performance)
        result = optimizer.optimize_for_training(model, sample_inputs)
        levels.append(result.level)

        assert levels == ["conservative", "balanced", "aggressive"]

    @conforms("002", 16, "XLADistributedTraining: wrap_model, all_reduce")
    def test_3_distributed_training(self, config, model, dataloader):
        from tpukit.torch import TPUBackend, XLADistributedTraining

        backend = TPUBackend(config)

        if backend.is_distributed:
            # Initialize distributed training
            from tpukit.torch import XLADeviceManager

            device_manager = XLADeviceManager(config.hardware.tpu)
            distributed = XLADistributedTraining(device_manager)

            # Wrap model
            model = distributed.wrap_model(model)

            # Training with gradient synchronization
            for _batch in dataloader:
                # ... forward/backward ...

                # Synchronize gradients across TPUs
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad = distributed.all_reduce(param.grad, op="mean")

        assert not backend.is_distributed

    @conforms("002", 17, "memory pools and their utilization")
    def test_4_memory_pool(self, config, dataloader, capsys):
        from tpukit.torch import TPUMemoryManager

        manager = TPUMemoryManager(config.hardware.tpu)

        # Create pools for different tensor sizes
        activation_pool = manager.create_memory_pool(
            pool_size=50,
            tensor_size=(32, 512, 512),  # batch_size, seq_len, hidden_dim
        )

        # Use pooled tensors
        for _batch in dataloader:
            tensor = manager.get_tensor_from_pool(activation_pool)

            # Use tensor...

            # Return to pool
            manager.return_tensor_to_pool(activation_pool, tensor)

        # Check pool utilization
        pool_stats = manager.get_pool_stats()
        print(f"Pool Utilization: {pool_stats['pool_details'][activation_pool]['utilization']:.2%}")

        assert capsys.readouterr().out == "Pool Utilization: 0.00%\n"


class TestPerformanceAndTroubleshooting:
    @conforms("002", 18, "mixed precision")
    @conforms("002", 19, "gradient checkpointing")
    @conforms("002", 21, "cache size")
    @conforms("002", 25, "out of memory: settings")
    def test_settings(self, config):
        config.hardware.tpu.mixed_precision = True
        config.hardware.tpu.precision = "bfloat16"  # TPU native precision
        config.hardware.tpu.gradient_checkpointing = True  # Saves memory
        # Reduce memory fraction
        config.hardware.tpu.memory_fraction = 0.80
        # Use smaller cache
        config.hardware.tpu.cache_max_size = 50
        # Increase timeout if needed
        config.hardware.tpu.compilation_timeout_seconds = 600
        assert config.hardware.tpu.memory_fraction == 0.8

    @conforms("002", 26, "compile_model with use_cache, timeout")
    @conforms("002", 27, "clear_cache")
    def test_slow_compilation_and_cache_growth(self, config, model):
        from tpukit.torch import XLACompiler

        backend, compiler = TPUBackend(config), XLACompiler(config)
        # Use caching to avoid recompilation
        compiled = compiler.compile_model(model, use_cache=True)
        compiled(torch.randn(2, 784))

        # Set cache limits (v0.4.18+)
        config.hardware.tpu.cache_max_size = 100  # LRU eviction

        # Or manually clear caches
        backend.clear_cache()
        compiler.clear_cache()

        assert backend.get_memory_stats()["model_cache_stats"]["size"] == 0
        assert compiler.get_compilation_stats()["compilation_cache"]["size"] == 0

    @conforms("002", 28, "debug logging")
    def test_debug_logging(self, config, model, caplog):
        # Enable debug logging for TPU backend
        logging.basicConfig(
            level=logging.DEBUG, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s"
        )

        # Now all TPU operations will log detailed information
        with caplog.at_level(logging.DEBUG, "tpukit"):
            backend = TPUBackend(config)
            backend.prepare_model(model)

        assert "prepare model=Sequential" in caplog.text


class TestErrorHandling:
    @conforms("002", 22, "exceptions of tpu_exceptions")
    def test_custom_exceptions(self, config, capsys):
        my_model = "not a model"
        from tpukit.torch.tpu_exceptions import (
            TPUBackendError,  # Base exception
            TPUDistributedError,  # Distributed ops failed
            TPUMemoryError,  # Memory-related errors
            TPUNotAvailableError,  # TPU/XLA not available
            TPUOutOfMemoryError,  # OOM during allocation
            TPUValidationError,  # Validation failed
            XLACompilationError,  # Compilation failed
        )

        # Usage
        try:
            backend = TPUBackend(config)
            backend.prepare_model(my_model)
        except TPUNotAvailableError:
            print("TPU not available, falling back to CPU")
        except TPUValidationError as e:
            print(f"Model validation failed: {e}")
        except TPUBackendError as e:
            print(f"TPU backend error: {e}")

        assert capsys.readouterr().out.startswith("Model validation failed: prepare_model expects")
        assert issubclass(TPUOutOfMemoryError, TPUMemoryError)
        for kind in (
            TPUDistributedError,
            TPUMemoryError,
            XLACompilationError,
            TPUNotAvailableError,
        ):
            assert issubclass(kind, TPUBackendError)

    @conforms("002", 23, "strict validation")
    def test_strict_validation_mode(self, config, model, capsys):
        invalid_inputs = torch.randn(3, 5)
        from tpukit.torch import TPUValidationError

        # Enable strict mode for development/debugging
        config.hardware.tpu.enable_strict_validation = True

        # In strict mode, warnings become exceptions
        optimizer = TPUOptimizer(config)

        try:
            optimizer.optimize(model, invalid_inputs)
        except TPUValidationError as e:
            print(f"Caught validation error: {e}")
            # Fix inputs and retry

        assert capsys.readouterr().out.startswith("Caught validation error: Sequential cannot be")

        config.hardware.tpu.enable_strict_validation = False
        assert optimizer.optimize(model, invalid_inputs).level == "none"


class TestBestPractices:
    @conforms("002", 29, "configuration by environment")
    @pytest.mark.parametrize(("environment", "strict"), [("production", False), ("laptop", True)])
    def test_1_configuration_management(self, environment, strict, monkeypatch):
        monkeypatch.setenv("ENVIRONMENT", environment)

        # Use environment-specific configs
        if os.getenv("ENVIRONMENT") == "production":
            config = KernelPyTorchConfig(mode="training")
            config.hardware.tpu.enable_strict_validation = False
        else:
            config = KernelPyTorchConfig(mode="development")
            config.hardware.tpu.enable_strict_validation = True

        assert config.hardware.tpu.enable_strict_validation is strict

    @conforms("002", 30, "monitor_memory")
    def test_2_monitoring(self, config, capsys):
        from tpukit.torch import TPUMemoryManager

        # Monitor memory usage; the document's own 1 and 60 s would make this test a minute long.
        manager = TPUMemoryManager(config.hardware.tpu)
        kept = manager.allocate_tensor((500, 500))
        stats_history = manager.monitor_memory(interval=0.01, duration=0.05)

        # Analyze peak usage
        peak_memory = max(s.allocated_memory for s in stats_history)
        print(f"Peak Memory: {peak_memory / 1e9:.2f} GB")

        assert peak_memory >= kept.nbytes
        assert "Peak Memory" in capsys.readouterr().out

    @conforms("002", 31, "save_model and load_model with optimizer, without pickle")
    def test_3_model_checkpointing(self, config, model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        backend = TPUBackend(config)
        backend.prepare_model(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 784)).sum().backward()
        optimizer.step()
        before = model.state_dict()["0.weight"].clone()

        # Save TPU model with metadata
        backend.save_model(model, "model_checkpoint.pth", save_optimizer=True, optimizer=optimizer)
        with torch.no_grad():
            model[0].weight.zero_()

        # Load with proper device placement
        model = backend.load_model(
            model, "model_checkpoint.pth", load_optimizer=True, optimizer=optimizer
        )

        assert torch.equal(model.state_dict()["0.weight"], before)
