"""The output projection with a distillation loss, in chunks of rows; between the passes only the gradients of the K
gathered logits are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid.backends.torch.head import _chunks, _product
from hybrid.data.batch import IGNORE
from hybrid.ops import PROBABILITY_FLOOR


class TopKHead(torch.autograd.Function):
    """See `ops.topk_kl`. x act [N, C], weight f32 [V, C], ids int64 [N, K], probs f32 [N, K], targets int64 [N] ->
    (loss, kl, nll) f32 [N], of which only loss has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ids: Tensor,
        probs: Tensor,
        targets: Tensor,
        temperature: float,
        alpha_kl: float,
        alpha_nll: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        there = ids != IGNORE
        known = torch.where(there, ids, 0)
        matrix = weight.to(x.dtype)
        logits = torch.empty(ids.shape, dtype=torch.float32, device=x.device)
        for chunk in _chunks(x, weight.shape[0]):
            logits[chunk] = _product(x[chunk], matrix.t()).gather(1, known[chunk])
        p = torch.where(there, probs.float().clamp(min=0.0), 0.0)
        mass, present = p.sum(1, keepdim=True), there.sum(1, keepdim=True).clamp(min=1)
        p = torch.where(mass > 0.0, p / mass, there / present)
        # A finite stand-in for minus infinity: a row without columns must not make NaN.
        log_q = torch.where(there, logits / temperature, torch.finfo(torch.float32).min).log_softmax(1)
        floored, floored_q = p.clamp(min=PROBABILITY_FLOOR), log_q.clamp(min=_LOG_FLOOR)
        kl = torch.where(there, floored * (floored.log() - floored_q), 0.0).sum(1)
        target = (torch.arange(ids.shape[1], device=x.device) == targets[:, None]) & there
        nll = -torch.where(target, floored_q, 0.0).sum(1)
        q = log_q.exp()
        pull = torch.where(target.any(1, keepdim=True), q - target.float(), 0.0)
        slope = torch.where(there, (alpha_kl * (q - p) + alpha_nll * pull) / temperature, 0.0)
        ctx.save_for_backward(x, weight, known, slope)
        ctx.mark_non_differentiable(kl, nll)
        return alpha_kl * kl + alpha_nll * nll, kl, nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, known, slope = ctx.saved_tensors
        matrix = weight.to(x.dtype)
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        for chunk in _chunks(x, weight.shape[0]):
            columns = known[chunk]
            gradient = torch.zeros(columns.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
            gradient.scatter_add_(1, columns, slope[chunk] * upstream[0][chunk, None])
            narrow, wide = (gradient.to(x.dtype), x) if x.is_cuda else (gradient, x.float())
            dx[chunk] = narrow @ matrix.to(narrow.dtype)
            dweight.add_(_product(narrow.t(), wide[chunk]))
        return dx, dweight, *(None,) * 6


_LOG_FLOOR = -18.420680743952367  # of PROBABILITY_FLOOR
