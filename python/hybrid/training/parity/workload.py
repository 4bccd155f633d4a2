"""What the parity contract is measured on: small models, awkward batches.

Every step has two microbatches with different numbers of targets, rows packed from several documents with restarting
positions, a padded tail, dropout, z-loss, weight decay, a moving learning rate and active clipping. All of it follows
from the seed through the named streams, so any runtime in any language can make the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import StepInfo
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings, SchedulerSettings
from hybrid.random.philox_numpy import philox4x32
from hybrid.random.streams import stream_key

VOCABULARY = 96
SEQUENCE_LENGTH = 32
GLOBAL_BATCH = 4

_COMMON = ModelConfig(
    vocabulary_size=VOCABULARY,
    context_length=SEQUENCE_LENGTH,
    layers=2,
    width=64,
    heads=4,
    feed_forward_width=160,
    dropout=0.1,
)
MODELS: dict[str, ModelConfig] = {
    "gpt2": replace(
        _COMMON,
        feed_forward_width=256,
        norm="layer_norm",
        positions="learned",
        activation="gelu",
        bias=True,
        tied_embeddings=True,
    ),
    "llama": replace(_COMMON, kv_heads=2),
    "looped": replace(_COMMON, schedule=(0, 1, 0, 1), tied_embeddings=True, window=12),
}

OPTIMIZER = OptimizerSettings(
    type="adamw",
    lr=3e-3,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    scheduler=SchedulerSettings(enabled=True, type="cosine", warmup_steps=3, total_steps=150),
)

# A z-loss this large makes the f16 gradients of one step overflow on every device, while its loss stays a number.
OVERFLOWING_Z_LOSS = 1e12


@dataclass(frozen=True)
class Workload:
    """One training run to compare: everything that decides its numbers.

    microbatch_size: rows of one `accumulate`; it must divide the global batch. overflow_step: the data step whose f16
    gradients are made to overflow, 0 for none.
    """

    name: str
    model: ModelConfig
    steps: int
    precision: str = "f32"
    optimizer: OptimizerSettings = OPTIMIZER
    max_grad_norm: float = 0.25
    seed: int = 20_260
    z_loss: float = 1e-4
    microbatch_size: int = GLOBAL_BATCH // 2
    overflow_step: int = 0

    @property
    def loss_scaling(self) -> dict[str, object]:
        """On in mixed precision, and growing within ten steps."""
        return {"enabled": self.precision == "mixed-f16", "initialScale": 256.0, "growthInterval": 4}

    def microbatches(self, data_step: int) -> list[Batch]:
        whole = global_batch(self.seed, data_step)
        size = self.microbatch_size
        return [_rows(whole, start, start + size) for start in range(0, GLOBAL_BATCH, size)]

    def info(self, data_step: int) -> StepInfo:
        z_loss = OVERFLOWING_Z_LOSS if data_step == self.overflow_step else self.z_loss
        targets = global_batch(self.seed, data_step).target_tokens
        return StepInfo(data_step, targets, GLOBAL_BATCH // self.microbatch_size, z_loss)


def workloads(steps: int, precision: str = "f32") -> Iterator[Workload]:
    """One for each model."""
    for name, model in MODELS.items():
        yield Workload(name, model, steps, precision)


def global_batch(seed: int, data_step: int) -> Batch:
    """The four rows of one step, as uint32 [4, 32]. Row 0 is one document; the others are packed from two or three; row
    2 ends in padding; row 3 has targets in its last document only, so that the second microbatch has fewer."""
    shape = (GLOBAL_BATCH, SEQUENCE_LENGTH)
    cuts = _words(seed, "parity/cuts", data_step, 4)
    ids = np.zeros(shape, np.uint32)
    targets = np.full(shape, IGNORE, np.uint32)
    positions = np.zeros(shape, np.uint32)
    segments = np.zeros(shape, np.uint32)
    for row in range(GLOBAL_BATCH):
        first, second = 6 + int(cuts[row] % 8), 18 + int(cuts[row] // 8 % 8)
        end = SEQUENCE_LENGTH - 5 if row == 2 else SEQUENCE_LENGTH
        bounds = {0: [0, end], 1: [0, second, end]}.get(row, [0, first, second, end])
        for segment, (start, stop) in enumerate(pairwise(bounds), 1):
            document = _document(seed, data_step * 16 + row * 4 + segment, stop - start + 1)
            ids[row, start:stop] = document[:-1]
            positions[row, start:stop] = np.arange(stop - start)
            segments[row, start:stop] = segment
            if row < 3 or stop == end:
                targets[row, start : stop - 1] = document[1:-1]
                if stop == end and row != 2:
                    targets[row, stop - 1] = document[-1]
    return Batch(ids, targets, positions, segments, np.arange(GLOBAL_BATCH, dtype=np.uint32))


def _document(seed: int, index: int, length: int) -> NDArray[np.uint32]:
    """Tokens that can be learnt but not foreseen: three times in four the next one follows from the last."""
    words = _words(seed, "parity/documents", index, length)
    tokens = words % VOCABULARY
    for t in range(1, length):
        if words[t] >> 8 & 3:
            tokens[t] = (tokens[t - 1] * 5 + 17) % VOCABULARY
    return tokens


def _words(seed: int, stream: str, index: int, count: int) -> NDArray[np.uint32]:
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1] = index
    return philox4x32(counters, stream_key(seed, stream)).reshape(-1)[:count]


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(
        batch.ids[start:stop],
        batch.targets[start:stop],
        batch.positions[start:stop],
        batch.segment_ids[start:stop],
        batch.sample_ids[start:stop],
    )
