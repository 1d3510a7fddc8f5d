"""The parameters that training begins with, where they are not drawn at random."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import AnyMesh
from ..errors import TPUModelError
from ..models.huggingface.config import config_from_huggingface
from ..models.huggingface.files import read_json
from ..models.huggingface.weights import import_huggingface
from ..models.stored.running import dense_parameters
from ..models.transformer.config import TransformerConfig
from ..quantization.files.model_files import is_quantized_folder
from ..step.workload import Workload
from .trained_model import load_trained


def first_params(source: str | None, work: Workload, mesh: AnyMesh) -> Any:
    """The weights at `source` in the workload's formats; None where none are named.

    Those of a Hugging Face folder go to their devices one parameter at a time, widened if they are
    quantized. Those of a folder that `tpukit quantize` wrote stay quantized beside thin matrices,
    and are widened where all of them are trained.

    Raises:
        TPUModelError: They are of another model.
        TPUValidationError: There is no model at `source`.
    """
    if source is None:
        return None
    config = work.config
    if config is None:
        raise TPUModelError(
            f"init_from='{source}' is for the reference transformers, whose files are known; start "
            "your own model with the arrays it holds."
        )
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        _same_shapes(source, config_from_huggingface(read_json(folder / "config.json")), config)
        params = import_huggingface(
            folder, dtype=jnp.dtype(config.param_dtype), shardings=work.layout(mesh).shardings
        ).params
        return params if work.frozen is None else jax.jit(work.frozen)(params)
    found = load_trained(source)
    _same_shapes(source, found.config, config)
    if is_quantized_folder(folder) and work.lora is not None:
        return found.params  # stays as it is kept, beside thin matrices
    wide = dense_parameters(found.params)
    params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), wide, work.base_shapes)
    return params if work.frozen is None else jax.jit(work.frozen)(params)


def _same_shapes(source: str, theirs: TransformerConfig, ours: TransformerConfig) -> None:
    found, expected = theirs.parameter_shapes(), ours.parameter_shapes()
    for path in {**expected, **found}:
        if found.get(path) != expected.get(path):
            raise TPUModelError(
                f"init_from='{source}' has {path} {found.get(path, 'not at all')} and the job's "
                f"model {expected.get(path, 'not at all')}; name that folder as the model as well."
            )
