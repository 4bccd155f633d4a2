"""Decoding: the same model on one sequence, with the keys and values of earlier calls in caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid.backends.torch import attention
from hybrid.backends.torch.objective_ops import ngram_buckets_after
from hybrid.backends.torch.ops import TorchOps
from hybrid.ops import Result


class DecodeOps(TorchOps):
    """`ops` whose attention keeps `length` rows of keys and values for each of its calls in a model.

    Set `start`, the absolute position of a call's first token, before each run of the model, and `previous_ids` (int64
    [1, P], the latest last) for models with n-gram tables.
    """

    def __init__(self, act: torch.dtype, device: torch.device, length: int) -> None:
        super().__init__(act, device)
        self.length = length
        self.start = 0
        self.previous_ids = torch.empty((1, 0), dtype=torch.int64, device=device)
        self._caches: dict[str, tuple[Tensor, Tensor]] = {}
        self._calls = 0

    def block(self, label: str, function: Callable[..., Result], parameters: Any, *arguments: Any) -> Result:
        self.where, self._calls = label, 0
        return parameters(function, self, arguments)  # type: ignore[no-any-return]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, *, scale: float, window: int | None = None
    ) -> Tensor:
        self._check_attention(q, k, v, scale, window)
        self._check("attention", segment_ids is None, "decoding reads one sequence and takes no segment_ids", q)
        time, last = q.shape[1], self.start + q.shape[1]
        self._check("attention", q.shape[0] == 1 and last <= self.length, f"at most {self.length} rows of batch 1", q)
        keys, values = self._cache(k)
        keys[:, self.start : last], values[:, self.start : last] = k, v
        distance = torch.arange(self.start, last, device=q.device)[:, None] - torch.arange(last, device=q.device)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        block = attention.Block(slice(0, time), slice(0, last), seen[None, None])
        return attention.attend(q, keys, values, (block,), scale)

    def _ngram_rows(
        self, op: str, ids: Tensor, segment_ids: Tensor | None, order: int, buckets: int, seed: int
    ) -> Tensor:
        self._check(op, segment_ids is None, "decoding reads one sequence and takes no segment_ids", ids)
        fits = ids.shape[0] == 1 and self.previous_ids.shape[1] >= order - 1
        self._check(op, fits, f"decoding takes batch 1 and {order - 1} previous ids", ids, self.previous_ids)
        return ngram_buckets_after(ids, self.previous_ids, order, buckets, seed)

    def _cache(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The cache of this call of the model, [1, length, K, D] each."""
        name = f"{self.where}.{self._calls}"
        self._calls += 1
        if name not in self._caches:
            shape = (1, self.length, *k.shape[2:])
            self._caches[name] = (k.new_zeros(shape), k.new_zeros(shape))
        return self._caches[name]
