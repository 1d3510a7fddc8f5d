"""`TPUBackend`: prepares, trains, saves and loads PyTorch models (document 002)."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakSet, ref

import jax

from ..errors import TPUValidationError
from ..models.remat.policy import FULL, RematPolicy, RematSpec
from ..parallel.mesh.mesh import create_mesh
from ..plain_data import JsonObject
from . import checkpoints
from .batches import Data, Module, prepare_batch
from .devices import JobProcess
from .lru import Departure, LRUCache
from .prepared import link_of, prepare
from .train_step import FusedStep, TorchLoss
from .validation import check_is_module, notes_on, report

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class TPUBackend(JobProcess):
    """Prepares modules and data, makes fused training steps, and saves and loads modules.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`; by default one for
            training.

    Raises:
        TPUNotAvailableError: There is no TPU here and validation is strict; otherwise a warning
            is logged, and models run on the GPU or CPU.

    Example:
        >>> backend = TPUBackend(KernelPyTorchConfig(mode="training"))
        >>> model = backend.prepare_model(nn.Linear(784, 10))
        >>> step = backend.train_step(model, nn.functional.cross_entropy, optimizer)
        >>> loss = step(images, labels)
    """

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self._prepared: WeakSet[Any] = WeakSet()  # all that are alive
        self._cache: LRUCache[ReferenceType[Any], ReferenceType[Any]] = LRUCache(
            lambda: self.settings.cache_max_size, on_departure=_drop_programs
        )
        self._running: list[Any] = []
        self._seed = 0

    @property
    def device(self) -> "torch.device":
        """The torch device of tensors outside programs: CUDA if jax and torch both have it."""
        import torch

        shared = self.found.kind == "gpu" and torch.cuda.is_available()
        return torch.device("cuda" if shared else "cpu")

    def prepare_model(self, model: Module) -> Module:
        """Return the same module; its calls run as compiled programs from now on.

        Parameters stay torch tensors, so any loss, any optimizer and the usual loop work. A module
        that cannot become one program runs in plain torch, with a warning that names the line. At
        most `cache_max_size` modules keep their programs (None: 100). The module prepared longest
        ago loses its programs first, and compiles them again when it is called.

        Raises:
            TPUValidationError: It is not a module; or validation is strict, and the module would
                otherwise cause a warning.
        """
        check_is_module(model, what="prepare_model")
        if self._cache.get(ref(model)) is not None:
            return model
        settings = self.settings
        report(notes_on(model), strict=settings.enable_strict_validation)
        prepare(
            model.to(self.device),
            remat=RematPolicy.parse(FULL if settings.gradient_checkpointing else None),
            programs=lambda: settings.cache_max_size,
            strict=settings.enable_strict_validation,
        )
        self._prepared.add(model)
        kept = ref(model, self._cache.discard)
        self._cache.put(kept, kept)
        logger.info("prepare model=%s device=%s", type(model).__name__, self.found.kind)
        return model

    def prepare_data(self, data: Data) -> Data:
        """Return the data with all tensors on the device: tensors, containers or a DataLoader."""
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
            loss_fn: (outputs, targets) -> loss, in torch; None if the model returns its loss.
            optimizer: torch.optim's SGD, Adam, AdamW or Adafactor of the model's parameters.
            mesh: The devices; by default all on one axis "fsdp".
            strategy: "data", "fsdp", "fsdp+megatron", …; by default it follows from the axis names.
            remat: Rematerialization policy; by default that of `gradient_checkpointing`.

        Raises:
            TPUOptimizationError: The optimizer has no exact counterpart in optax.
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
            remat=remat or (FULL if self.settings.gradient_checkpointing else None),
            compute_dtype="bfloat16" if narrow else None,
            seed=self._seed,
            started=self._running.append,
        )
        return step

    def manual_seed(self, seed: int) -> None:
        """Set the seed of dropout masks and other random numbers of prepared models."""
        self._seed = seed
        for model in self._prepared:
            link = link_of(model)
            if link is not None:
                link.seed(jax.random.key(seed))

    def synchronize(self) -> None:
        """Wait until every started step has ended."""
        if self._running:
            running, self._running[:] = [*self._running], []
            jax.block_until_ready(running)

    def get_memory_stats(self) -> JsonObject:
        """Return the memory that each device's runtime reports, and the statistics of the caches.

        For a CPU, which reports no memory, `devices` has a reason instead of numbers.
        """
        devices: JsonObject = {}
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
                "size": sum(stats.size for stats in programs),
                "hits": sum(stats.hits for stats in programs),
                "misses": sum(stats.misses for stats in programs),
                "evictions": sum(stats.evictions for stats in programs),
            },
        }

    def clear_cache(self) -> None:
        """Drop all compiled programs; a model compiles again when it is called.

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
        metadata: JsonObject | None = None,
    ) -> Path:
        """Write a model's newest values, and its optimizer's state if requested.

        Args:
            model: A module, prepared or not.
            path: A safetensors file; a path without a suffix becomes an Orbax folder.
            save_optimizer: Whether `optimizer` is written too.
            optimizer: A torch optimizer.
            metadata: Plain data to store with it.

        Raises:
            TPUCheckpointError: The path cannot be written.
            TPUValidationError: `save_optimizer` is set without an optimizer.
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
        """Read a file of `save_model`, or plain safetensors, and return the prepared model.

        Values are placed on devices when the model next runs, so a fused step on another mesh can
        continue.

        Raises:
            TPUCheckpointError: The file is missing, of another model, or a pickle.
            TPUValidationError: `load_optimizer` is set without an optimizer.
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


def _drop_programs_of(model: "torch.nn.Module") -> None:
    link = link_of(model)
    if link is not None:
        link.programs.clear()


def _check_optimizer(wanted: bool, optimizer: object, name: str) -> None:
    if wanted and optimizer is None:
        raise TPUValidationError(f"{name}=True needs the optimizer; pass optimizer=optimizer.")
