"""`TPUBackend`: what document 002 hands a PyTorch model to."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakSet, ref

import jax

from ..errors import TPUValidationError
from ..models.remat.policy import RematPolicy, RematSpec
from ..parallel.mesh.mesh import create_mesh
from . import checkpoints
from .annotations import Data, Module
from .batches import prepare_batch
from .devices import JobProcess
from .lru import Departure, LRUCache
from .prepared import link_of, prepare
from .train_step import FusedStep, TorchLoss
from .validation import check_is_module, notes_on, report

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class TPUBackend(JobProcess):
    """Prepares modules and data, makes fused steps, saves and loads.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`; by default one for
            training.

    Raises:
        TPUNotAvailableError: There is no TPU here and validation is strict; otherwise a warning
            says so, and models run on the GPU or CPU.

    Example:
        >>> backend = TPUBackend(KernelPyTorchConfig(mode="training"))
        >>> model = backend.prepare_model(nn.Linear(784, 10))
        >>> step = backend.train_step(model, nn.functional.cross_entropy, optimizer)
        >>> loss = step(images, labels)
    """

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self._prepared: WeakSet[Any] = WeakSet()  # every one that lives
        self._cache: LRUCache[ReferenceType[Any], ReferenceType[Any]] = LRUCache(
            lambda: self.settings.cache_max_size, on_departure=_drop_programs
        )
        self._running: list[Any] = []
        self._seed = 0

    @property
    def device(self) -> "torch.device":
        """The torch device that tensors are on outside programs: CUDA where both have it."""
        import torch

        shared = self.found.kind == "gpu" and torch.cuda.is_available()
        return torch.device("cuda" if shared else "cpu")

    def prepare_model(self, model: Module) -> Module:
        """Return the same module, whose calls run as compiled programs from now on.

        Parameters stay torch's own: any loss, any optimizer and the usual loop work on it. A module
        that cannot be one program stays as it is, with a warning that names the line. At most
        `cache_max_size` modules keep their programs (None: 100): the one prepared longest ago loses
        its programs first, and compiles them again when it is called.

        Raises:
            TPUValidationError: It is no module; or validation is strict, and something about it
                would only be warned of.
        """
        check_is_module(model, what="prepare_model")
        if self._cache.get(ref(model)) is not None:
            return model
        settings = self.settings
        report(notes_on(model), strict=settings.enable_strict_validation)
        prepare(
            model.to(self.device),
            remat=RematPolicy.parse("full" if settings.gradient_checkpointing else None),
            programs=lambda: settings.cache_max_size,
            strict=settings.enable_strict_validation,
        )
        self._prepared.add(model)
        kept = ref(model, self._cache.discard)
        self._cache.put(kept, kept)
        logger.info("prepare model=%s device=%s", type(model).__name__, self.found.kind)
        return model

    def prepare_data(self, data: Data) -> Data:
        """Return tensors, tuples, dicts, dataclasses or a DataLoader with tensors in place."""
        return prepare_batch(data, self.device)

    def train_step(
        self,
        model: "torch.nn.Module",
        loss_fn: TorchLoss | None,
        optimizer: "torch.optim.Optimizer",
        *,
        mesh: jax.sharding.Mesh | None = None,
        strategy: str | None = None,
        remat: RematSpec = None,
    ) -> FusedStep:
        """Return forward, loss, backward and optimizer as one program, jitted once.

        Args:
            model: A prepared module.
            loss_fn: (outputs, targets) -> loss, in torch; None where the model gives its loss.
            optimizer: torch.optim's SGD, Adam, AdamW or Adafactor of the model's parameters.
            mesh: How to split the work; all devices on one axis "fsdp" by default.
            strategy: "data", "fsdp", "fsdp+megatron", …; by the names of the axes by default.
            remat: What the backward pass computes again; by `gradient_checkpointing` by default.

        Raises:
            TPUOptimizationError: The optimizer has no exact counterpart.
            TPUValidationError: The module is not prepared.
        """
        check_is_module(model, what="train_step")
        narrow = self.settings.use_mixed_precision and self.found.kind != "cpu"
        step = FusedStep(
            model,
            loss_fn,
            optimizer,
            mesh=mesh or create_mesh(mesh_shape=(jax.device_count(),), axis_names=("fsdp",)),
            strategy=strategy,
            remat=remat or ("full" if self.settings.gradient_checkpointing else None),
            compute_dtype="bfloat16" if narrow else None,
            seed=self._seed,
            started=self._running.append,
        )
        return step

    def manual_seed(self, seed: int) -> None:
        """Draw dropout masks and other random numbers of prepared models from this seed on."""
        self._seed = seed
        for model in self._prepared:
            link = link_of(model)
            if link is not None:
                link.seed(jax.random.key(seed))

    def synchronize(self) -> None:
        """Wait until every step that was started has ended."""
        if self._running:
            running, self._running[:] = [*self._running], []
            jax.block_until_ready(running)

    def get_memory_stats(self) -> dict[str, Any]:
        """Return memory of each device as its runtime reports it, and how the caches served.

        A CPU reports nothing: `devices` says so instead of naming a number.
        """
        devices: dict[str, Any] = {}
        for device in jax.local_devices():
            measured = device.memory_stats()
            devices[str(device)] = measured or {
                "reason": f"a {device.platform} device reports no memory"
            }
        programs = [link.programs.stats for link in map(link_of, self._prepared) if link]
        return {
            "devices": devices,
            "origin": "measured",
            "model_cache_stats": self._cache.stats.to_dict(),
            "program_cache_stats": {
                "size": sum(one.size for one in programs),
                "hits": sum(one.hits for one in programs),
                "misses": sum(one.misses for one in programs),
                "evictions": sum(one.evictions for one in programs),
            },
        }

    def clear_cache(self) -> None:
        """Forget all models and their compiled programs; a model that is called compiles again.

        The counts of hits, misses and evictions stay.
        """
        for model in self._prepared:
            _drop_programs_of(model)
        logger.info("clear caches of %d models", len(self._cache))
        self._cache.clear()

    def save_model(
        self,
        model: "torch.nn.Module",
        path: str | Path,
        save_optimizer: bool = False,
        optimizer: "torch.optim.Optimizer | None" = None,
        metadata: dict[str, Any] | None = None,
    ) -> Path:
        """Write a model's newest values, and its optimizer's state: safetensors, or a folder.

        Args:
            model: A module, prepared or not.
            path: A file; a path without a suffix becomes an Orbax folder.
            save_optimizer: Whether `optimizer` is written too.
            optimizer: A torch optimizer.
            metadata: Plain data to keep with it.

        Raises:
            TPUCheckpointError: It cannot be written there.
            TPUValidationError: An optimizer is to be written and none is given.
        """
        check_is_module(model, what="save_model")
        _check_optimizer(save_optimizer, optimizer, "save_optimizer")
        return checkpoints.save(
            model, path, optimizer=optimizer if save_optimizer else None, metadata=metadata
        )

    def load_model(
        self,
        model: Module,
        path: str | Path,
        load_optimizer: bool = False,
        optimizer: "torch.optim.Optimizer | None" = None,
    ) -> Module:
        """Read what `save_model` wrote, or plain safetensors, and return the prepared model.

        Values are placed when the model next runs, so a fused step on another mesh may go on.

        Raises:
            TPUCheckpointError: There is nothing to read, or it is of another model or a pickle.
            TPUValidationError: An optimizer is to be read and none is given.
        """
        check_is_module(model, what="load_model")
        _check_optimizer(load_optimizer, optimizer, "load_optimizer")
        checkpoints.load(model, path, optimizer=optimizer if load_optimizer else None)
        return self.prepare_model(model)

    def __repr__(self) -> str:
        return f"TPUBackend({self.found.how}; {len(self._prepared)} models prepared)"


def _drop_programs(kept: ReferenceType[Any], value: ReferenceType[Any], how: Departure) -> None:
    model = kept()
    if model is not None:
        logger.info("model %s model=%s", how, type(model).__name__)
        _drop_programs_of(model)


def _drop_programs_of(model: Any) -> None:
    link = link_of(model)
    if link is not None:
        link.programs.clear()


def _check_optimizer(wanted: bool, optimizer: Any, name: str) -> None:
    if wanted and optimizer is None:
        raise TPUValidationError(f"{name}=True needs the optimizer: optimizer=optimizer.")
