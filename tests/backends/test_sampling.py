"""Sampling: a fixed function of logits, settings, seed and index; its frequencies are the stated distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.protocol import GenerateOptions
from hybrid.backends.sampling import generate, probabilities, sample_token, uniform
from hybrid.errors import ConfigError, DataContractError, NonFiniteError

LOGITS = np.log(np.array([0.1, 0.4, 0.3, 0.2], np.float32))
PLAIN = GenerateOptions(temperature=1.0)


def test_uniform_numbers_are_spread_and_repeatable() -> None:
    numbers = np.array([uniform(5, i) for i in range(2000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.02
    assert uniform(5, 7) == numbers[7] != uniform(6, 7)


def test_frequencies_are_the_probabilities() -> None:
    counts = np.bincount([sample_token(LOGITS, PLAIN, i) for i in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.1, 0.4, 0.3, 0.2], atol=0.025)


@pytest.mark.parametrize(
    ("change", "ids", "expected"),
    [
        ({}, [1, 2, 3, 0], [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [1, 2], [4 / 7, 3 / 7]),
        ({"top_k": 99}, [1, 2, 3, 0], [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [1, 2], [4 / 7, 3 / 7]),
        ({"top_p": 0.71}, [1, 2, 3], [4 / 9, 3 / 9, 2 / 9]),
        ({"top_p": 1e-9}, [1], [1.0]),
        ({"top_k": 3, "top_p": 0.4}, [1], [1.0]),
        ({"temperature": 0.5}, [1, 2, 3, 0], [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ],
)
def test_temperature_top_k_and_top_p(change: dict[str, float], ids: list[int], expected: list[float]) -> None:
    order, weights = probabilities(LOGITS, replace(PLAIN, **change))
    assert order.tolist() == ids
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample_token(np.array([0.0, 2.0, 2.0], np.float32), replace(PLAIN, temperature=0.0), 3) == 1
    order, _ = probabilities(np.array([1.0, 2.0, 2.0, 1.0], np.float32), PLAIN)
    assert order.tolist() == [1, 2, 0, 3]


def test_extreme_logits_do_not_overflow_and_bad_ones_are_refused() -> None:
    assert sample_token(np.array([-3e38, 3e38], np.float32), replace(PLAIN, temperature=1e-3), 0) == 1
    for wrong in (np.nan, np.inf):
        with pytest.raises(NonFiniteError, match="diverged"):
            sample_token(np.array([0.0, wrong], np.float32), PLAIN, 0)


class Echo:
    """A model whose next token is the number of tokens it knows, and which notes what it was asked."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.known: list[int] = []
        self.calls: list[tuple[str, object]] = []

    def logits(self) -> np.ndarray:
        return np.eye(self.vocabulary, dtype=np.float32)[len(self.known) % self.vocabulary]

    def prefill(self, ids: list[int]) -> np.ndarray:
        self.known = list(ids)
        self.calls.append(("prefill", tuple(ids)))
        return self.logits()

    def decode(self, token: int, position: int) -> np.ndarray:
        assert position == len(self.known)
        self.known.append(token)
        self.calls.append(("decode", token))
        return self.logits()


def tokens_of(model: Echo, prompt: list[int], context: int = 8, **options: object) -> list[int]:
    settings = replace(GenerateOptions(temperature=0.0), **options)
    return list(
        generate(
            model.prefill, model.decode, prompt, settings, vocabulary_size=model.vocabulary, context_length=context
        )
    )


def test_a_prompt_is_prefilled_once_and_then_each_token_is_decoded() -> None:
    model = Echo(50)
    assert tokens_of(model, [9, 9], tokens=4) == [2, 3, 4, 5]
    assert model.calls == [("prefill", (9, 9)), ("decode", 2), ("decode", 3), ("decode", 4)]


def test_a_full_context_is_prefilled_again_with_its_last_half() -> None:
    model = Echo(50)
    assert tokens_of(model, [9] * 6, tokens=5) == [6, 7, 8, 4, 5]
    assert model.calls == [
        *(("prefill", (9,) * 6), ("decode", 6), ("decode", 7)),
        *(("prefill", (9, 6, 7, 8)), ("decode", 4)),
    ]


def test_a_long_prompt_keeps_its_end_and_a_context_of_one_works() -> None:
    model = Echo(50)
    assert tokens_of(model, list(range(20)), tokens=1) == [8]
    assert model.calls == [("prefill", tuple(range(12, 20)))]
    assert tokens_of(Echo(50), [3], context=1, tokens=3) == [1, 1, 1]


def test_it_ends_before_a_stop_token() -> None:
    assert tokens_of(Echo(50), [9], tokens=10, stop_ids=(4,)) == [1, 2, 3]
    assert tokens_of(Echo(50), [9], tokens=0) == []


@pytest.mark.parametrize(
    "change", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"tokens": -1}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="sampling with"):
        tokens_of(Echo(50), [1], **change)


def test_bad_prompts_are_refused() -> None:
    with pytest.raises(DataContractError, match="no tokens"):
        tokens_of(Echo(50), [])
    with pytest.raises(DataContractError, match="prompt token 0 is 50"):
        tokens_of(Echo(50), [50])
