"""The ops of n-gram tables, distillation, triplets and noise: what only some models and objectives use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import isfinite, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.backends.torch.topk import TopKHead
from hybrid.ops import MIN_TEMPERATURE, NO_TOKEN, TOP_K_LIMIT, Linear, Ops, Table
from hybrid.random.philox import MASK32


class ObjectiveOps(Ops):
    """A part of `TorchOps`."""

    act: torch.dtype

    @abstractmethod
    def _check(self, op: str, holds: bool, problem: str, *values: Any) -> None: ...

    def hashed_ngram_embedding(
        self, ids: Tensor, segment_ids: Tensor | None, table: Table, *, order: int, seed: int = 0
    ) -> Tensor:
        op, weight = "hashed_ngram_embedding", table.weight
        self._check(op, ids.dim() == 2 and weight.dim() == 2, "ids must be [B, T], the table [buckets, C]", ids, weight)
        self._check(op, order >= 2 and 0 <= seed <= MASK32, f"order {order} must be at least 2, seed {seed} a u32")
        return F.embedding(self._ngram_rows(op, ids, segment_ids, order, weight.shape[0], seed), weight).to(self.act)

    def _ngram_rows(
        self, op: str, ids: Tensor, segment_ids: Tensor | None, order: int, buckets: int, seed: int
    ) -> Tensor:
        fits = segment_ids is not None and segment_ids.shape == ids.shape
        self._check(op, fits, "segment_ids must be [B, T]", ids, segment_ids)
        assert segment_ids is not None
        return ngram_buckets(ids, segment_ids, order, buckets, seed)

    def add_noise(self, x: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        self._check("add_noise", noise.shape == x.shape, "x and noise must have one shape", x, noise)
        self._check("add_noise", levels.shape == (2,), "levels must have 2 entries", levels)
        return (levels[0] * x.float() + levels[1] * noise).to(x.dtype)

    def topk_kl(
        self,
        x: Tensor,
        output: Linear,
        teacher_ids: Tensor,
        teacher_probs: Tensor,
        teacher_targets: Tensor,
        *,
        temperature: float = 1.0,
        alpha_kl: float = 1.0,
        alpha_nll: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        op, rows = "topk_kl", prod(x.shape[:-1])
        self._check(op, output.bias is None, "an output projection with a bias is not defined", x)
        self._check(op, output.weight.shape[1] == x.shape[-1], "the weight must be [V, C]", x, output.weight)
        fits = teacher_ids.dim() == 2 and teacher_ids.shape == teacher_probs.shape and teacher_ids.shape[0] == rows
        problem = f"teacher_ids and teacher_probs must be [{rows}, K], teacher_targets have {rows} entries"
        fits = fits and teacher_targets.numel() == rows
        self._check(op, fits, problem, x, teacher_ids, teacher_probs, teacher_targets)
        self._check(op, teacher_ids.shape[1] <= TOP_K_LIMIT, f"K must be at most {TOP_K_LIMIT}", teacher_ids)
        fits = all(map(isfinite, (temperature, alpha_kl, alpha_nll))) and temperature >= MIN_TEMPERATURE
        settings = f"temperature {temperature} must be at least {MIN_TEMPERATURE}"
        self._check(op, fits, f"{settings}, alpha_kl {alpha_kl} and alpha_nll {alpha_nll} finite", x)
        teacher = (teacher_ids, teacher_probs, teacher_targets.reshape(-1))
        loss, kl, nll = TopKHead.apply(  # type: ignore[no-untyped-call]
            x.reshape(rows, -1), output.weight, *teacher, temperature, alpha_kl, alpha_nll
        )
        return loss, kl, nll

    def triplet_hinge(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        mask: Tensor,
        columns: Tensor | None = None,
        *,
        margin: float,
    ) -> Tensor:
        op = "triplet_hinge"
        fits = anchor.dim() == 2 and anchor.shape == positive.shape == negative.shape
        self._check(op, fits, "all three must be [N, C]", anchor, positive, negative)
        self._check(op, mask.shape == anchor.shape[:1], f"mask must have {anchor.shape[0]} entries", mask)
        fits = columns is None or (columns.dim() == 2 and columns.shape[0] == anchor.shape[0])
        self._check(op, fits, f"columns must be [{anchor.shape[0]}, K]", columns)
        self._check(op, isfinite(margin) and margin >= 0, f"margin {margin} must be finite and at least 0", anchor)
        a, p, n = (x.float() if columns is None else x.float().gather(1, columns) for x in (anchor, positive, negative))
        above = margin + (a - p).square().mean(1) - (a - n).square().mean(1)
        return torch.where(mask != 0, F.relu(above), 0.0)


def ngram_buckets(ids: Tensor, segment_ids: Tensor, order: int, buckets: int, seed: int) -> Tensor:
    """`ops.ngram_bucket` of the n-gram that ends at each position; all int64 [B, T]."""
    grams = []
    for back in reversed(range(order)):
        token = torch.full_like(ids, NO_TOKEN)
        if back < ids.shape[1]:
            end = ids.shape[1] - back
            same = segment_ids[:, back:] == segment_ids[:, :end]
            token[:, back:] = torch.where(same, ids[:, :end], NO_TOKEN)
        grams.append(token)
    return _buckets(grams, buckets, seed)


def ngram_buckets_after(ids: Tensor, previous_ids: Tensor, order: int, buckets: int, seed: int) -> Tensor:
    """The same for one sequence that continues others: ids int64 [1, T] come after previous_ids int64 [1, P]."""
    joined, first, time = torch.cat([previous_ids, ids], dim=1), previous_ids.shape[1], ids.shape[1]
    grams = [joined[:, first - back : first - back + time] for back in reversed(range(order))]
    return _buckets(grams, buckets, seed)


def _buckets(grams: Sequence[Tensor], buckets: int, seed: int) -> Tensor:
    """From the tokens of each place, oldest first."""
    h = _mix32(torch.full_like(grams[0], (seed + len(grams) * 0x9E3779B9) & MASK32))
    for tokens in grams:
        h = _mix32(h ^ tokens)
    return h % buckets


def _mix32(words: Tensor) -> Tensor:
    """`random.shuffle.mix32` in int64, whose products keep their lower half when they wrap around."""
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & MASK32
    words = ((words ^ (words >> 15)) * 0x846CA68B) & MASK32
    return words ^ (words >> 16)
