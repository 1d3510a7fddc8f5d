"""Views against numpy's own: the same elements, by their numbers."""

import numpy as np
import pytest

from tpukit.models.stored.view import View, axes_of

SHAPE = (3, 4, 5, 2)


def elements(view):
    """The numbers of a view's elements, by the rule it states."""
    found = np.full((), view.offset)
    for size, stride in zip(view.shape, view.strides, strict=True):
        found = found[..., None] + np.arange(size) * stride
    return found


@pytest.mark.parametrize(
    ("of_view", "of_array"),
    [
        (lambda v: v.transposed((2, 0, 3, 1)), lambda a: a.transpose(2, 0, 3, 1)),
        (lambda v: v.sliced((1, 0, 1, 0), (2, 4, 5, 2)), lambda a: a[1:2, :, 1:, :]),
        (
            lambda v: v.sliced((0, 0, 0, 0), (3, 4, 5, 2), (2, 1, 3, 1)),
            lambda a: a[::2, :, ::3, :],
        ),
        (lambda v: v.reshaped((12, 10)), lambda a: a.reshape(12, 10)),
        (lambda v: v.reshaped((1, 3, 2, 2, 5, 1, 2)), lambda a: a.reshape(1, 3, 2, 2, 5, 1, 2)),
        (lambda v: v.at(2), lambda a: a[2]),
        (
            lambda v: v.sliced((1, 0, 0, 0), (2, 4, 5, 2)).squeezed((0,)).reshaped((20, 2)),
            lambda a: a[1].reshape(20, 2),
        ),
        (
            lambda v: v.transposed((1, 2, 3, 0)).reshaped((20, 2, 3)),
            lambda a: a.transpose(1, 2, 3, 0).reshape(20, 2, 3),
        ),
        (
            lambda v: v.at(0).expanded((1, 4, 5, 1, 2), (1, 2, 4)),
            lambda a: a[0][None, :, :, None],
        ),
    ],
)
def test_a_view_names_the_elements_numpy_moves(of_view, of_array):
    array = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    assert np.array_equal(elements(of_view(View.whole(SHAPE))), of_array(array))


def test_what_would_move_elements_is_no_view():
    assert View.whole((4, 6)).transposed((1, 0)).reshaped((24,)) is None
    assert View.whole((4, 6)).expanded((2, 4, 6), (1, 2)) is None


def test_axes_of_a_parameter():
    assert axes_of(20, 2, SHAPE) == (1, 2)
    assert axes_of(5, 2, SHAPE) == (2,)
    assert axes_of(2, 2, SHAPE) is None  # a piece of axis 2
    assert axes_of(3, 7, SHAPE) is None
