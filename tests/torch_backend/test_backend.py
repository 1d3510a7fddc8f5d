"""`TPUBackend` as document 002 uses it, with right and with wrong input."""

import copy
import gc
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from tpukit import create_mesh
from tpukit.errors import TPUCheckpointError, TPUNotAvailableError, TPUValidationError
from tpukit.torch import KernelPyTorchConfig, TPUBackend


@pytest.fixture
def backend():
    return TPUBackend(KernelPyTorchConfig(gradient_checkpointing=False))


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def trained(backend, module, steps=3):
    model = backend.prepare_model(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = backend.train_step(model, nn.functional.mse_loss, optimizer)
    for _ in range(steps):
        step(torch.ones(8, 4), torch.zeros(8, 2))
    return model, optimizer, step


def test_what_a_backend_says_of_itself(backend, caplog):
    TPUBackend()
    assert "No TPU here" in caplog.text
    assert (backend.world_size, backend.rank, backend.is_distributed) == (1, 0, False)
    assert backend.device == torch.device("cpu")
    assert "0 models prepared" in repr(backend)


def test_strict_validation_refuses_a_machine_without_a_tpu():
    with pytest.raises(TPUNotAvailableError, match="enable_strict_validation"):
        TPUBackend(KernelPyTorchConfig(mode="development"))


def test_preparing_keeps_the_object_its_class_and_its_state(backend):
    module = network()
    names = list(module.state_dict())
    model = backend.prepare_model(module)
    assert model is module
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "Sequential"
    assert list(model.state_dict()) == names
    assert backend.prepare_model(model) is model
    stats = backend.get_memory_stats()["model_cache_stats"]
    assert (stats["size"], stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 1, 1, 0.5)


def test_a_copy_of_a_prepared_model_is_plain(backend):
    model, *_ = trained(backend, network())
    twin = copy.deepcopy(model)
    assert type(twin) is nn.Sequential
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


def test_programs_are_counted_and_forgotten(backend):
    model = backend.prepare_model(nn.Linear(4, 2))
    for rows in (2, 3, 2, 2):
        model(torch.ones(rows, 4))
    stats = backend.get_memory_stats()["program_cache_stats"]
    assert (stats["size"], stats["hits"], stats["misses"]) == (2, 2, 2)
    backend.clear_cache()
    assert backend.get_memory_stats()["program_cache_stats"]["size"] == 0
    assert model(torch.ones(2, 4)).shape == (2, 2)


def test_the_cache_of_models_is_emptied_and_bounded():
    config = KernelPyTorchConfig(gradient_checkpointing=False)
    config.hardware.tpu.cache_max_size = 3
    backend = TPUBackend(config)
    models = [backend.prepare_model(nn.Linear(4, 2)) for _ in range(5)]
    for model in models:
        model(torch.ones(2, 4))
    stats = backend.get_memory_stats()["model_cache_stats"]
    assert (stats["size"], stats["max_size"], stats["evictions"]) == (3, 3, 2)
    backend.clear_cache()
    stats = backend.get_memory_stats()
    assert stats["model_cache_stats"]["size"] == stats["program_cache_stats"]["size"] == 0
    assert backend.prepare_model(models[0]) is models[0]
    assert backend.get_memory_stats()["model_cache_stats"]["size"] == 1
    assert models[0](torch.ones(2, 4)).shape == (2, 2)


def test_an_evicted_model_loses_its_programs_and_compiles_again():
    config = KernelPyTorchConfig(gradient_checkpointing=False)
    backend = TPUBackend(config)
    config.hardware.tpu.cache_max_size = 1  # also after the backend was made
    first = backend.prepare_model(nn.Linear(4, 2))
    first(torch.ones(2, 4))
    backend.prepare_model(nn.Linear(4, 2))
    assert backend.get_memory_stats()["program_cache_stats"]["size"] == 0
    assert first(torch.ones(2, 4)).shape == (2, 2)
    assert backend.get_memory_stats()["program_cache_stats"]["size"] == 1


def test_programs_of_one_model_are_bounded():
    config = KernelPyTorchConfig(gradient_checkpointing=False)
    config.hardware.tpu.cache_max_size = 2
    backend = TPUBackend(config)
    model = backend.prepare_model(nn.Linear(4, 2))
    for rows in (1, 2, 3, 4):
        model(torch.ones(rows, 4))
    stats = backend.get_memory_stats()["program_cache_stats"]
    assert (stats["size"], stats["evictions"]) == (2, 2)


def test_a_model_that_is_gone_is_in_no_cache(backend):
    model = backend.prepare_model(nn.Linear(4, 2))
    del model
    gc.collect()
    assert backend.get_memory_stats()["model_cache_stats"]["size"] == 0


@dataclass
class Example:
    ids: torch.Tensor
    name: str


def test_data_of_every_shape(backend):
    tensor = torch.arange(6).reshape(2, 3).t()
    assert backend.prepare_data(tensor).is_contiguous()
    pair = backend.prepare_data((tensor, [np.ones(2)]))
    assert isinstance(pair, tuple)
    assert torch.equal(pair[1][0], torch.ones(2, dtype=torch.float64))
    assert backend.prepare_data({"x": tensor, "n": 3})["n"] == 3
    example = backend.prepare_data(Example(tensor, "a"))
    assert isinstance(example, Example)
    assert example.ids.is_contiguous()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 2)), 2)
    prepared = backend.prepare_data(loader)
    assert len(prepared) == len(list(prepared)) == 3
    assert prepared.batch_size == 2


