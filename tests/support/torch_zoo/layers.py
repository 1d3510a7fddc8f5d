"""The layers of torch.nn."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from .entry import Called, Draw, Entry, distinct, positive, whole

LINE, PICTURE, VOLUME = (2, 4, 12), (2, 4, 8, 8), (2, 4, 6, 6, 6)


def layers() -> Iterator[Entry]:
    """Yield every layer."""
    yield from _products()
    yield from _convolutions()
    yield from _poolings()
    yield from _simple("padding", PICTURE, _PADDINGS)
    yield from _simple("activation", (3, 8), _ACTIVATIONS)
    yield Entry("activation", "RReLU, eval", nn.RReLU, ((3, 8),), training=False)
    yield from _norms()
    yield from _recurrent()
    yield from _simple("dropout in eval mode", PICTURE, _DROPOUTS, training=False)
    yield from _simple("resampling", PICTURE, _RESAMPLINGS)
    yield from _shapes()


def _simple(
    kind: str, shape: Draw, table: dict[str, Callable[[], nn.Module]], *, training: bool = True
) -> Iterator[Entry]:
    for name, build in table.items():
        yield Entry(kind, name, build, (shape,), training)


def _products() -> Iterator[Entry]:
    kind = "product and embedding"
    yield Entry(kind, "Linear", lambda: nn.Linear(6, 5), ((3, 6),))
    yield Entry(kind, "Linear, no bias, three axes", lambda: nn.Linear(6, 5, False), ((2, 3, 6),))
    yield Entry(kind, "LazyLinear after a call", _lazy_linear, ((3, 6),))
    yield Entry(kind, "Bilinear", lambda: nn.Bilinear(4, 5, 3), ((2, 4), (2, 5)))
    yield Entry(kind, "Identity", nn.Identity, ((2, 3),))
    yield Entry(kind, "Embedding", lambda: nn.Embedding(10, 4), (whole(10, 2, 5),))
    yield Entry(kind, "Embedding, padding", lambda: nn.Embedding(9, 4, 0), (whole(9, 2, 5),))
    yield Entry(
        kind, "Embedding, by frequency",
        lambda: nn.Embedding(5, 4, scale_grad_by_freq=True), (whole(5, 3, 5),),
    )  # fmt: skip
    for mode in ("sum", "mean", "max"):
        yield Entry(
            kind, f"EmbeddingBag, {mode}",
            lambda mode=mode: nn.EmbeddingBag(10, 4, mode=mode), (whole(10, 3, 5),),
        )  # fmt: skip
    yield Entry(
        kind, "EmbeddingBag, offsets",
        lambda: nn.EmbeddingBag(10, 4, mode="mean"),
        (whole(10, 7), lambda _: torch.tensor([0, 3, 5])),
    )  # fmt: skip


def _lazy_linear() -> nn.Module:
    layer = nn.LazyLinear(4)
    layer(torch.zeros(1, 6))
    return layer


def _convolutions() -> Iterator[Entry]:
    kind, C, T = "convolution", nn.Conv2d, nn.ConvTranspose2d
    table: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
        "Conv1d": (lambda: nn.Conv1d(4, 6, 3), LINE),
        "Conv1d, dilation": (lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2), LINE),
        "Conv2d": (lambda: C(4, 6, 3), PICTURE),
        "Conv2d, no batch": (lambda: C(4, 6, 3), PICTURE[1:]),
        "Conv2d, stride and padding": (lambda: C(4, 6, 3, stride=2, padding=1), PICTURE),
        "Conv2d, uneven": (lambda: C(4, 6, (3, 2), (2, 1), (0, 1), (1, 2)), PICTURE),
        "Conv2d, groups": (lambda: C(4, 8, 3, groups=2), PICTURE),
        "Conv2d, depthwise": (lambda: C(4, 4, 3, padding=1, groups=4), PICTURE),
        "Conv2d, padding same": (lambda: C(4, 6, 4, padding="same"), PICTURE),
        "Conv2d, padding valid": (lambda: C(4, 6, 3, padding="valid"), PICTURE),
        "Conv2d, reflected": (lambda: C(4, 6, 3, padding=1, padding_mode="reflect"), PICTURE),
        "Conv2d, circular": (lambda: C(4, 6, 3, padding=1, padding_mode="circular"), PICTURE),
        "Conv3d": (lambda: nn.Conv3d(4, 3, 3, stride=2, padding=1), VOLUME),
        "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), LINE),
        "ConvTranspose2d": (lambda: T(4, 6, 3), PICTURE),
        "ConvTranspose2d, stride and padding": (lambda: T(4, 6, 4, 2, 1), PICTURE),
        "ConvTranspose2d, output padding": (lambda: T(4, 6, 3, 2, 1, 1), PICTURE),
        "ConvTranspose2d, dilation": (lambda: T(4, 6, 3, 2, 1, 0, dilation=2), PICTURE),
        "ConvTranspose2d, groups": (lambda: T(4, 6, 3, 2, 1, 1, groups=2), PICTURE),
        "ConvTranspose2d, depthwise": (lambda: T(4, 4, 2, 2, groups=4), PICTURE),
        "ConvTranspose2d, uneven": (lambda: T(4, 6, (3, 2), (2, 3), (1, 0), (1, 0)), PICTURE),
        "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 3, 3, 2, 1, 1), VOLUME),
    }
    for name, (build, shape) in table.items():
        yield Entry(kind, name, build, (shape,))
    yield Entry(kind, "Unfold", lambda: nn.Unfold(3, padding=1, stride=2), (PICTURE,))
    yield Entry(kind, "Unfold, dilation", lambda: nn.Unfold((2, 3), dilation=2), (PICTURE,))
    yield Entry(kind, "Fold", lambda: nn.Fold((8, 8), 3, padding=1, stride=2), ((2, 36, 16),))


def _poolings() -> Iterator[Entry]:
    table: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
        "MaxPool1d": (lambda: nn.MaxPool1d(2), distinct(*LINE)),
        "MaxPool2d": (lambda: nn.MaxPool2d(2), distinct(*PICTURE)),
        "MaxPool2d, padding": (lambda: nn.MaxPool2d(3, 2, 1), distinct(*PICTURE)),
        "MaxPool2d, dilation": (lambda: nn.MaxPool2d(2, dilation=2), distinct(*PICTURE)),
        "MaxPool2d, ceiling": (lambda: nn.MaxPool2d(3, 2, ceil_mode=True), distinct(*PICTURE)),
        "MaxPool2d, indices": (lambda: nn.MaxPool2d(2, return_indices=True), distinct(*PICTURE)),
        "MaxPool3d": (lambda: nn.MaxPool3d(2), distinct(*VOLUME)),
        "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1), LINE),
        "AvgPool2d": (lambda: nn.AvgPool2d(2), PICTURE),
        "AvgPool2d, padding not counted": (
            lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), PICTURE
        ),
        "AvgPool2d, ceiling": (lambda: nn.AvgPool2d(3, 2, ceil_mode=True), PICTURE),
        "AvgPool2d, divisor": (lambda: nn.AvgPool2d(3, 2, divisor_override=4), PICTURE),
        "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME),
        "LPPool1d": (lambda: nn.LPPool1d(2, 3), positive(*LINE)),
        "LPPool2d": (lambda: nn.LPPool2d(3, 2), positive(*PICTURE)),
        "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(5), LINE),
        "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(1), PICTURE),
        "AdaptiveAvgPool2d, uneven": (lambda: nn.AdaptiveAvgPool2d((3, 5)), PICTURE),
        "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), VOLUME),
        "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(5), distinct(*LINE)),
        "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((3, 4)), distinct(*PICTURE)),
        "FractionalMaxPool2d": (_fractional, distinct(*PICTURE)),
        "MaxUnpool2d": (_unpooled, distinct(*PICTURE)),
    }  # fmt: skip
    for name, (build, shape) in table.items():
        yield Entry("pooling", name, build, (shape,))


def _fractional() -> nn.Module:
    samples = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0))
    return nn.FractionalMaxPool2d(2, output_size=4, _random_samples=samples)


def _unpooled() -> nn.Module:
    pool, unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
    return Called(lambda x, pool, unpool: unpool(*pool(x)), pool=pool, unpool=unpool)


_PADDINGS: dict[str, Callable[[], nn.Module]] = {
    "ZeroPad2d": lambda: nn.ZeroPad2d((1, 2, 0, 3)),
    "ConstantPad2d": lambda: nn.ConstantPad2d((1, 0, 2, 1), 3.5),
    "ConstantPad2d, negative": lambda: nn.ConstantPad2d((-1, 2, 0, -2), 1.0),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d((1, 2, 3, 0)),
    "ReplicationPad2d": lambda: nn.ReplicationPad2d((1, 2, 3, 0)),
    "CircularPad2d": lambda: nn.CircularPad2d((1, 2, 3, 0)),
}
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU, in place after a layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
    "ReLU6": nn.ReLU6,
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "PReLU": lambda: nn.PReLU(8),
    "ELU": lambda: nn.ELU(0.7),
    "SELU": nn.SELU,
    "CELU": lambda: nn.CELU(0.7),
    "GELU": nn.GELU,
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Sigmoid": nn.Sigmoid,
    "LogSigmoid": nn.LogSigmoid,
    "Tanh": nn.Tanh,
    "Softplus": lambda: nn.Softplus(beta=2, threshold=1),
    "Softsign": nn.Softsign,
    "Softshrink": lambda: nn.Softshrink(0.4),
    "Hardshrink": lambda: nn.Hardshrink(0.4),
    "Tanhshrink": nn.Tanhshrink,
    "Hardtanh": lambda: nn.Hardtanh(-0.5, 0.8),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Threshold": lambda: nn.Threshold(0.1, -2.0),
    "GLU": nn.GLU,
    "Softmax": lambda: nn.Softmax(-1),
    "Softmin": lambda: nn.Softmin(-1),
    "LogSoftmax": lambda: nn.LogSoftmax(0),
}
_DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": nn.Dropout,
    "Dropout1d": lambda: Called(lambda x, inner: inner(x.flatten(2)), inner=nn.Dropout1d()),
    "Dropout2d": nn.Dropout2d,
    "AlphaDropout": nn.AlphaDropout,
    "FeatureAlphaDropout": nn.FeatureAlphaDropout,
}
_RESAMPLINGS: dict[str, Callable[[], nn.Module]] = {
    "Upsample, nearest": lambda: nn.Upsample(scale_factor=2),
    "Upsample, nearest by 1.5": lambda: nn.Upsample(scale_factor=1.5),
    "Upsample, nearest-exact": lambda: nn.Upsample((5, 11), mode="nearest-exact"),
    "Upsample, bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "Upsample, bilinear, aligned": lambda: nn.Upsample(
        (5, 13), mode="bilinear", align_corners=True
    ),
    "Upsample, bicubic": lambda: nn.Upsample((13, 11), mode="bicubic"),
    "Upsample, bicubic, aligned": lambda: nn.Upsample((13, 5), mode="bicubic", align_corners=True),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "PixelUnshuffle": lambda: nn.PixelUnshuffle(2),
    "ChannelShuffle": lambda: nn.ChannelShuffle(2),
}


def _norms() -> Iterator[Entry]:
    kind = "norm"
    for name, build, shape in (
        ("BatchNorm1d", lambda: nn.BatchNorm1d(4), (6, 4)),
        ("BatchNorm1d, three axes", lambda: nn.BatchNorm1d(4), LINE),
        ("BatchNorm2d", lambda: nn.BatchNorm2d(4), PICTURE),
        ("BatchNorm2d, no running mean", _without_statistics, PICTURE),
        ("BatchNorm2d, plain average", lambda: nn.BatchNorm2d(4, momentum=None), PICTURE),
        ("BatchNorm3d", lambda: nn.BatchNorm3d(4), VOLUME),
        ("GroupNorm", lambda: nn.GroupNorm(2, 4), PICTURE),
        ("LayerNorm", lambda: nn.LayerNorm(8), (3, 5, 8)),
        ("LayerNorm, two axes", lambda: nn.LayerNorm((5, 8)), (3, 5, 8)),
        ("LayerNorm, no scale", lambda: nn.LayerNorm(8, elementwise_affine=False), (3, 8)),
        ("LayerNorm, no shift", lambda: nn.LayerNorm(8, bias=False), (3, 8)),
        ("RMSNorm", lambda: nn.RMSNorm(8), (3, 5, 8)),
        ("InstanceNorm1d", lambda: nn.InstanceNorm1d(4), LINE),
        ("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), PICTURE),
        (
            "InstanceNorm2d, statistics",
            lambda: nn.InstanceNorm2d(4, track_running_stats=True),
            PICTURE,
        ),
        ("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), PICTURE),
        ("LocalResponseNorm, power", lambda: nn.LocalResponseNorm(2, 0.1, 0.5, 2.0), PICTURE),
    ):
        yield Entry(kind, name, build, (shape,))
    yield Entry(kind, "BatchNorm2d, eval", lambda: nn.BatchNorm2d(4), (PICTURE,), training=False)
    yield Entry(
        kind, "InstanceNorm2d, eval",
        lambda: nn.InstanceNorm2d(4, track_running_stats=True), (PICTURE,), training=False,
    )  # fmt: skip


def _without_statistics() -> nn.Module:
    return nn.BatchNorm2d(4, track_running_stats=False)


def _recurrent() -> Iterator[Entry]:
    kind, steps = "recurrent", (5, 2, 4)
    for name, build in (
        ("RNN", lambda: nn.RNN(4, 6)),
        ("RNN, ReLU, two layers", lambda: nn.RNN(4, 6, 2, nonlinearity="relu")),
        ("GRU", lambda: nn.GRU(4, 6)),
        ("GRU, batch first, both ways", lambda: nn.GRU(4, 6, 2, True, True, 0.0, True)),
        ("LSTM", lambda: nn.LSTM(4, 6)),
        ("LSTM, two layers, no bias", lambda: nn.LSTM(4, 6, 2, bias=False)),
        ("LSTM, batch first", lambda: nn.LSTM(4, 6, batch_first=True)),
        ("LSTM, both ways", lambda: nn.LSTM(4, 6, 2, bidirectional=True)),
        ("LSTM, projection", lambda: nn.LSTM(4, 6, proj_size=3)),
        ("LSTM, projection, both ways", lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True)),
    ):
        yield Entry(kind, name, build, (steps,))
    yield Entry(kind, "GRU, first state", lambda: nn.GRU(4, 6), (steps, (1, 2, 6)))
    yield Entry(
        kind, "LSTM, first state",
        lambda: Called(lambda x, h, c, inner: inner(x, (h, c)), inner=nn.LSTM(4, 6)),
        (steps, (1, 2, 6), (1, 2, 6)),
    )  # fmt: skip
    yield Entry(kind, "RNNCell", lambda: nn.RNNCell(4, 6), ((2, 4), (2, 6)))
    yield Entry(kind, "GRUCell", lambda: nn.GRUCell(4, 6), ((2, 4), (2, 6)))
    yield Entry(kind, "LSTMCell", lambda: nn.LSTMCell(4, 6), ((2, 4),))


def _shapes() -> Iterator[Entry]:
    kind = "shape and distance"
    yield Entry(kind, "Flatten", nn.Flatten, (PICTURE,))
    yield Entry(kind, "Flatten, some axes", lambda: nn.Flatten(1, 2), (PICTURE,))
    yield Entry(kind, "Unflatten", lambda: nn.Unflatten(1, (2, 2)), (PICTURE,))
    yield Entry(kind, "CosineSimilarity", lambda: nn.CosineSimilarity(1), ((3, 5), (3, 5)))
    yield Entry(kind, "PairwiseDistance", lambda: nn.PairwiseDistance(2), ((3, 5), (3, 5)))
    yield Entry(kind, "PairwiseDistance, p=1", lambda: nn.PairwiseDistance(1), ((3, 5), (3, 5)))
    yield Entry(kind, "cdist", lambda: Called(torch.cdist), ((2, 4, 5), (2, 3, 5)))
    yield Entry(kind, "pdist", lambda: Called(nn.functional.pdist), ((5, 3),))
