"""Small PyTorch models of every kind that a test wants, each with batches to train it on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn


class Gpt(nn.Module):
    """A transformer with `scaled_dot_product_attention` and a head tied to its embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (y.view(b, s, 4, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(x)


class Tagger(nn.Module):
    """An LSTM that classifies each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


@dataclass(frozen=True)
class Case:
    """A model, batches of (inputs, targets), and its loss; None where the model gives it."""

    build: Callable[[], nn.Module]
    batches: Callable[[], list[tuple[Any, Any]]]
    loss: Callable[[Any, Any], torch.Tensor] | None

    def eager_loss(self, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return outputs.loss if self.loss is None else self.loss(outputs, targets)


def flat_cross_entropy(outputs: Any, targets: Any) -> torch.Tensor:
    logits = getattr(outputs, "logits", outputs)
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _numbers(*shape: int, classes: int, label_shape: tuple[int, ...]) -> Any:
    def batches() -> list[tuple[Any, Any]]:
        g = torch.Generator().manual_seed(0)
        return [
            (torch.randn(*shape, generator=g), torch.randint(0, classes, label_shape, generator=g))
            for _ in range(20)
        ]

    return batches


def _tokens(vocabulary: int = 64, *, keywords: bool = False) -> Any:
    def batches() -> list[tuple[Any, Any]]:
        g = torch.Generator().manual_seed(0)
        ids = [torch.randint(1, vocabulary, (8, 17), generator=g) for _ in range(20)]
        if keywords:
            return [({"input_ids": one, "labels": one}, None) for one in ids]
        return [(one[:, :-1], one[:, 1:]) for one in ids]

    return batches


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def _qwen() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_labels=5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
        )
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


_PICTURES = _numbers(8, 3, 16, 16, classes=5, label_shape=(8,))
CASES: dict[str, Case] = {
    "mlp": Case(_mlp, _numbers(8, 16, classes=5, label_shape=(8,)), functional.cross_entropy),
    "gpt": Case(Gpt, _tokens(), flat_cross_entropy),
    "llama": Case(_llama, _tokens(keywords=True), None),
    "qwen": Case(_qwen, _tokens(keywords=True), None),
    "bert": Case(_bert, _tokens(keywords=True), None),
    "vit": Case(_vit, _PICTURES, flat_cross_entropy),
    "resnet": Case(_resnet, _PICTURES, flat_cross_entropy),
    "lstm": Case(Tagger, _numbers(8, 4, 8, classes=5, label_shape=(8, 4)), flat_cross_entropy),
    "batch norm": Case(_convolutions, _PICTURES, functional.cross_entropy),
}
