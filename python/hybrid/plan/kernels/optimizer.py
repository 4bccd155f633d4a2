"""AdamW over flat ranges of the parameter arenas, and the f16 copies of the weights: `adamw.wgsl`, `to_half.wgsl`."""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid

_THREADS = 64
_QUADS = 4  # vec4s that one thread updates


def adamw(
    elements: int, *, group: int, groups: int, beta1: float, beta2: float, eps: float, precision: str, half: bool = False
) -> Launch:
    """Bindings: parameter, gradient, moment1, moment2 f32 [elements] (a multiple of 4), schedule f32, step_state u32 [64], and with
    `half` the f16 copy to refresh.

    m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; p -= lr * ((m/bc1) / (sqrt(v/bc2) + eps) + wd * p), with g the gradient times the
    step's multiplier and lr, wd, bc1, bc2 from the schedule row of the optimizer step. Nothing moves when the step is skipped.
    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
    """
    bindings = (
        Binding("parameter", "read_write", "f32"),
        Binding("gradient", "read", "f32"),
        Binding("moment1", "read_write", "f32"),
        Binding("moment2", "read_write", "f32"),
        Binding("schedule", "read", "f32"),
        Binding("step_state", "read", "u32"),
        *((Binding("half_copy", "read_write", "act"),) if half else ()),
    )
    kernel = Kernel(
        "adamw_half" if half else "adamw",
        "adamw.wgsl",
        bindings,
        (("quads", "u32"), ("group", "u32"), ("row_width", "u32"), ("beta1", "f32"), ("beta2", "f32"), ("eps", "f32")),
        defines=(("THREADS", _THREADS), ("QUADS", _QUADS)),
        switches=frozenset({"HALF"} if half else ()),
        invocations=_THREADS,
    )
    quads = elements // 4
    return Launch(kernel, (quads, group, 2 + 2 * groups, beta1, beta2, eps), grid(ceil_div(quads, _THREADS * _QUADS)))


def to_half(elements: int, *, precision: str) -> Launch:
    """Bindings: parameter f32 [elements] (a multiple of 4), half_copy act [elements]."""
    kernel = Kernel(
        "to_half",
        "to_half.wgsl",
        (Binding("parameter", "read", "f32"), Binding("half_copy", "read_write", "act")),
        (("quads", "u32"),),
        defines=(("THREADS", _THREADS),),
        invocations=_THREADS,
    )
    return Launch(kernel, (elements // 4,), grid(ceil_div(elements // 4, _THREADS)))
