"""Where the parameters of a layer lie in the checkpoints of most models, by Llama's names."""

from ..transformer.layer_config import LayerConfig
from ..transformer.shapes import layer_shapes
from .tensors import Slot

_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# Where what blocks add is normed as well, the norm before the MLP has a name of its own.
_NORMS_AROUND = {
    "input_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def usual_slots(layer: LayerConfig, d_model: int) -> dict[str, Slot]:
    """Every parameter of the layer under the name that Llama, Qwen, Gemma and OLMo give it.

    Names of experts are those of Qwen and DeepSeek.
    """
    norms = _NORMS_AROUND if layer.post_norms else _NORMS
    slots: dict[str, Slot] = {}
    for path in layer_shapes(layer, d_model):
        *owners, leaf = path.split("/")
        if owners and owners[0] in norms:
            slots[path] = Slot(f"{norms[owners[0]]}.weight")
        elif owners[:1] == ["self_attention"]:
            slots[path] = _linear(["self_attn", *owners[1:]], leaf)
        elif owners[:2] == ["mlp", "experts"] and leaf.endswith("_proj"):
            slots[path] = Slot(f"mlp.experts.{{expert}}.{leaf}.weight", transposed=True)
        elif owners[:2] == ["mlp", "router"]:
            slots[path] = _linear(["mlp", "gate"], leaf)
        else:
            slots[path] = _linear(owners, leaf)
    return slots


def _linear(owners: list[str], leaf: str) -> Slot:
    names = {"kernel": "weight", "scale": "weight"}
    return Slot(".".join([*owners, names.get(leaf, leaf)]), transposed=leaf == "kernel")
