"""`bridge/vectors/random.json`: the golden values of key derivation, initial weights, shuffle and dropout.

The values come from the brute force below, which shares nothing with `hybrid.random`: it computes in plain integers
with `%` and `//`, tabulates whole Feistel networks, and rounds to float32 through `struct`. The JavaScript twin is
held to the same file. Write the file anew with `python tests/random/test_golden.py`.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "bridge" / "vectors" / "random.json"
WORD = 2**32

ABOUT = (
    "Key derivation, initial weights, stateless shuffle and dropout masks, all built on Philox 4x32-10.\n"
    "Values: brute force in tests/random/test_golden.py, which shares no code with the library.\n"
    "Use: compare exactly. 'keys': key of stream 'name' under 'seed', two 32-bit words as 8 hex digits. "
    "'initial': float32 bits of the first elements of tensor 'name' (stream 'init/<name>'). "
    "'shuffle': 'samples[i]' is where the permutation of 0..n-1 of stream 'shuffle/<epoch>' sends 'positions[i]'. "
    "'order': the first samples that a run reads over several epochs. "
    "'dropout': 'keep[e]' tells whether element e of sample 'sample' survives at data step 'step' "
    "(stream 'dropout/<site>')."
)

NAMES = [
    "",
    "a",
    "mix",
    "noise",
    "1234567",
    "12345678",
    "123456789",
    "shuffle/0",
    "dropout/layers.0.attention",
    "größe/雪/😀",
]
SEEDS = [0, 1, 1337, 2**32 - 1, 2**32, 2**53 - 1, -1, -2]
TENSORS = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "w"]


def philox(counter, key):
    words = list(counter)
    for turn in range(10):
        keys = [(key[0] + turn * 0x9E3779B9) % WORD, (key[1] + turn * 0xBB67AE85) % WORD]
        high_a, low_a = divmod(0xD2511F53 * words[0], WORD)
        high_b, low_b = divmod(0xCD9E8D57 * words[2], WORD)
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
    return words


def key_of(seed, name):
    text = bytearray(name.encode("utf-8"))
    text.append(128)
    while len(text) % 8:
        text.append(0)
    state = [0, 0, 0, 0]
    seed %= 2**64
    for low, high in struct.iter_unpack("<II", bytes(text)):
        state = philox([state[0] ^ low, state[1] ^ high, state[2], state[3]], [seed % WORD, seed // WORD])
    return state[:2]


def initial(seed, name, count, std):
    key = key_of(seed, "init/" + name)
    factor = std / math.sqrt(2863311530)
    values = []
    for element in range(count):
        block = struct.pack("<4I", *philox([element, 0, 0, 0], key))
        values.append((sum(struct.unpack("<8H", block)) - 262140) * factor)
    return [f"{bits:08x}" for bits in struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *values))]


def mixer(word):
    word ^= word // 2**16
    word = word * 0x7FEB352D % WORD
    word ^= word // 2**15
    word = word * 0x846CA68B % WORD
    return word ^ word // 2**16


def feistel(value, side, key):
    """One pass over the domain of side * side values."""
    left, right = divmod(value, side)
    for round_key in philox([0, 0, 0, 0], key) + philox([1, 0, 0, 0], key):
        left, right = right, left ^ mixer(right ^ round_key) % side
    return left * side + right


def permutation(n, key, positions):
    side = 1
    while side * side < n:
        side *= 2
    table = [feistel(value, side, key) for value in range(side * side)] if side <= 64 else None
    images = []
    for position in positions:
        value = position
        while True:
            value = table[value] if table else feistel(value, side, key)
            if value < n:
                break
        images.append(value)
    return images


def keep(seed, site, step, sample, rate, count):
    key = key_of(seed, "dropout/" + site)
    threshold = math.floor(rate * WORD)
    words = [word for block in range(-(-count // 4)) for word in philox([block, sample, step, 0], key)]
    return [int(word >= threshold) for word in words[:count]]


def document():
    shuffles = []
    for n in (1, 2, 3, 4, 5, 16, 17, 100, 1000, 2**20, 10**9, 2**32, 2**32 + 1, 2**48 - 5, 2**48):
        for seed, epoch in ((1337, 0), (1337, 1), (2**40 + 9, 12)):
            positions = list(range(n)) if n <= 17 else [0, 1, 2, 3, n // 3, n // 2, n - 2, n - 1]
            key = key_of(seed, f"shuffle/{epoch}")
            samples = permutation(n, key, positions)
            shuffles.append({"n": n, "seed": seed, "epoch": epoch, "positions": positions, "samples": samples})
    order = []
    for epoch in range(4):
        order += permutation(6, key_of(42, f"shuffle/{epoch}"), range(6))
    return {
        "about": ABOUT,
        "keys": [
            {"seed": seed, "name": name, "key": [f"{word:08x}" for word in key_of(seed, name)]}
            for seed in SEEDS
            for name in NAMES
        ],
        "initial": [
            {"seed": seed, "name": name, "std": std, "bits": initial(seed, name, 9, std)}
            for seed in (0, 1337, 2**40 + 9)
            for name in TENSORS
            for std in (0.02, 1.0, 0.02 / math.sqrt(8))
        ],
        "shuffle": shuffles,
        "order": {"n": 6, "seed": 42, "samples": order},
        "dropout": [
            {"seed": 1337, "site": site, "step": step, "sample": sample, "rate": rate}
            | {"keep": keep(1337, site, step, sample, rate, 22)}
            for site in ("embed", "layers.0.attention")
            for step, sample in ((1, 0), (1, 3), (70000, 511))
            for rate in (0.1, 0.5)
        ],
    }


def test_the_file_is_what_the_brute_force_gives():
    written = json.loads(FILE.read_text(encoding="utf-8"))
    assert written == document(), "run python tests/random/test_golden.py, and find out why the values changed"
    counts = {section: len(written[section]) for section in ("keys", "initial", "shuffle", "dropout")}
    assert counts == {"keys": 80, "initial": 27, "shuffle": 45, "dropout": 12}


def test_stream_keys_are_golden():
    from hybrid.random.streams import stream_key

    for case in json.loads(FILE.read_text(encoding="utf-8"))["keys"]:
        assert [f"{word:08x}" for word in stream_key(case["seed"], case["name"])] == case["key"]


def test_initial_weights_are_golden_in_both_twins():
    from hybrid.random import initial as plain
    from hybrid.random import initial_numpy

    for case in json.loads(FILE.read_text(encoding="utf-8"))["initial"]:
        count = len(case["bits"])
        expected = struct.pack(f"<{count}I", *(int(bits, 16) for bits in case["bits"]))
        assert plain.normal(case["seed"], case["name"], count, case["std"]).tobytes() == expected
        assert initial_numpy.normal(case["seed"], case["name"], (count,), case["std"]).tobytes() == expected


def test_shuffles_are_golden_in_both_twins():
    import numpy as np

    from hybrid.random import shuffle, shuffle_numpy

    written = json.loads(FILE.read_text(encoding="utf-8"))
    for case in written["shuffle"]:
        n, key = case["n"], shuffle.epoch_key(case["seed"], case["epoch"])
        assert [shuffle.permute(position, n, key) for position in case["positions"]] == case["samples"]
        assert shuffle_numpy.permute(np.array(case["positions"]), n, key).tolist() == case["samples"]
    order = written["order"]
    assert shuffle_numpy.samples(order["seed"], 0, 24, order["n"]).tolist() == order["samples"]
    assert [shuffle.sample(order["seed"], index, order["n"]) for index in range(24)] == order["samples"]


def test_dropout_masks_are_golden_in_the_reference():
    import numpy as np

    from hybrid.backends.reference.kernels import dropout
    from hybrid.random.streams import stream_key

    for case in json.loads(FILE.read_text(encoding="utf-8"))["dropout"]:
        keys = np.array([stream_key(case["seed"], f"dropout/{case['site']}")], dtype=np.uint32)
        sample, step = (np.array([case[name]], dtype=np.uint32) for name in ("sample", "step"))
        dropped = dropout(np.ones((1, 2, 11), np.float32), sample, step, keys, site=0, rate=case["rate"])
        scale = np.float32(1 / (1 - case["rate"]))
        assert (dropped.ravel() == np.array(case["keep"], dtype=np.float32) * scale).all()


if __name__ == "__main__":
    FILE.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
