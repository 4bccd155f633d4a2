"""AdamW over flat ranges of the parameter arenas, and the f16 copies of the weights: `adamw.wgsl`, `to_half.wgsl`."""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid
from hybrid.plan.kernels.state import STATE_WORDS

SCHEDULE_HEADER = 8  # words before the rows of the schedule tensor; the first is the optimizer step of the first row

_WORKGROUP = 64
_RESTS = ("rest1", "rest2")  # 1 - beta, made in float64
_QUADS = 4  # vec4s that one thread updates


def adamw(
    elements: int,
    *,
    group: int,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
    precision: str,
    half: bool = False,
) -> Launch:
    """Bindings: parameter, gradient, moment1, moment2 f32 [elements] (a multiple of 4), schedule f32, step_state u32
    [64], and with `half` the f16 copy to refresh.

    m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; p -= lr * ((m/bc1) / (sqrt(v/bc2) + eps) + wd * p), with g the
    gradient times the step's multiplier and lr, wd, bc1, bc2 from the schedule row of the optimizer step. Nothing
    moves when the step is skipped. Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
    arXiv:1711.05101.
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
        (
            *((n, "u32") for n in ("quads", "group", "row_width")),
            *((n, "f32") for n in ("beta1", "beta2", *_RESTS, "eps")),
        ),
        defines=(("WORKGROUP", _WORKGROUP), ("QUADS", _QUADS), ("SCHEDULE_HEADER", SCHEDULE_HEADER), *STATE_WORDS),
        switches=frozenset({"HALF"} if half else ()),
        invocations=_WORKGROUP,
    )
    quads = elements // 4
    values = (quads, group, 2 + 2 * groups, beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps)
    return Launch(kernel, values, grid(ceil_div(quads, _WORKGROUP * _QUADS)))


def to_half(elements: int, *, precision: str) -> Launch:
    """Bindings: parameter f32 [elements] (a multiple of 4), half_copy act [elements]."""
    kernel = Kernel(
        "to_half",
        "to_half.wgsl",
        (Binding("parameter", "read", "f32"), Binding("half_copy", "read_write", "act")),
        (("quads", "u32"),),
        defines=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
    )
    return Launch(kernel, (elements // 4,), grid(ceil_div(elements // 4, _WORKGROUP)))
