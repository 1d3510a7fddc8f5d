"""Functions of tensors that people write their models with."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional

from .entry import Called, Draw, Entry, distinct, positive, whole

PICTURE = (2, 4, 8, 8)


def functions() -> Iterator[Entry]:
    """Yield every function."""
    rows: dict[str, tuple[Callable[..., object], tuple[Draw, ...]]] = {
        "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 3, 4), (2, 5, 4))),
        "einsum, trace and sum": (lambda a: torch.einsum("bii->b", a), ((2, 3, 3),)),
        "bmm, baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b), ((2, 3, 4), (2, 4, 5), (2, 3, 5))),
        "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5), ((3, 4), (4, 5), (5,))),
        "gather": (lambda x, i: x.gather(1, i), ((3, 5), whole(5, 3, 4))),
        "scatter": (lambda x: torch.zeros(3, 7).scatter(1, x.argsort(1), x), (distinct(3, 5),)),
        "scatter_add": (
            lambda x, i: torch.zeros(3, 7).scatter_add(1, i, x),
            ((3, 5), whole(7, 3, 5)),
        ),
        "index_select": (lambda x, i: x.index_select(1, i), ((3, 5), whole(5, 4))),
        "index_add": (lambda x, i: torch.zeros(4, 5).index_add(0, i, x), ((3, 5), whole(4, 3))),
        "index by tensors": (lambda x, i: x[i, :, 1:3], ((3, 5, 4), whole(3, 4))),
        "index assignment": (_assigned, ((3, 5),)),
        "take_along_dim": (lambda x: x.take_along_dim(x.argsort(1), 1), (distinct(3, 5),)),
        "sort": (lambda x: torch.sort(x, descending=True), (distinct(3, 5),)),
        "topk": (lambda x: x.topk(3, dim=0), (distinct(5, 4),)),
        "argmax, max along": (lambda x: (*x.max(1), x.argmax()), (distinct(3, 5),)),
        "median": (lambda x: x.median(1), (distinct(3, 5),)),
        "kthvalue": (lambda x: x.kthvalue(2, 1), (distinct(3, 5),)),
        "amax, amin": (lambda x: x.amax((0, 1)) - x.amin((0, 1)), (distinct(3, 5, 2),)),
        "cumsum, cumprod": (lambda x: x.cumsum(1) + x.cumprod(0), ((3, 5),)),
        "cummax": (lambda x: x.cummax(1), (distinct(3, 5),)),
        "logsumexp, logcumsumexp": (lambda x: (x.logsumexp(1), x.logcumsumexp(1)), ((3, 5),)),
        "std, var": (lambda x: x.std(1) + x.var(1, correction=0), ((3, 5),)),
        "norm, normalize": (lambda x: functional.normalize(x, dim=1) * x.norm(dim=0), ((3, 5),)),
        "prod": (lambda x: x.prod(1), ((3, 5),)),
        "where, clamp, masked_fill": (
            lambda x: torch.where(x > 0, x.clamp(0.1, 0.9), x.masked_fill(x < -1, 2.0)),
            ((3, 5),),
        ),
        "tril, triu, diagonal": (lambda x: x.tril() @ x.triu(1) + x.diagonal().diag(), ((4, 4),)),
        "roll, flip, repeat_interleave": (
            lambda x: x.roll(2, 1).flip(0).repeat_interleave(2, 1),
            ((3, 5),),
        ),
        "split, chunk, stack, tile": (
            lambda x: torch.stack(x.split([2, 2, 2], 1)[:2]).tile(2) + x.chunk(3, 1)[0].tile(2),
            ((3, 6),),
        ),
        "as_strided by unfold": (lambda x: x.unfold(1, 3, 2).sum(0), ((3, 9),)),
        "expand, movedim, squeeze": (
            lambda x: x.unsqueeze(1).expand(-1, 4, -1).movedim(1, 2).squeeze(),
            ((3, 5),),
        ),
        "one_hot": (lambda x, i: functional.one_hot(i, 5).to(x.dtype) @ x, ((5, 4), whole(5, 3))),
        "embedding by hand": (lambda x, i: functional.embedding(i, x), ((5, 4), whole(5, 3))),
        "bucketize": (lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)) * x, ((3, 5),)),
        "exp, log, sqrt, pow": (lambda x: x.exp() + x.log() + x.sqrt() + x**1.7, (positive(3, 5),)),
        "erf, lgamma, atan2": (
            lambda x, y: x.erf() + x.lgamma() + x.atan2(y),
            (positive(3, 5),) * 2,
        ),
        "floor, round, remainder, fmod": (
            lambda x: x.floor() + x.round() + x.remainder(0.7) + x.fmod(0.7),
            ((3, 5),),
        ),
        "cross, outer, kron": (
            lambda a, b: (torch.linalg.cross(a, b), torch.kron(a, b)),
            ((2, 3),) * 2,
        ),
        "inverse, det, solve": (
            lambda a, b: torch.linalg.solve(a + 4 * torch.eye(3), b) + torch.linalg.det(a),
            ((3, 3), (3, 2)),
        ),
        "cholesky": (lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3)), ((3, 3),)),
        "fft": (lambda x: torch.fft.rfft(x).abs(), ((3, 8),)),
        "interpolate, linear": (
            lambda x: functional.interpolate(x, size=9, mode="linear"),
            ((2, 4, 6),),
        ),
        "interpolate, trilinear": (
            lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"),
            ((1, 2, 3, 3, 3),),
        ),
        "interpolate, area": (
            lambda x: functional.interpolate(x, size=(3, 5), mode="area"),
            (PICTURE,),
        ),
        "interpolate, antialias": (
            lambda x: functional.interpolate(x, size=(3, 5), mode="bilinear", antialias=True),
            (PICTURE,),
        ),
        "grid_sample": (_sampled("bilinear", "zeros", False), (PICTURE, (2, 5, 3, 2))),
        "grid_sample, nearest, border": (
            _sampled("nearest", "border", True),
            (PICTURE, (2, 5, 3, 2)),
        ),
        "grid_sample, bicubic, reflection": (
            _sampled("bicubic", "reflection", False),
            (PICTURE, (2, 5, 3, 2)),
        ),
        "affine_grid": (
            lambda t: functional.affine_grid(t, [2, 3, 4, 5], align_corners=False),
            ((2, 2, 3),),
        ),
        "pad, replicate, three axes": (
            lambda x: functional.pad(x, (1, 2, 0, 1, 2, 1), mode="replicate"),
            ((1, 2, 3, 3, 3),),
        ),
    }
    for name, (function, draws) in rows.items():
        yield Entry("function", name, lambda function=function: Called(function), draws)


def _assigned(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[1:, ::2] = 2 * x[1:, ::2]
    out[0] += 1
    return out


def _sampled(mode: str, padding: str, align: bool) -> Callable[..., torch.Tensor]:
    return lambda x, grid: functional.grid_sample(x, grid, mode, padding, align)
