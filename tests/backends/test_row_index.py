"""The row index lists, for each distinct id, its positions in order; the embedding's gradient follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.backends.reference.kernels import embedding_grad
from hybrid.backends.row_index import row_index


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_every_position_appears_once_under_its_id(ids: list[int]) -> None:
    index = row_index(np.array(ids, np.uint32))
    order, starts, unique = index["row_order"], index["row_starts"], index["row_ids"]
    count = int(index["row_count"][0])
    assert unique[:count].tolist() == sorted(set(ids))
    assert sorted(order.tolist()) == list(range(len(ids)))
    for u in range(count):
        places = order[starts[u] : starts[u + 1]].tolist()
        assert places == [i for i, value in enumerate(ids) if value == unique[u]]
    assert (starts[count:] == len(ids)).all()
    assert (unique[count:] == 0).all()
    assert all(array.dtype == np.uint32 for array in index.values())
    assert [index[name].shape for name in index] == [(len(ids),), (len(ids) + 1,), (len(ids),), (1,)]


def test_a_batch_of_any_shape_is_read_row_by_row_under_a_prefix() -> None:
    index = row_index(np.array([[3, 1], [1, 0]], np.uint32), "pos_")
    assert index["pos_row_order"].tolist() == [3, 1, 2, 0]
    assert index["pos_row_ids"].tolist() == [0, 1, 3, 0]
    assert index["pos_row_starts"].tolist() == [0, 1, 3, 4, 4]


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_a_table_is_the_sum_over_the_positions_of_each_id(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 6, (3, 5)).astype(np.uint32)
    dy = draw.standard_normal((3, 5, 4))
    start = draw.standard_normal((7, 4))
    got, expected = start.copy(), start.copy()
    embedding_grad(dy, **row_index(ids), into=got)
    np.add.at(expected, ids.ravel(), dy.reshape(-1, 4))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
