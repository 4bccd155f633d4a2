"""How much memory a run needs at least, from closed formulas: so that a size that nothing can hold is refused before
minutes of set-up, by the name of its setting.

Every figure is a lower bound. What fits exactly is for the device to say, when the run is set up.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config.resolve import model_config, resolved_model
from hybrid.config.tree import RunConfig
from hybrid.errors import LimitExceeded
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters

STATE_BYTES = 16  # a parameter: its weight, gradient and two moments in float32
SAVED_BYTES = 12  # the same without the gradient: what a save copies to this machine's memory
TOKEN_BYTES = 16  # a token of a batch on the host: id, target, position and segment
MOST_DEVICE_BYTES = 2**40  # 1 TiB: no single device has as much


@dataclass(frozen=True)
class Size:
    """Bytes at least. state: weights, gradients and moments. activations: of one microbatch. scores: of the attention
    of one head, which only the reference backend makes as a whole. saved: of a copy of the state on the host. batches:
    the tokens of the steps that are prepared ahead."""

    parameters: int
    activations: int
    scores: int
    batches: int

    @property
    def state(self) -> int:
        return self.parameters * STATE_BYTES

    @property
    def saved(self) -> int:
        return self.parameters * SAVED_BYTES

    @property
    def device(self) -> int:
        return self.state + self.activations


def size_of(config: RunConfig, vocabulary_size: int = 1) -> Size:
    """The size of a run. `config` may be unresolved; then `vocabulary_size` is what the tokenizer needs at least."""
    data = config.data
    model = model_config(config.model_copy(update={"model": resolved_model(config, vocabulary_size)}))
    rows = (data.microbatch_size or data.batch_size) * data.sequence_length
    item = 4 if config.precision.type == "f32" else 2
    steps_ahead = 1 + min(data.prefetch, config.run.steps or data.prefetch)
    return Size(
        parameters=count_parameters(model),
        scores=model.heads // max(model.kv_heads, 1) * data.sequence_length**2 * 4,
        activations=rows * kept_a_row(model, config.backend.recompute is True) * item,
        batches=data.batch_size * data.sequence_length * steps_ahead * TOKEN_BYTES,
    )


def kept_a_row(model: ModelConfig, recompute: bool) -> int:
    """Elements that the forward part keeps for the backward part, for each token: the input of each block, and inside
    it queries, values, the output of attention, and the hidden layer twice."""
    inside = 0 if recompute else 2 * model.heads * model.head_width + 2 * model.feed_forward_width
    return len(model.schedule) * (model.width + inside)


def check_size(
    config: RunConfig, backend: str, memory: int | None, vocabulary_size: int = 1, processes: int = 1
) -> None:
    """LimitExceeded for a run that cannot fit, whatever the device.

    backend: `reference` keeps all of it in this machine's memory; of the others, the state is copied there at each
    save. memory: of this machine, in bytes; None: not known. processes: that may share the state.
    """
    size = size_of(config, vocabulary_size)
    here = f"this machine has {_text(memory)}" if memory is not None else ""
    room = MOST_DEVICE_BYTES if memory is None else memory
    if size.batches > room:
        raise LimitExceeded(
            f"data.batchSize = {config.data.batch_size} samples of data.sequenceLength = {config.data.sequence_length} "
            f"tokens, with data.prefetch = {config.data.prefetch}, take {_more_than(room, size.batches)} of memory "
            f"before they are on any device; {here or 'expected at most ' + _text(room)}: use smaller batches"
        )
    on_host = size.device + size.scores if backend == "reference" else size.saved // processes
    if memory is not None and on_host > memory:
        what = "training on the CPU takes" if backend == "reference" else "a save of weights and moments takes"
        raise LimitExceeded(
            f"{_largest(config, size, backend)}: {what} at least {_more_than(memory, on_host)}, and {here}"
        )
    if size.state // processes + size.activations > MOST_DEVICE_BYTES:
        raise LimitExceeded(
            f"{_largest(config, size, backend)}: training takes at least "
            f"{_more_than(MOST_DEVICE_BYTES, size.device)} of device memory; "
            f"expected at most {_text(MOST_DEVICE_BYTES)}"
        )


def _largest(config: RunConfig, size: Size, backend: str) -> str:
    """The settings that most of the memory goes to, their values, and what to do about them."""
    model, data = config.model, config.data
    if backend == "reference" and size.scores > size.device:
        return (
            f"data.sequenceLength = {data.sequence_length}: the attention of one head compares all pairs of tokens, "
            f"{_text(size.scores)} of scores on the CPU (use shorter samples, or a GPU)"
        )
    if size.activations > size.state and (backend == "reference" or size.device > MOST_DEVICE_BYTES):
        microbatch = data.microbatch_size or data.batch_size
        return (
            f"data.microbatchSize = {microbatch} samples of data.sequenceLength = {data.sequence_length} tokens keep "
            f"{_text(size.activations)} of activations (use a smaller microbatch, shorter samples, or "
            f"backend.recompute = true)"
        )
    names = {
        "vocabularySize": model.vocabulary_size, "contextLength": model.context_length if model.positions == "learned"
        else None, "layers": model.layers, "width": model.width, "heads": model.heads, "headWidth": model.head_width,
        "feedForwardWidth": model.feed_forward_width,
    }  # fmt: skip
    shape = ", ".join(f"model.{name} = {value}" for name, value in names.items() if value is not None)
    return f"{shape} make {size.parameters:,} parameters (use fewer layers, smaller widths or a smaller vocabulary)"


def _more_than(most: int, count: int) -> str:
    """The larger of two counts, told so that they differ."""
    return _text(count) if _text(count) != _text(most) else f"{count - most:,} bytes more than {_text(most)}"


def _text(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
