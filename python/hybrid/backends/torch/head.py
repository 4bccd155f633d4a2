"""The output projection and its loss in chunks of rows: N x V logits never exist at once, in neither direction.

The backward pass makes each chunk's logits again from the hidden states; between the passes only the log-partition of
each row is kept, and the logits where they are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybrid.data.batch import IGNORE

# Logits of one chunk, in elements: they stay in a core's cache, or fill a GPU.
CPU_CHUNK, CUDA_CHUNK = 1 << 20, 1 << 26
KEPT = 1 << 20  # logits at most that are kept for the backward pass


def _chunks(x: Tensor, vocabulary: int) -> Iterator[slice]:
    rows = max(1, (CUDA_CHUNK if x.is_cuda else CPU_CHUNK) // vocabulary)
    for start in range(0, x.shape[0], rows):
        yield slice(start, min(start + rows, x.shape[0]))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed and kept in f32."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class CrossEntropyHead(torch.autograd.Function):
    """See `ops.cross_entropy_head`. x act [N, C], weight f32 [V, C], targets int64 [N], z_loss f32 [1] -> (loss, nll)
    f32 [N]. The weight is rounded to the type of x for the products, as every matrix is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, z_loss: Tensor) -> tuple[Tensor, Tensor]:
        counted = targets != IGNORE
        picked = torch.where(counted, targets, 0)
        matrix = weight.to(x.dtype)
        parts = []
        for chunk in _chunks(x, weight.shape[0]):
            logits = _product(x[chunk], matrix.t())
            parts.append((torch.logsumexp(logits, dim=-1), logits.gather(1, picked[chunk, None])[:, 0]))
        lse, target = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        nll = lse - target
        kept = logits if logits.shape[0] == x.shape[0] and logits.numel() <= KEPT else None
        ctx.save_for_backward(x, weight, counted, picked, z_loss, lse, kept)
        ctx.set_materialize_grads(False)
        return torch.where(counted, nll + z_loss * lse.square(), 0.0), torch.where(counted, nll, 0.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        """d loss / d logit_v = (1 + 2 z lse) softmax_v - [v == target], and the same without z for the nll."""
        x, weight, counted, picked, z_loss, lse, kept = ctx.saved_tensors
        nothing = torch.zeros((), device=x.device)
        dloss, dnll = (nothing if d is None else torch.where(counted, d, 0.0) for d in upstream)
        rise, drop = (1.0 + 2.0 * z_loss * lse) * dloss + dnll, dloss + dnll
        matrix = weight.to(x.dtype)
        keep = -counted.to(torch.int32)  # all bits, or none
        dx, dweight = torch.empty_like(x), None
        for chunk in _chunks(x, weight.shape[0]):
            logits = _product(x[chunk], matrix.t()) if kept is None else kept
            gradient = torch.exp(logits - lse[chunk, None])
            gradient *= rise[chunk, None]
            gradient.scatter_add_(1, picked[chunk, None], -drop[chunk, None])
            gradient.view(torch.int32).bitwise_and_(keep[chunk, None])  # to exact zeros, also of what is not finite
            # On a GPU the products run in the type of x; elsewhere nothing is gained by that.
            narrow, wide = (gradient.to(x.dtype), x) if x.is_cuda else (gradient, x.float())
            hidden = narrow @ matrix.to(narrow.dtype)
            if hidden.shape == dx.shape:
                dx = hidden.to(dx.dtype)
            else:
                dx[chunk] = hidden
            part = _product(narrow.t(), wide[chunk])
            dweight = part if dweight is None else dweight.add_(part)
        return dx, dweight, None, None
