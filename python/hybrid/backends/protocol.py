"""The session protocol: the one thing the training loop knows about a backend.

A step is `begin`, one `accumulate` per microbatch, then `apply`. Nothing in a step waits for the device; results
arrive later through `poll_metrics`. `inspect` is the exception (it synchronises) and exists for runs that must judge a
step before applying it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hybrid.checkpoint.safetensors import LateTensor
from hybrid.data.batch import Batch


@dataclass(frozen=True)
class StepInfo:
    """What is known about an optimizer step before its first microbatch.

    data_step: 1-based index of the step in the run; never repeats, also when the optimizer skips.
    target_tokens: targets of the whole step over all microbatches (and ranks), at least 1: the loss denominator.
    microbatches: how many `accumulate` calls follow.
    z_loss: coefficient of the z-loss at this step.
    """

    data_step: int
    target_tokens: int
    microbatches: int
    z_loss: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What the device reports about one step. Times in milliseconds, None where the backend has not measured them."""

    data_step: int
    loss: float  # (nll + z_loss * lse^2) summed over targets / target_tokens; the largest float32 if it overflowed
    nll: float  # the same without the z-loss term
    target_tokens: int
    grad_norm: float | None  # unscaled, before clipping; None when not finite
    clip_factor: float  # what the gradients were multiplied by (1 when not clipped)
    loss_scale: float  # the scale used in this step
    loss_scale_after: float  # of the next step; 1, as loss_scale, where scaling is off
    growth_counter: int
    overflow: bool  # a gradient or f16 store was not finite: the optimizer was skipped
    loss_overflow: bool
    nan_count: int
    inf_count: int
    optimizer_step: int  # after this step
    step_time_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    timing_source: str = "none"  # "device", "calibration" or "none"


@dataclass(frozen=True)
class Evaluation:
    """Sum over sum: add `loss_sum` and `target_tokens` over batches, divide once.

    overflow: a weight or an f16 store did not fit, so the loss is not that of the model.
    """

    loss_sum: float
    target_tokens: int
    overflow: bool = False


@dataclass(frozen=True)
class GenerateOptions:
    """Sampling settings. temperature 0 is greedy; top_k 0 and top_p 1 mean off."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337
    stop_ids: tuple[int, ...] = ()


@dataclass
class SessionState:
    """Everything that continues a run, on the host.

    model: float32 master weights by parameter name. optimizer: `<slot>/<name>` (slots `moment1`, `moment2`) to float32.
    scaler: the fields of the loss scaler (`scale`, `growthCounter`, ...).
    """

    model: dict[str, NDArray[np.float32]]
    optimizer: dict[str, NDArray[np.float32]]
    optimizer_step: int
    scaler: dict[str, Any] = field(default_factory=dict)


class TrainingSession(Protocol):
    """See the module text.

    Errors: DeviceLost from any method; LimitExceeded when something does not fit; DataContractError for ids outside
    the vocabulary or a batch of the wrong shape.
    """

    def begin(self, info: StepInfo) -> None: ...

    def accumulate(self, batch: Batch) -> None: ...

    def inspect(self) -> StepResult:
        """Wait for the gradients of the current step and report on them; `apply` follows (or not)."""
        ...

    def apply(self) -> None: ...

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        """Results that have arrived since the last call, in step order; with `wait`, of all steps applied so far."""
        ...

    def evaluate(self, batch: Batch) -> Evaluation: ...

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]: ...

    def export_state(self) -> SessionState:
        """A host copy of the state after every applied step; later steps do not touch it."""
        ...

    def import_state(self, state: SessionState) -> None: ...

    def describe(self) -> dict[str, Any]:
        """Adapter, precision, kernel path and the like, for `environment_metadata` and `doctor`."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by arena, and `total`."""
        ...

    def counters(self) -> dict[str, int]:
        """`submits`, `readbacks`, `buffers_created`, `pipelines_created` so far."""
        ...

    def close(self) -> None: ...


@dataclass
class SpreadState:
    """What `SessionState` says, with tensors that lie in files until `close` is called."""

    model: Mapping[str, LateTensor]
    optimizer: Mapping[str, LateTensor]
    optimizer_step: int
    scaler: dict[str, Any]
    close: Callable[[], None]


@runtime_checkable
class SpreadSession(Protocol):
    """A session over several processes: what else it can do, so that none of them ever holds the whole state."""

    def export_pieces(self, folder: Path, what: str) -> SpreadState:
        """The state after every applied step. Later steps do not touch it, although it is written in the background, by
        every process into `folder`, which exists. Reading a tensor waits until all have. what: the action, in messages.
        """
        ...

    def filling(
        self, names: list[tuple[str, str]], optimizer_step: int, scaler: dict[str, Any]
    ) -> AbstractContextManager[Callable[[str, str, NDArray[np.float32]], None]]:
        """What `import_state` does, tensor by tensor: inside the block, call what it gives with group ("model" or
        "optimizer"), name and values of each tensor, in the order of `names`."""
        ...
