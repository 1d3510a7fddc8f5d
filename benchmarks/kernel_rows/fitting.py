"""Constants of the kernel models: a small robust fit, shrunk to what other devices say."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from kernel_rows.families import Work
from kernel_rows.rows import FOLDS

Constants = dict[str, float]
Group = tuple[str, str, str, str]

# Of an op with no or few rows: what the step-time model takes for any XLA op
# (src/tpukit/hardware/data/rates.toml).
UNMEASURED: Constants = {"launch": 1.3, "products": 1 / 0.88, "traffic": 1 / 0.87}
UNMEASURED_ROWS = 0.02
PRIOR_ROWS = 0.5  # how many rows the constants of all devices together are worth in a group's fit
ROUNDS = 25
MOST = 6.0  # times the ideal, that any one kind of work is believed to take
MOST_LAUNCH_US = 12.0  # a handful of ops around a kernel, at 1 to 2 us each
SMALL_ERROR = 0.03  # below this an error weighs by its square, above by its size


def fit(works: Sequence[Work], prior: Mapping[str, float] | None = None) -> Constants:
    """Non-negative factors of the terms that make the relative errors small.

    The errors are taken by their size rather than their square (reweighted least squares), so
    that a few rows of another compiler do not move the constants of all others.
    """
    names = list(works[0].terms)
    measured = np.array([work.row.measured_us for work in works])
    shares = np.array([[work.terms[name] for name in names] for work in works]) / measured[:, None]
    scale = np.sqrt((shares**2).mean(axis=0))
    used = scale > 0
    wanted = np.array([(prior or UNMEASURED).get(name, 0.0) for name in names])
    strength = np.sqrt(PRIOR_ROWS if prior else UNMEASURED_ROWS) * np.maximum(scale, 1e-12)
    highest = np.array([MOST_LAUNCH_US if name == "launch" else MOST for name in names])
    weights = np.ones(len(works))
    factors = wanted.copy()
    for _ in range(ROUNDS):
        left = np.concatenate([shares * weights[:, None], np.diag(strength)])[:, used]
        right = np.concatenate([weights, strength * wanted])
        factors[used] = _solve(left, right, highest[used])
        errors = np.abs(shares @ factors - 1)
        weights = 1 / np.sqrt(np.maximum(errors, SMALL_ERROR))
        weights /= weights.mean()
    return {name: float(value) for name, value in zip(names, factors, strict=True)}


def _solve(left: np.ndarray, right: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """Least squares with each factor between zero and its highest."""
    held = np.zeros(len(highest), dtype=bool)
    factors = np.zeros(len(highest))
    while not held.all():
        rest = right - left[:, held] @ highest[held]
        factors[~held] = nnls(np.ascontiguousarray(left[:, ~held]), rest)[0]
        above = factors > highest
        if not above.any():
            break
        held |= above
        factors[held] = highest[held]
    return factors


def fit_groups(works: Iterable[Work]) -> dict[Group, Constants]:
    """Constants of each group, and of each program over all devices and regimes (named "*")."""
    groups: dict[Group, list[Work]] = defaultdict(list)
    pooled: dict[Group, list[Work]] = defaultdict(list)
    for work in works:
        groups[work.group].append(work)
        for key in broader(work.group):
            pooled[key].append(work)
    fitted = {key: fit(members) for key, members in pooled.items()}
    for key, members in groups.items():
        fitted[key] = fit(members, prior=fitted[broader(key)[0]])
    return fitted


def broader(group: Group) -> tuple[Group, Group]:
    """Where a group takes its prior from: the same program on any device, then the op alone."""
    _, op, impl, regime = group
    return ("*", op, impl, regime), ("*", op, impl, "*")


def leave_out(works: Sequence[Work]) -> list[dict[Group, Constants]]:
    """For each fold, the constants fitted without the shapes of that fold."""
    return [fit_groups(w for w in works if w.row.fold != fold) for fold in range(FOLDS)]


def estimate_us(work: Work, constants: Mapping[Group, Constants]) -> float | None:
    """A row's time by the constants of its group, or of the nearest broader one that has any.

    An op nobody measured is estimated by the constants of any XLA op, if those say all of it.
    """
    keys = (work.group, *broader(work.group))
    factors = next((constants[key] for key in keys if key in constants), UNMEASURED)
    if factors is UNMEASURED and not work.terms.keys() <= UNMEASURED.keys():
        return None
    return sum(factors.get(name, 0.0) * value for name, value in work.terms.items())
