"""The parity contract in numbers: the one place where a tolerance stands.

A limit of 0 means exactly equal (numbers) or equal bit for bit (tensors). `docs/parity.md` explains each row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Promise:
    """One row of the contract: what is compared, how the difference is measured, and how large it may be."""

    what: str
    measure: str
    limit: float


CONTRACT: dict[str, Promise] = {
    "initial_weights": Promise("initial weights of one seed", "elements that differ", 0),
    "bookkeeping": Promise("targets, overflow flags, loss scales, optimizer steps", "values that differ", 0),
    "repeat": Promise("ten steps, run twice on one device", "bytes of the state that differ", 0),
    "resume": Promise("ten steps, and five then five resumed", "bytes of the state that differ", 0),
    "skip": Promise("weights and moments across an overflowed step", "bytes that differ", 0),
    "loss": Promise("loss of ten f32 steps, two runtimes", "largest relative difference", 1e-6),
    "update": Promise("parameter update after 100 f32 steps, two runtimes", "1 - cosine", 1e-6),
    "update_worst": Promise("the same, tensor by tensor", "1 - cosine of the worst tensor", 1e-6),
    "gradients": Promise("gradients of one batch, split in any way", "norm of difference / norm", 1e-6),
    "mixed_first": Promise("mixed-f16 against f32, loss of step 1", "relative difference", 1e-3),
    "mixed_tenth": Promise("mixed-f16 against f32, loss of step 10", "relative difference", 5e-3),
    "mixed_pair": Promise("loss of ten mixed-f16 steps, two runtimes", "largest relative difference", 1e-3),
}

SHORT_STEPS = 10  # of the loss rows
LONG_STEPS = 100  # of the update rows

# A tensor whose gradient is zero in exact arithmetic (the bias of the keys: softmax does not see it) holds rounding
# noise, which Adam scales up to full steps. It is excepted where the root mean square of its float64 gradients is below
# this share of the whole gradient's.
ZERO_GRADIENT = 1e-9


@dataclass(frozen=True)
class Row:
    """One measured promise. `measured` is None where nothing could be measured, and `note` says why; that fails."""

    model: str
    check: str
    runtimes: tuple[str, ...]
    measured: float | None
    note: str = ""

    @property
    def promise(self) -> Promise:
        return CONTRACT[self.check]

    @property
    def passed(self) -> bool:
        return self.measured is not None and self.measured <= self.promise.limit

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "model": self.model,
            "check": self.check,
            "what": self.promise.what,
            "runtimes": list(self.runtimes),
            "measure": self.promise.measure,
            "measured": self.measured,
            "tolerance": self.promise.limit,
            "passed": self.passed,
            "note": self.note,
        }
