"""Decoding with a key/value cache gives the logits of the whole sequence, at each position and however it is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.reference.executor import Executor
from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.plan.programs import decode_graph
from models.small import LLAMA, LOOPED, MODELS, Array, logits, make_batch, random_weights


class Decoder:
    """A cache and the programs that fill it."""

    def __init__(self, cfg: ModelConfig, weights: dict[str, Array], cache_length: int) -> None:
        self.cfg, self.weights, self.cache_length = cfg, weights, cache_length
        self.caches = Executor(decode_graph(cfg, 1, cache_length), "f64").new_caches()

    def __call__(self, ids: Array, start: int, last: int | None = None) -> Array:
        executor = Executor(decode_graph(self.cfg, len(ids), self.cache_length), "f64")
        inputs = {
            "ids": ids[None],
            "positions": np.arange(start, start + len(ids))[None],
            "start": np.array([start]),
            "last": np.array([len(ids) - 1 if last is None else last]),
        }
        return executor.run(inputs, self.weights, caches=self.caches).outputs["logits"]


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_token_by_token_equals_the_whole_sequence(cfg: ModelConfig) -> None:
    weights = random_weights(cfg)
    ids = np.random.default_rng(2).integers(0, cfg.vocabulary_size, 14)
    expected = logits(cfg, weights, make_batch(ids[None]))[0]
    decode = Decoder(cfg, weights, 16)
    for t in range(len(ids)):
        np.testing.assert_allclose(decode(ids[t : t + 1], t), expected[t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_a_prefill_in_pieces_equals_the_whole_sequence(cfg: ModelConfig) -> None:
    weights = random_weights(cfg)
    ids = np.random.default_rng(3).integers(0, cfg.vocabulary_size, 14)
    expected = logits(cfg, weights, make_batch(ids[None]))[0]
    decode = Decoder(cfg, weights, 20)
    for start, end in ((0, 9), (9, 13), (13, 14)):
        np.testing.assert_allclose(decode(ids[start:end], start), expected[end - 1], rtol=1e-10, atol=1e-12)


def test_padding_after_the_last_token_does_not_matter() -> None:
    weights = random_weights(LLAMA)
    ids = np.arange(10) * 5 % LLAMA.vocabulary_size
    padded, exact = Decoder(LLAMA, weights, 16), Decoder(LLAMA, weights, 16)
    np.testing.assert_allclose(padded(np.append(ids, [7, 7, 7]), 0, last=9), exact(ids, 0), rtol=1e-12)
    np.testing.assert_allclose(padded(ids[:1], 10), exact(ids[:1], 10), rtol=1e-12)


def test_a_looped_model_has_a_cache_for_each_pass() -> None:
    names = list(decode_graph(LOOPED, 1, 8).caches)
    assert len(names) == 2 * len(LOOPED.schedule) == len(set(names))
    assert "layers.1.pass2.value" in names


@pytest.mark.parametrize(("tokens", "cache"), [(5, 4), (1, 25)])
def test_a_cache_that_cannot_be_is_refused(tokens: int, cache: int) -> None:
    with pytest.raises(ConfigError, match=f"decoding {tokens} tokens with a cache of {cache} rows"):
        decode_graph(replace(LLAMA, context_length=24), tokens, cache)
