"""Temporaries share memory exactly when their lifetimes allow it."""

import random
from itertools import pairwise

import pytest

from hybrid.errors import LimitExceeded
from hybrid.plan.memory import ALIGNMENT, Temporary, colour, pack

PAGE = 1 << 20


def disjoint(a: Temporary, b: Temporary) -> bool:
    return a.page != b.page or a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset


def alive_together(a: Temporary, b: Temporary) -> bool:
    return a.first <= b.last and b.first <= a.last


def test_tensors_alive_together_never_overlap_and_none_straddles_a_page():
    rng = random.Random(1)
    for _ in range(30):
        temporaries = []
        for i in range(60):
            first = rng.randrange(100)
            temporaries.append(Temporary(f"t{i}", rng.randrange(1, 200_000), first, first + rng.randrange(20)))
        pages = pack(temporaries, PAGE)
        for i, a in enumerate(temporaries):
            assert a.offset % ALIGNMENT == 0
            assert a.offset + a.bytes <= pages[a.page] <= PAGE
            for b in temporaries[:i]:
                assert disjoint(a, b) or not alive_together(a, b)


def test_a_chain_of_equal_tensors_needs_room_for_two():
    chain = [Temporary(f"t{i}", 1024, i, i + 1) for i in range(50)]
    assert pack(chain, PAGE) == [2048]


def test_a_tensor_larger_than_a_page_is_refused_by_name():
    with pytest.raises(LimitExceeded, match="too_big"):
        pack([Temporary("too_big", PAGE + 1, 0, 1)], PAGE)


def test_a_chain_alternates_between_the_colours():
    chain = [Temporary(f"t{i}", 1024, i, i + 1) for i in range(10)]
    colour([(t, [chain[i - 1]] if i else []) for i, t in enumerate(chain)], 2)
    assert all(a.colour != b.colour for a, b in pairwise(chain))
