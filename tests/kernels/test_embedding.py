"""Table look-ups, their gradients, and rows by index."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import embedding
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu


def row_index(ids):
    """The row index that the host makes for each batch: positions sorted by id, and where each id's run starts."""
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    row_starts = np.full(len(ids) + 1, len(ids))
    row_starts[: len(starts)] = starts
    row_ids = np.zeros(len(ids))
    row_ids[: len(unique)] = unique
    return order, row_starts, row_ids, [len(unique)]


@pytest.mark.parametrize(("rows", "columns", "vocabulary"), [(1, 1, 1), (33, 36, 257), (70, 5, 11)])
@pytest.mark.parametrize("slices", [1, 3])
def test_rows_come_from_the_slice_that_holds_them(slices, rows, columns, vocabulary, precision):
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, vocabulary, rows)
    table = stored(rng.normal(size=(vocabulary, columns)), precision)
    y = np.full((rows, columns), 99.0)
    for begin in range(0, vocabulary, -(-vocabulary // slices)):
        part = table[begin : begin + -(-vocabulary // slices)]
        launch = embedding.embedding(rows, columns, row_begin=begin, row_count=len(part), precision=precision)
        (y,) = run(launch, [ids, part, y], precision)
    assert np.array_equal(y, table[ids])


@pytest.mark.parametrize(("rows", "columns", "vocabulary"), [(1, 1, 1), (33, 36, 257), (70, 5, 11)])
@pytest.mark.parametrize("slices", [1, 3])
def test_gradients_of_repeated_ids_add_up_and_to_what_is_there(slices, rows, columns, vocabulary, precision):
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, vocabulary, rows)
    ids[: rows // 2] = ids[0]  # a frequent token
    dy = stored(rng.normal(size=(rows, columns)), precision)
    expected = np.full((vocabulary, columns), 0.25)
    np.add.at(expected, ids, dy)
    got = []
    for begin in range(0, vocabulary, -(-vocabulary // slices)):
        part = np.full((min(-(-vocabulary // slices), vocabulary - begin), columns), 0.25)
        launch = embedding.embedding_grad(rows, columns, row_begin=begin, row_count=len(part), precision=precision)
        got += run(launch, [dy, *row_index(ids), part], precision)
    assert_close(np.concatenate(got), expected)
    untouched = np.setdiff1d(np.arange(vocabulary), ids)
    assert np.all(np.concatenate(got)[untouched] == 0.25)


def test_the_same_gradient_twice_is_the_same_bits():
    rng = np.random.default_rng(0)
    ids, dy = rng.integers(0, 3, 200), rng.normal(size=(200, 8))
    launch = embedding.embedding_grad(200, 8, row_begin=0, row_count=3, precision="f32")
    first, second = (run(launch, [dy, *row_index(ids), np.zeros((3, 8))])[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_rows_are_gathered_by_index_and_gradients_scattered_back(precision):
    rng = np.random.default_rng(5)
    x, index = stored(rng.normal(size=(9, 7)), precision), np.array([8, 0, 3, 3, 1])
    launch = embedding.gather_rows(5, 9, 7, precision=precision)
    (y,) = run(launch, [x, index, np.zeros((5, 7))], precision)
    assert np.array_equal(y, x[index])
    dy = stored(rng.normal(size=(5, 7)), precision)
    expected = np.zeros((9, 7))
    np.add.at(expected, index, dy)
    launch = embedding.scatter_rows(5, 9, 7, precision=precision)
    assert_close(run(launch, [dy, index, np.ones((9, 7))], precision)[0], expected, precision)
