"""What a step keeps on the device: `step_begin.wgsl`, `loss_accumulate.wgsl`, `grad_stats.wgsl`,
`step_finalize.wgsl`.

`step_state` is u32 [64]; f32 fields are stored as their bits. The host writes `step_input` u32 [64] before a step:
data step, target tokens, then as f32 bits 1 / target tokens and the z-loss coefficient.
"""

from __future__ import annotations

from math import ceil

from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid

# Words of step_state.
OPTIMIZER_STEP = 0
LOSS_SCALE = 1  # f32
GROWTH_COUNTER = 2
SKIP = 3  # 1: the update must leave the weights alone
GRAD_MULTIPLIER = 4  # f32: clip factor / loss scale
LOSS_ACC = 5  # f32: sum of loss rows so far in this step
NLL_ACC = 6  # f32
DATA_STEP = 7
TARGET_TOKENS = 8
SCALER_ENABLED = 9
LOSS_SCALE_USED = 10  # f32

# The same for the shaders, as `const` lines of their prelude.
STATE_WORDS = (
    ("OPTIMIZER_STEP", OPTIMIZER_STEP),
    ("LOSS_SCALE", LOSS_SCALE),
    ("GROWTH_COUNTER", GROWTH_COUNTER),
    ("SKIP", SKIP),
    ("GRAD_MULTIPLIER", GRAD_MULTIPLIER),
    ("LOSS_ACC", LOSS_ACC),
    ("NLL_ACC", NLL_ACC),
    ("DATA_STEP", DATA_STEP),
    ("TARGET_TOKENS", TARGET_TOKENS),
    ("SCALER_ENABLED", SCALER_ENABLED),
    ("LOSS_SCALE_USED", LOSS_SCALE_USED),
)

# Bits of the result row's flags.
FLAG_OVERFLOW = 1
FLAG_LOSS_OVERFLOW = 2
FLAG_NORM_NOT_FINITE = 4
_FLAGS = (
    ("FLAG_OVERFLOW", FLAG_OVERFLOW),
    ("FLAG_LOSS_OVERFLOW", FLAG_LOSS_OVERFLOW),
    ("FLAG_NORM_NOT_FINITE", FLAG_NORM_NOT_FINITE),
)

RING_WORDS = 16  # u32 words of a result row

PARTIAL_WORDS = 4  # sum of squares (f32 bits), NaN count, infinity count, unused
_STATS_WORKGROUP = 64
_STATS_BLOCK = 16_384  # elements that one workgroup adds up

_STATE = Binding("step_state", "read_write", "u32")


def step_begin(*, precision: str) -> Launch:
    """Bindings: step_input, step_state, loss_seed f32 [1], z_loss f32 [1], overflow_flags u32 [2].

    Resets accumulators and flags; loss_seed = loss scale / target tokens is the upstream gradient of the summed loss.
    """
    bindings = (
        Binding("step_input", "read", "u32"),
        _STATE,
        Binding("loss_seed", "read_write", "f32"),
        Binding("z_loss", "read_write", "f32"),
        Binding("overflow_flags", "read_write", "u32"),
    )
    kernel = Kernel("step_begin", "step_begin.wgsl", bindings, (), defines=STATE_WORDS, invocations=1)
    return Launch(kernel, (), (1, 1, 1))


def loss_accumulate(rows: int, *, precision: str) -> Launch:
    """Bindings: loss_rows f32 [N], nll_rows f32 [N], step_state. Adds both sums to the accumulators."""
    bindings = (Binding("loss_rows", "read", "f32"), Binding("nll_rows", "read", "f32"), _STATE)
    kernel = Kernel(
        "loss_accumulate",
        "loss_accumulate.wgsl",
        bindings,
        (("rows", "u32"),),
        defines=STATE_WORDS,
        workgroup_storage=8 * 64,
        invocations=64,
    )
    return Launch(kernel, (rows,), (1, 1, 1))


def partials_of(elements: int) -> int:
    """How many partial records `grad_stats` writes for so many gradient elements."""
    return ceil_div(elements, _STATS_BLOCK)


def grad_stats(elements: int, *, partial_offset: int, precision: str) -> Launch:
    """Bindings: gradients f32 [elements] (a multiple of 4), partials u32 [records, PARTIAL_WORDS].

    Writes `partials_of(elements)` records from record `partial_offset` on: sum of squares, counts of NaN and of
    infinite elements.
    """
    kernel = Kernel(
        "grad_stats",
        "grad_stats.wgsl",
        (Binding("gradients", "read", "f32"), Binding("partials", "read_write", "u32")),
        (("quads", "u32"), ("first_record", "u32"), ("records", "u32")),
        defines=(("WORKGROUP", _STATS_WORKGROUP), ("BLOCK_QUADS", _STATS_BLOCK // 4)),
        workgroup_storage=12 * _STATS_WORKGROUP,
        invocations=_STATS_WORKGROUP,
    )
    records = partials_of(elements)
    return Launch(kernel, (elements // 4, partial_offset, records), grid(records))


def step_finalize(
    records: int, *, ring_rows: int, max_norm: float, scaler: DynamicLossScaler, precision: str
) -> Launch:
    """Bindings: partials, step_state, overflow_flags u32 [2] (a store, or a weight, beyond f16), ring u32 [ring_rows,
    16].

    Judges the step (see `docs/formats/plan.md` for the result row), moves the loss scale, sets the clip factor,
    counts the optimizer step.
    """
    bindings = (
        Binding("partials", "read", "u32"),
        _STATE,
        Binding("overflow_flags", "read", "u32"),
        Binding("ring", "read_write", "u32"),
    )
    uniforms = (
        ("records", "u32"),
        ("ring_rows", "u32"),
        ("max_norm", "f32"),
        ("min_scale", "f32"),
        ("max_scale", "f32"),
        ("scale_factor", "f32"),
        ("backoff_factor", "f32"),
        ("growth_interval", "u32"),
        ("overflow_check", "u32"),
    )
    kernel = Kernel(
        "step_finalize",
        "step_finalize.wgsl",
        bindings,
        uniforms,
        defines=(*STATE_WORDS, *_FLAGS, ("RING_WORDS", RING_WORDS)),
        workgroup_storage=12 * 64,
        invocations=64,
    )
    values = (
        records,
        ring_rows,
        max_norm,
        scaler.min_scale,
        scaler.max_scale,
        scaler.scale_factor,
        scaler.backoff_factor,
        ceil(scaler.growth_interval),
        int(scaler.overflow_check),
    )
    return Launch(kernel, values, (1, 1, 1))