def test_synchronize_waits_for_started_steps(backend):
    _, _, step = trained(backend, network())
    backend.synchronize()
    loss = step(torch.ones(8, 4), torch.zeros(8, 2))
    backend.synchronize()
    assert loss.array.is_ready()
    backend.synchronize()


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "folder"])
def test_a_run_goes_on_from_what_was_saved_on_another_mesh(backend, tmp_path, name, caplog):
    torch.manual_seed(0)
    module = network()
    other = copy.deepcopy(module)
    model, optimizer, step = trained(backend, module)
    backend.save_model(
        model, tmp_path / name, save_optimizer=True, optimizer=optimizer, metadata={"epoch": 3}
    )
    assert ("not as a pickle" in caplog.text) == name.endswith(".pth")
    x, y = torch.ones(8, 4), torch.zeros(8, 2)
    expected = [step(x, y).item() for _ in range(3)]
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    backend.load_model(other, tmp_path / name, load_optimizer=True, optimizer=fresh)
    mesh = create_mesh(mesh_shape=(2, 4), axis_names=("data", "fsdp"))
    again = backend.train_step(other, nn.functional.mse_loss, fresh, mesh=mesh)
    np.testing.assert_allclose([again(x, y).item() for _ in range(3)], expected, rtol=1e-5)


