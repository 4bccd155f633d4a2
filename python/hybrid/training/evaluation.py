"""What a run does beside its steps: validation and samples. Neither touches the training state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import exp, isfinite
from typing import Any, Protocol, runtime_checkable

from hybrid.backends.protocol import Evaluation, GenerateOptions, TrainingSession
from hybrid.config.tree import SamplingSection
from hybrid.data.batch import Batch
from hybrid.data.loader import evaluation_batches
from hybrid.data.samples import SampleSet
from hybrid.data.tokenizers import Tokenizer
from hybrid.errors import DataContractError
from hybrid.training.signals import StopFlag

LARGEST_FLOAT = (2 - 2.0**-23) * 2.0**127  # of float32, as in the entries of steps
LARGEST_EXPONENT = 20.0  # a perplexity beyond exp(20) says nothing


@runtime_checkable
class EvaluatesSeveral(Protocol):
    """A session over several processes: it takes `width` batches at a time, and gives what `evaluate` gives for each
    of them."""

    @property
    def width(self) -> int: ...

    def evaluate_all(self, batches: list[Batch]) -> list[Evaluation]: ...


def evaluate(
    session: TrainingSession,
    samples: SampleSet,
    batch_size: int,
    batches: int,
    stop: StopFlag,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any] | None:
    """{loss, perplexity, targetTokens} over `batches` batches spread over the samples, or all of them for 0.

    loss: summed over all targets and divided once, in nats a token. None when a stop was requested meanwhile. With
    overflow = true beside them where a value did not fit its number format: then the loss is not that of the model (and
    the largest float32 in place of one that is not finite).
    progress(what, done, total): before each batch, or group of them.
    """
    loss, targets, overflow, done = 0.0, 0, False, 0
    whole = -(-len(samples) // batch_size)
    for group in _groups(evaluation_batches(samples, batch_size, batches=batches or None), _width(session)):
        if stop.requested:
            return None
        progress("batches", done, min(batches, whole) if batches else whole)
        done += len(group)
        for result in _evaluated(session, [batch for batch in group if batch.target_tokens]):
            loss += result.loss_sum
            targets += result.target_tokens
            overflow |= result.overflow
    if targets == 0:
        raise DataContractError(
            "the validation batches have no target at all: raise evaluation.batches, or hold out more text"
        )
    mean = loss / targets
    if not isfinite(mean):
        mean, overflow = LARGEST_FLOAT, True
    row = {"loss": mean, "perplexity": exp(min(mean, LARGEST_EXPONENT)), "targetTokens": targets}
    return {**row, "overflow": True} if overflow else row


def _width(session: TrainingSession) -> int:
    return session.width if isinstance(session, EvaluatesSeveral) else 1


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group


def _evaluated(session: TrainingSession, batches: list[Batch]) -> list[Evaluation]:
    if isinstance(session, EvaluatesSeveral) and batches:
        return session.evaluate_all(batches)
    return [session.evaluate(batch) for batch in batches]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a prompt. An empty one is the end of a text, or a line, where the tokenizer has no such id.

    DataContractError for a character that the tokenizer does not know.
    """
    ids = tokenizer.encode(prompt).tolist()
    if ids:
        return [int(token) for token in ids]
    return [int(tokenizer.encode("\n")[0]) if tokenizer.end_of_text is None else tokenizer.end_of_text]


def sample(session: TrainingSession, tokenizer: Tokenizer, settings: SamplingSection, stop: StopFlag) -> str | None:
    """The text that continues `settings.prompt`. None when a stop is requested before its end: a part of it would look
    like all that the model has to say."""
    stop_ids = () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    options = GenerateOptions(
        settings.tokens, settings.temperature, settings.top_k, settings.top_p, settings.seed, stop_ids
    )
    stream = tokenizer.stream()
    pieces = []
    for token in session.generate(prompt_ids(tokenizer, settings.prompt), options):
        if stop.requested:
            return None
        if token not in stop_ids:
            pieces.append(stream.push(token))
    return "".join(pieces) + stream.finish()
