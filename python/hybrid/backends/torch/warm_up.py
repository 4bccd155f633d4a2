"""Running what is not training yet: microbatches of nothing, for compilers and allocators, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid.backends.torch.modules import Root, Unit
from hybrid.backends.torch.ops import TorchOps
from hybrid.data.batch import Batch
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Inputs, layer


def empty_batches(shape: tuple[int, int]) -> list[Batch]:
    """Microbatches of zeros: one whose rows are one segment, and if it can be one whose rows are two: attention
    differs."""
    zeros, segments = np.zeros(shape, np.uint32), np.ones(shape, np.uint32)
    rows = np.arange(shape[0], dtype=np.uint32)
    batches = [Batch(zeros, zeros, zeros, segments, rows)]
    if shape[1] > 1:
        packed = segments.copy()
        packed[:, -1] = 2
        batches.append(Batch(zeros, zeros, zeros, packed, rows))
    return batches


def try_layer(ops: TorchOps, unit: Unit, index: int, kind: torch.dtype, inputs: Inputs, cfg: ModelConfig) -> None:
    """Forward and backward of one layer on zeros, with matrices of type `kind`. The unit's own parameters may be
    meta tensors."""

    def zeros(shape: Any, dtype: torch.dtype) -> Tensor:
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=ops.device))

    parameters = unit.tensors(lambda p: zeros(p.shape, kind if p.dim() > 1 else torch.float32))

    def call(function: Any, inside: Any, arguments: Any) -> Any:
        return unit.run(function, inside, parameters, arguments)

    label = f"layers.{index}"
    x = zeros((*inputs.ids.shape, cfg.width), ops.act) + 0.0
    ops.block(label, layer, call, x, inputs, cfg, label).sum().backward()


@contextmanager
def kept_for_backward(root: Root) -> Iterator[list[int]]:
    """The bytes, in a list of one, that the forward parts inside keep for their backward parts beside weights."""
    weights: set[int] = set()  # storages of this rank's, or gathered for a time
    kept: dict[int, int] = {}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    def notice(unit: nn.Module, *_: Any) -> None:
        weights.update(p.untyped_storage()._cdata for p in unit.parameters() if not isinstance(p, DTensor))

    hooks = [unit.register_forward_pre_hook(notice) for unit in root.units().values()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    for hook in hooks:
        hook.remove()
    total[0] = sum(size for storage, size in kept.items() if storage not in weights)