class TestTPUErrorPaths:
    """What goes wrong in a person's hands, and what they are told."""

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (None, "expects an nn.Module, got NoneType"),
            (lambda x: x, "expects an nn.Module, got function"),
            (nn.Linear, "got the class Linear; pass an instance"),
            ("tiny", "expects an nn.Module, got str"),
        ],
    )
    def test_what_is_no_model(self, backend, model, message):
        with pytest.raises(TPUValidationError, match=message):
            backend.prepare_model(model)
        with pytest.raises(TPUValidationError, match=message):
            backend.train_step(model, None, None)

    def test_doubles_are_narrowed_and_it_is_said(self, backend, caplog):
        backend.prepare_model(nn.Linear(2, 2).double())
        assert "weight, bias: float64 becomes float32" in caplog.text
        backend.settings.enable_strict_validation = True
        with pytest.raises(TPUValidationError, match=r"becomes float32.*Strict validation refuses"):
            backend.prepare_model(nn.Linear(2, 2).double())

    def test_sparse_gradients(self, backend, caplog):
        backend.prepare_model(nn.Embedding(4, 2, sparse=True))
        assert "sparse gradients become dense" in caplog.text

    def test_a_step_of_a_model_that_is_not_prepared(self, backend):
        model = nn.Linear(2, 2)
        with pytest.raises(TPUValidationError, match="is not prepared; call backend"):
            backend.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))

    def test_backward_of_a_fused_loss(self, backend):
        _, _, step = trained(backend, network(), steps=0)
        with pytest.raises(TPUValidationError, match=r"leave out loss\.backward"):
            step(torch.ones(8, 4), torch.zeros(8, 2)).backward()

    def test_a_batch_that_the_mesh_cannot_split(self, backend):
        _, _, step = trained(backend, network(), steps=0)
        with pytest.raises(TPUValidationError, match="use a multiple of 8"):
            step(torch.ones(3, 4), torch.zeros(3, 2))

    def test_data_without_values_or_numbers(self, backend):
        with pytest.raises(TPUValidationError, match="meta device"):
            backend.prepare_data(torch.ones(2, device="meta"))
        with pytest.raises(TPUValidationError, match="expected numbers"):
            backend.prepare_data({"names": np.array(["a", "b"])})

    def test_a_missing_optimizer(self, backend, tmp_path):
        model = network()
        with pytest.raises(TPUValidationError, match="save_optimizer=True needs the optimizer"):
            backend.save_model(model, tmp_path / "m.pth", save_optimizer=True)
        with pytest.raises(TPUValidationError, match="load_optimizer=True needs the optimizer"):
            backend.load_model(model, tmp_path / "m.pth", load_optimizer=True)

    def test_a_checkpoint_that_is_not_there(self, backend, tmp_path):
        with pytest.raises(TPUCheckpointError, match="cannot be read"):
            backend.load_model(network(), tmp_path / "none.pth")
        (tmp_path / "empty").mkdir()
        with pytest.raises(TPUCheckpointError, match="is not a folder of save_model"):
            backend.load_model(network(), tmp_path / "empty")

    def test_a_place_that_cannot_be_written(self, backend, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(TPUCheckpointError, match="cannot be written"):
            backend.save_model(network(), tmp_path / "file" / "m.pth")

    def test_a_pickle_is_not_opened(self, backend, tmp_path):
        torch.save(network().state_dict(), tmp_path / "m.pth")
        with pytest.raises(TPUCheckpointError, match="is a pickle, which can run code"):
            backend.load_model(network(), tmp_path / "m.pth")

    def test_a_file_of_noise(self, backend, tmp_path):
        (tmp_path / "m.pth").write_bytes(b"noise" * 10)
        with pytest.raises(TPUCheckpointError, match="is not a safetensors file"):
            backend.load_model(network(), tmp_path / "m.pth")

    def test_a_checkpoint_of_another_model_changes_nothing(self, backend, tmp_path):
        backend.save_model(network(), tmp_path / "m.pth")
        wider = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2))
        before = copy.deepcopy(wider.state_dict())
        with pytest.raises(TPUCheckpointError, match=r"has 0\.weight as \[8, 4\], but this model"):
            backend.load_model(wider, tmp_path / "m.pth")
        with pytest.raises(TPUCheckpointError, match="lacks bias, weight, unlike this Linear"):
            backend.load_model(nn.Linear(4, 8), tmp_path / "m.pth")
        for name, value in wider.state_dict().items():
            assert torch.equal(value, before[name])

    def test_a_checkpoint_without_an_optimizer(self, backend, tmp_path):
        model = network()
        backend.save_model(model, tmp_path / "m.pth")
        with pytest.raises(TPUCheckpointError, match="has no optimizer"):
            backend.load_model(
                model,
                tmp_path / "m.pth",
                load_optimizer=True,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            )

    def test_metadata_that_is_no_plain_data(self, backend, tmp_path):
        with pytest.raises(TPUCheckpointError, match="metadata is not plain data"):
            backend.save_model(network(), tmp_path / "m.pth", metadata={"f": print})
        assert not list(tmp_path.iterdir())
