"""Attention and the transformers of torch.nn, with every kind of mask."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .entry import Called, Entry

KIND = "transformer"
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
SIZES: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
X, MEMORY = (2, 5, 8), (2, 7, 8)


class SelfAttention(nn.Module):
    """`MultiheadAttention` of one tensor, with given masks."""

    def __init__(self, masks: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.masks = masks

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, x, x, **self.masks)


def transformers() -> Iterator[Entry]:
    """Yield every one."""
    for name, masks in (
        ("no mask", {}),
        ("no weights", {"need_weights": False}),
        ("causal mask", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
        ("boolean mask", {"attn_mask": CAUSAL.isinf()}),
        ("padding mask", {"key_padding_mask": PADDING}),
        ("both masks", {"key_padding_mask": PADDING, "attn_mask": CAUSAL.isinf()}),
        ("weights by head", {"average_attn_weights": False}),
    ):
        yield Entry(
            KIND, f"MultiheadAttention, {name}", lambda masks=masks: SelfAttention(masks), (X,)
        )
    yield Entry(
        KIND, "MultiheadAttention, added keys",
        lambda: SelfAttention({}, add_bias_kv=True, add_zero_attn=True), (X,),
    )  # fmt: skip
    yield Entry(
        KIND, "MultiheadAttention, other widths",
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        (X, (2, 7, 6), (2, 7, 4)),
    )  # fmt: skip
    first = SIZES | {"batch_first": True}
    layer, decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    yield Entry(KIND, "TransformerEncoderLayer", lambda: layer(**SIZES), (X,))
    yield Entry(KIND, "TransformerEncoderLayer, eval", lambda: layer(**first), (X,), training=False)
    yield Entry(
        KIND, "TransformerEncoderLayer, norm first, GELU",
        lambda: layer(**first, norm_first=True, activation="gelu"), (X,),
    )  # fmt: skip
    yield Entry(
        KIND, "TransformerEncoder, padding",
        lambda: Called(
            lambda x, inner: inner(x, src_key_padding_mask=PADDING),
            inner=nn.TransformerEncoder(layer(**first), 2, enable_nested_tensor=False),
        ), (X,),
    )  # fmt: skip
    yield Entry(KIND, "TransformerDecoderLayer", lambda: decoder(**first), (X, MEMORY))
    yield Entry(
        KIND, "TransformerDecoder, causal",
        lambda: Called(
            lambda x, m, inner: inner(x, m, tgt_mask=CAUSAL, tgt_is_causal=True),
            inner=nn.TransformerDecoder(decoder(**first), 2),
        ), (X, MEMORY),
    )  # fmt: skip
    yield Entry(
        KIND, "Transformer",
        lambda: nn.Transformer(
            **first, num_encoder_layers=1, num_decoder_layers=1, norm_first=True
        ), (MEMORY, X),
    )  # fmt: skip
    heads = (2, 4, 5, 4)
    attend = nn.functional.scaled_dot_product_attention
    for name, options in (
        ("causal", {"is_causal": True}),
        ("scale", {"scale": 0.3}),
        ("mask of numbers", {"attn_mask": CAUSAL}),
        ("boolean mask", {"attn_mask": ~CAUSAL.isinf()}),
    ):
        yield Entry(
            KIND, f"scaled_dot_product_attention, {name}",
            lambda options=options: Called(lambda q, k, v: attend(q, k, v, **options)),
            (heads, heads, heads),
        )  # fmt: skip
    wide = (2, 4, 16, 16)
    yield Entry(
        KIND, "scaled_dot_product_attention, wide heads",
        lambda: Called(lambda q, k, v: attend(q, k, v, is_causal=True)), (wide, wide, wide),
    )  # fmt: skip
    few = (2, 2, 5, 4)
    yield Entry(
        KIND, "scaled_dot_product_attention, grouped",
        lambda: Called(lambda q, k, v: attend(q, k, v, enable_gqa=True)), (heads, few, few),
    )  # fmt: skip
