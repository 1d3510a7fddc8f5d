"""The losses of torch.nn."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from .entry import Called, Draw, Entry, positive, signs, whole

SCORES, CLASSES = (6, 4), whole(4, 6)
PIXELS, PIXEL_CLASSES = (2, 4, 3, 3), whole(4, 2, 3, 3)


def losses() -> Iterator[Entry]:
    """Yield every loss."""
    for name, build, draws in (*_of_classes(), *_of_numbers(), *_of_pairs(), *_of_sequences()):
        yield Entry("loss", name, build, draws)


Row = tuple[str, Callable[[], nn.Module], tuple[Draw, ...]]


def _weights() -> torch.Tensor:
    return torch.tensor([0.5, 1.0, 2.0, 0.25])


def _shares(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator).softmax(1).requires_grad_()


def _logarithms(*shape: int) -> Draw:
    return lambda generator: torch.randn(shape, generator=generator).log_softmax(1).requires_grad_()


def _of_classes() -> list[Row]:
    entropy = nn.CrossEntropyLoss
    return [
        ("CrossEntropyLoss", entropy, (SCORES, CLASSES)),
        ("CrossEntropyLoss, weights", lambda: entropy(_weights()), (SCORES, CLASSES)),
        ("CrossEntropyLoss, one ignored", lambda: entropy(ignore_index=2), (SCORES, CLASSES)),
        ("CrossEntropyLoss, smoothed", lambda: entropy(label_smoothing=0.1), (SCORES, CLASSES)),
        (
            "CrossEntropyLoss, weights, one ignored, smoothed",
            lambda: entropy(_weights(), ignore_index=1, label_smoothing=0.2),
            (SCORES, CLASSES),
        ),
        ("CrossEntropyLoss, shares", entropy, (SCORES, _shares(6, 4))),
        ("CrossEntropyLoss, each", lambda: entropy(reduction="none"), (SCORES, CLASSES)),
        ("CrossEntropyLoss, sum", lambda: entropy(reduction="sum"), (SCORES, CLASSES)),
        ("CrossEntropyLoss, pixels", lambda: entropy(_weights()), (PIXELS, PIXEL_CLASSES)),
        ("NLLLoss", nn.NLLLoss, (_logarithms(6, 4), CLASSES)),
        (
            "NLLLoss, weights, one ignored",
            lambda: nn.NLLLoss(_weights(), ignore_index=0),
            (_logarithms(6, 4), CLASSES),
        ),
        ("NLLLoss, pixels", nn.NLLLoss, (_logarithms(2, 4, 3, 3), PIXEL_CLASSES)),
        ("MultiMarginLoss", nn.MultiMarginLoss, (SCORES, CLASSES)),
        ("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, (SCORES, positive(6, 4))),
        (
            "MultiLabelMarginLoss",
            nn.MultiLabelMarginLoss,
            ((2, 4), lambda _: torch.tensor([[3, 0, -1, 1], [2, -1, 0, 1]])),
        ),
        ("AdaptiveLogSoftmaxWithLoss", _adaptive, ((6, 8), whole(12, 6))),
    ]


def _adaptive() -> nn.Module:
    inner = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8])
    return Called(lambda x, labels, inner: inner(x, labels).loss, inner=inner)


def _of_numbers() -> list[Row]:
    shape = (4, 5)
    return [
        ("MSELoss", nn.MSELoss, (shape, shape)),
        ("L1Loss", nn.L1Loss, (shape, shape)),
        ("SmoothL1Loss", lambda: nn.SmoothL1Loss(beta=0.5), (shape, shape)),
        ("HuberLoss", lambda: nn.HuberLoss(delta=0.7), (shape, shape)),
        ("BCELoss", nn.BCELoss, (positive(*shape), positive(*shape))),
        ("BCEWithLogitsLoss", nn.BCEWithLogitsLoss, (shape, positive(*shape))),
        (
            "BCEWithLogitsLoss, weights",
            lambda: nn.BCEWithLogitsLoss(torch.ones(5) / 2, pos_weight=torch.arange(1.0, 6)),
            (shape, positive(*shape)),
        ),
        (
            "KLDivLoss",
            lambda: nn.KLDivLoss(reduction="batchmean"),
            (_logarithms(4, 5), _shares(4, 5)),
        ),
        (
            "KLDivLoss, logarithms",
            lambda: nn.KLDivLoss(reduction="sum", log_target=True),
            (_logarithms(4, 5), _logarithms(4, 5)),
        ),
        ("PoissonNLLLoss", nn.PoissonNLLLoss, (shape, whole(4, *shape))),
        ("GaussianNLLLoss", nn.GaussianNLLLoss, (shape, shape, positive(*shape))),
        ("SoftMarginLoss", nn.SoftMarginLoss, (shape, signs(*shape))),
        ("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, (shape, signs(*shape))),
    ]


def _of_pairs() -> list[Row]:
    shape = (4, 5)
    return [
        ("CosineEmbeddingLoss", nn.CosineEmbeddingLoss, (shape, shape, signs(4))),
        ("MarginRankingLoss", lambda: nn.MarginRankingLoss(0.2), ((4,), (4,), signs(4))),
        ("TripletMarginLoss", nn.TripletMarginLoss, (shape, shape, shape)),
        ("TripletMarginLoss, swapped", lambda: nn.TripletMarginLoss(swap=True), (shape,) * 3),
        ("TripletMarginWithDistanceLoss", nn.TripletMarginWithDistanceLoss, (shape,) * 3),
    ]


def _of_sequences() -> list[Row]:
    labels = torch.tensor([[1, 2, 2, 3], [3, 1, 0, 0]])

    def build(**options: object) -> Callable[[], nn.Module]:
        loss = nn.CTCLoss(**options)
        return lambda: Called(
            lambda x: loss(x.log_softmax(-1), labels, torch.tensor([8, 7]), torch.tensor([4, 2]))
        )

    return [
        ("CTCLoss", build(), ((8, 2, 5),)),
        ("CTCLoss, sum", build(reduction="sum"), ((8, 2, 5),)),
    ]
