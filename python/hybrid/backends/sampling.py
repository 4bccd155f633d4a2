"""From logits to token ids: the same choice on every backend, given the logits, the seed and the index of the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import GenerateOptions
from hybrid.backends.validate import validate_prompt
from hybrid.errors import ConfigError, NonFiniteError
from hybrid.random.philox import philox4x32
from hybrid.random.streams import stream_key

Logits = NDArray[np.floating[Any]]


def uniform(seed: int, index: int) -> float:
    """A float64 in [0, 1) with 53 random bits: stream "sample" of the seed, block `index`."""
    words = philox4x32((index & 0xFFFFFFFF, index >> 32, 0, 0), stream_key(seed, "sample"))
    return float((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def probabilities(logits: Logits, options: GenerateOptions) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, their probabilities) after temperature, top-k and top-p, most likely first; equal logits in order of id.

    top_k keeps the k most likely ids. top_p then keeps the fewest of the most likely whose probabilities reach p
    (Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751). What is left is
    normalised. Temperature must be above 0 here.
    """
    order = np.argsort(-logits, kind="stable")
    if options.top_k > 0:
        order = order[: options.top_k]
    scaled = logits[order].astype(np.float64) / options.temperature
    weights = np.exp(scaled - scaled[0])
    weights /= weights.sum()
    if options.top_p < 1.0:
        count = int(np.searchsorted(np.cumsum(weights), options.top_p)) + 1
        order, weights = order[:count], weights[:count]
        weights /= weights.sum()
    return order, weights


def sample_token(logits: Logits, options: GenerateOptions, index: int) -> int:
    """The id of generated token number `index` (from 0). temperature 0 takes the largest logit, the lowest id among
    equals."""
    if not np.isfinite(logits).all():
        raise NonFiniteError("the model's logits are not finite: it has diverged, and cannot be sampled from")
    if options.temperature == 0.0:
        return int(np.argmax(logits))
    order, weights = probabilities(logits, options)
    place = int(np.searchsorted(np.cumsum(weights), uniform(options.seed, index), side="right"))
    return int(order[min(place, len(order) - 1)])


def generate(
    prefill: Callable[[list[int]], Logits],
    decode: Callable[[int, int], Logits],
    prompt: Sequence[int],
    options: GenerateOptions,
    *,
    vocabulary_size: int,
    context_length: int,
) -> Iterator[int]:
    """Yield up to `options.tokens` ids that continue `prompt`, ending before one of `options.stop_ids`.

    prefill(ids) fills the key/value caches from row 0 and gives the logits after the last id; decode(id, position)
    appends one. A prompt longer than the context keeps its end; when the context is full, the last half of it is
    prefilled again and generation goes on. Errors: DataContractError for an empty prompt, an id outside the
    vocabulary, or logits that are not finite; ConfigError for settings out of range.
    """
    validate_prompt(prompt, vocabulary_size)
    _check(options)
    known = list(prompt)[-context_length:]
    logits = prefill(known)
    for index in range(options.tokens):
        token = sample_token(logits, options, index)
        if token in options.stop_ids:
            return
        yield token
        if index + 1 == options.tokens:
            return
        if len(known) == context_length:
            known = [*known, token][-max(1, context_length // 2) :]
            logits = prefill(known)
        else:
            logits = decode(token, len(known))
            known.append(token)


def _check(options: GenerateOptions) -> None:
    if options.temperature < 0 or options.top_k < 0 or not 0 < options.top_p <= 1 or options.tokens < 0:
        raise ConfigError(
            f"sampling with tokens {options.tokens}, temperature {options.temperature}, top_k {options.top_k}, top_p "
            f"{options.top_p}: expected the first three to be at least 0, and top_p above 0 and at most 1"
        )
