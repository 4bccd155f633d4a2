"""`bridge/vectors/ngram.json`: the golden rows of n-gram tables, and that Python, NumPy and torch choose them.

The values come from the brute force below, which shares nothing with the package: plain integers with `%` and `//`.
JavaScript is held to the same file (`web/test/ngram.test.js`), the device kernel to the hash in integers
(`tests/kernels/test_objectives.py`). Write the file anew with `python tests/ops/test_ngram_golden.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybrid.backends.row_index import ngram_buckets, ngram_buckets_after
from hybrid.ops import NO_TOKEN, ngram_bucket

FILE = Path(__file__).resolve().parents[2] / "bridge" / "vectors" / "ngram.json"
WORD = 2**32

ABOUT = (
    "The rows of hashed n-gram tables. Values: brute force in tests/ops/test_ngram_golden.py, which shares no code "
    "with the library.\n"
    "h = mix(seed + order * 0x9e3779b9), then h = mix(h ^ id) for the ids of the n-gram, oldest first, modulo 2^32; "
    "the row is h mod buckets. mix(w): w ^= w >> 16; w *= 0x7feb352d; w ^= w >> 15; w *= 0x846ca68b; w ^= w >> 16. "
    "An id before the row's start, or of another segment than the last one, counts as 0xffffffff.\n"
    "Use: compare exactly. 'ids' and 'segment_ids' are [B][T], 'rows[b][t]' is the row of the n-gram that ends at t."
)


def brute_mix(word):
    word ^= word // 2**16
    word = word * 0x7FEB352D % WORD
    word ^= word // 2**15
    word = word * 0x846CA68B % WORD
    return word ^ word // 2**16


def brute_rows(ids, segments, order, buckets, seed):
    rows = []
    for line, segment in zip(ids, segments, strict=True):
        rows.append([])
        for t in range(len(line)):
            h = brute_mix((seed + order * 0x9E3779B9) % WORD)
            for place in range(t - order + 1, t + 1):
                known = place >= 0 and segment[place] == segment[t]
                h = brute_mix(h ^ (line[place] if known else WORD - 1))
            rows[-1].append(h % buckets)
    return rows


def brute_cases():
    draw = random.Random(20)
    shapes = [(1, 1), (1, 9), (2, 8), (3, 16)]
    tables = [(2, 1, 0), (2, 29_744, 0), (2, 29_744, 1), (3, 1009, 7), (4, 51_699, 0), (4, 2**16, 2**32 - 1)]
    tables += [(5, 2**32 - 1, 123_456_789), (12, 97, 3)]
    for batch, time in shapes:
        for order, buckets, seed in tables:
            vocabulary = draw.choice([2, 256, 50_257, WORD - 1])
            ids = [[draw.randrange(vocabulary) for _ in range(time)] for _ in range(batch)]
            segments = [sorted(draw.randrange(4) for _ in range(time)) for _ in range(batch)]
            yield {
                "order": order,
                "buckets": buckets,
                "seed": seed,
                "ids": ids,
                "segment_ids": segments,
                "rows": brute_rows(ids, segments, order, buckets, seed),
            }


CASES = json.loads(FILE.read_text(encoding="utf-8"))["cases"] if FILE.exists() else []


def u32(values):
    return np.array(values, np.uint32)


def settings(case):
    return {name: case[name] for name in ("order", "buckets", "seed")}


def test_the_file_holds_what_the_brute_force_gives():
    assert len(CASES) == 32
    assert list(brute_cases()) == CASES


def test_numpy_and_python_choose_the_golden_rows():
    for case in CASES:
        rows = ngram_buckets(u32(case["ids"]), u32(case["segment_ids"]), **settings(case))
        assert rows.dtype == np.uint32
        assert rows.tolist() == case["rows"]
        gram = [NO_TOKEN] * (case["order"] - 1) + [case["ids"][0][0]]
        assert ngram_bucket(gram, case["buckets"], case["seed"]) == case["rows"][0][0]


@pytest.mark.torch
def test_torch_chooses_the_golden_rows():
    import torch

    from hybrid.backends.torch.objective_ops import ngram_buckets as in_torch

    for case in CASES:
        ids, segments = torch.tensor(case["ids"]), torch.tensor(case["segment_ids"])
        assert in_torch(ids, segments, **settings(case)).tolist() == case["rows"]


@pytest.mark.parametrize("pieces", [[1] * 9, [3, 6], [8, 1]])
def test_a_sequence_in_pieces_has_the_rows_of_the_whole(pieces):
    ids = u32([[5, 3, 5, 5, 2, 9, 5, 3, 5]])
    table = {"order": 4, "buckets": 1009, "seed": 2}
    whole = ngram_buckets(ids, np.ones_like(ids), **table)
    known = np.full((1, 3), NO_TOKEN, np.uint32)
    rows = []
    for piece in np.split(ids, np.cumsum(pieces)[:-1], axis=1):
        rows.append(ngram_buckets_after(piece, known[:, -3:], **table))
        known = np.concatenate([known, piece], axis=1)
    assert np.concatenate(rows, axis=1).tolist() == whole.tolist()


def test_a_document_chooses_the_same_rows_wherever_it_is_packed():
    table = {"order": 3, "buckets": 1009, "seed": 0}
    document, other = [7, 7, 1, 4], [4, 1, 7]
    alone = ngram_buckets(u32([document]), u32([[1] * 4]), **table)[0].tolist()
    packed = ngram_buckets(u32([document + other + document]), u32([[1] * 4 + [2] * 3 + [3] * 4]), **table)[0].tolist()
    assert packed[:4] == packed[7:] == alone


def test_order_matters_and_rows_are_used_evenly():
    assert len({ngram_bucket(gram, 2**32, 0) for gram in ([1, 2], [2, 1], [NO_TOKEN, 1], [0, 1, 2])}) == 4
    pairs = [(a, b) for a in range(256) for b in range(256)]
    assert len({ngram_bucket(pair, 2**32, 0) for pair in pairs}) > len(pairs) - 5
    counts = Counter(ngram_bucket(pair, 256, 0) for pair in pairs)
    assert len(counts) == 256
    chi_squared = sum((count - 256) ** 2 / 256 for count in counts.values())
    assert 160 < chi_squared < 360  # 255 degrees of freedom: 255 +- 4.6 standard deviations of 22.6


def test_another_seed_collides_elsewhere():
    pairs = [(a, b) for a in range(40) for b in range(40)]
    first, second = ([ngram_bucket(pair, 500, seed) for pair in pairs] for seed in (0, 1))
    together = sum(a == first[0] and b == second[0] for a, b in zip(first, second, strict=True))
    assert first.count(first[0]) > 1
    assert together == 1


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in brute_cases())
    FILE.write_text(f'{{"about": {json.dumps(ABOUT)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
