"""Next-token cross-entropy with an optional z-loss."""

from __future__ import annotations

from hybrid.models.decoder import Inputs
from hybrid.ops import Linear, Ops, Tensor


def cross_entropy(ops: Ops, output: Linear, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Hidden states act [B, T, C] -> (loss, nll) for each row, f32 [B*T] each; 0 where the target is ignored.

    The loss of a step is the sum of `loss` over all its microbatches divided by its number of targets; z-loss and
    cross-entropy share that denominator.
    """
    return ops.cross_entropy_head(x, output, inputs.targets, inputs.z_loss)
