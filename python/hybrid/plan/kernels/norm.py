"""RMS norm and layer norm: `norm.wgsl`, with the weight gradients in `column_partials.wgsl` and `column_reduce.wgsl`.

Shapes: x, y, dy, dx act [N, C]; weight, bias f32 [C]; mean, rstd f32 [N]. Any C; a C divisible by 4 moves four
channels at a time.
"""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width
from hybrid.plan.kernels.reduce import column_partials

_X = Binding("x", "read", "act")
_DY = Binding("dy", "read", "act")
_WEIGHT = Binding("weight", "read", "f32")
_BIAS = Binding("bias", "read", "f32")
_Y = Binding("y", "read_write", "act")
_DX = Binding("dx", "read_write", "act")


def rms_norm(rows: int, columns: int, *, eps: float, precision: str, lanes: int = 1) -> Launch:
    """Bindings: x, weight, y, rstd. y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps)."""
    bindings = (_X, _WEIGHT, _Y, Binding("rstd", "read_write", "f32"))
    return _rows("rms_norm", bindings, frozenset(), rows, columns, eps, lanes)


def layer_norm(rows: int, columns: int, *, eps: float, precision: str, bias: bool = True, lanes: int = 1) -> Launch:
    """Bindings: x, weight, (bias), y, mean, rstd. y = (x - mean) * rstd * weight + bias."""
    statistics = (Binding("mean", "read_write", "f32"), Binding("rstd", "read_write", "f32"))
    bindings = (_X, _WEIGHT, *((_BIAS,) if bias else ()), _Y, *statistics)
    switches = frozenset({"LAYER", "BIAS"} if bias else {"LAYER"})
    return _rows("layer_norm" if bias else "layer_norm_unbiased", bindings, switches, rows, columns, eps, lanes)


def rms_norm_dx(rows: int, columns: int, *, precision: str, lanes: int = 1) -> Launch:
    """Bindings: x, weight, rstd, dy, dx."""
    bindings = (_X, _WEIGHT, Binding("rstd", "read", "f32"), _DY, _DX)
    return _rows("rms_norm_dx", bindings, frozenset({"DX"}), rows, columns, 0.0, lanes)


def layer_norm_dx(rows: int, columns: int, *, precision: str, lanes: int = 1) -> Launch:
    """Bindings: x, weight, mean, rstd, dy, dx."""
    statistics = (Binding("mean", "read", "f32"), Binding("rstd", "read", "f32"))
    bindings = (_X, _WEIGHT, *statistics, _DY, _DX)
    return _rows("layer_norm_dx", bindings, frozenset({"DX", "LAYER"}), rows, columns, 0.0, lanes)


def rms_norm_dw(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: x, rstd, dy, partials f32 [reduce.blocks_of(N), C].

    `reduce.column_reduce` adds the partials to the gradient.
    """
    bindings = (_X, Binding("rstd", "read", "f32"), _DY)
    return column_partials("rms_norm_dw", bindings, "RMS", rows, columns)


def layer_norm_dw(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: x, mean, rstd, dy, partials f32 [reduce.blocks_of(N), C].

    Then `reduce.column_reduce`; the bias takes `column_sum`.
    """
    bindings = (_X, Binding("mean", "read", "f32"), Binding("rstd", "read", "f32"), _DY)
    return column_partials("layer_norm_dw", bindings, "LAYER", rows, columns)


def _rows(
    name: str, bindings: tuple[Binding, ...], switches: frozenset[str], rows: int, columns: int, eps: float, lanes: int
) -> Launch:
    """`lanes` threads for each row.

    One needs no barrier and suits CPUs; 8 to 32 give a GPU coalesced loads and more threads.
    """
    if lanes not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"{name}: {lanes} lanes for a row: expected a power of two up to 32")
    width = vector_width(columns)
    workgroup = 32 if lanes == 1 else 64
    kernel = Kernel(
        name=f"{name}_x{width}" + (f"_lanes{lanes}" if lanes > 1 else ""),
        file="norm.wgsl",
        bindings=bindings,
        uniforms=(("rows", "u32"), ("columns", "u32"), ("eps", "f32")),
        defines=(("WORKGROUP", workgroup), ("LANES", lanes)),
        switches=switches | (frozenset({"SHARED_ROWS"}) if lanes > 1 else frozenset()),
        workgroup_storage=4 * workgroup if lanes > 1 else 0,
        invocations=workgroup,
        vector=width,
    )
    return Launch(kernel, (rows, columns // width, eps), grid(ceil_div(rows * lanes, workgroup)))
