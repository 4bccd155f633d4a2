"""The tensors of a microbatch in the input arena."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.row_index import row_indices
from hybrid.backends.webgpu.executor import Executor
from hybrid.data.batch import Batch


class InputLayout:
    """Where the batch's tensors lie in the input arena, so that one upload carries them all."""

    def __init__(self, executor: Executor) -> None:
        tensors = {name: t for name, t in executor.plan.tensors.items() if t.arena == "inputs" and "/" not in name}
        self.executor = executor
        self.tensors = tensors
        shape = tensors["ids"].shape
        self.shape = (shape[0], shape[1])
        self.begin = min(t.offset for t in tensors.values())
        self.end = max(t.offset + t.bytes for t in tensors.values())
        others = [
            t
            for n, t in executor.plan.tensors.items()
            if t.arena == "inputs" and n not in tensors and self.begin < t.offset < self.end
        ]
        if others or any(t.page for t in tensors.values()):
            raise RuntimeError("input arena: the batch's tensors must lie side by side on one page")
        self.words = np.zeros((self.end - self.begin) // 4, np.uint32)

    def write(self, batch: Batch) -> None:
        values: dict[str, NDArray[Any]] = {
            "ids": batch.ids,
            "targets": batch.targets,
            "positions": batch.positions,
            "segment_ids": batch.segment_ids,
            "sample_ids": batch.sample_ids,
        }
        values |= row_indices(self.tensors, batch)
        for name, tensor in self.tensors.items():
            begin = (tensor.offset - self.begin) // 4
            self.words[begin : begin + tensor.elements] = values[name].reshape(-1)
        self.executor.write_words("inputs", 0, self.begin, self.words)
