"""How far a run is and when it will be done.

A run of several shards counts on: shard s of S with n steps each has global steps (s - 1) * n + 1 .. s * n of S * n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.contracts.javascript import is_integer, iso_time
from hybrid.errors import ConfigError


@dataclass(frozen=True)
class ProgressContext:
    """Which shard this is, of how many, and how many steps each has (None: unknown)."""

    shard_index: int = 1
    shard_count: int = 1
    steps_per_shard: int | None = None

    @classmethod
    def resolve(cls, options: Mapping[str, Any], distill: Mapping[str, Any] | None = None) -> ProgressContext:
        """From options.maxSteps, distillShardIndex and distillShardCount.

        Where an option is unset, the distillation settings' shardIndex and shardCount count. Anything but a positive
        integer counts as unset; without a count there is one shard, whatever the index says. ConfigError when the
        index is above the count.
        """
        settings = distill or {}
        index = _positive(options.get("distillShardIndex")) or _positive(settings.get("shardIndex")) or 1
        given = _positive(options.get("distillShardCount")) or _positive(settings.get("shardCount"))
        if given is None:
            index = 1
        elif index > given:
            raise ConfigError("TrainingRunner: distillShardIndex must be <= distillShardCount.")
        return cls(index, given or 1, _positive(options.get("maxSteps")))


@dataclass(frozen=True)
class Snapshot:
    """Progress after one step; None where the number of steps is unknown. Times in milliseconds, `eta_iso` in UTC."""

    shard_index: int
    shard_count: int
    step_in_shard: int
    steps_per_shard: int | None
    global_step: int | None
    global_steps: int | None
    percent_complete: float | None
    elapsed_ms: float
    eta_ms: float | None
    eta_iso: str | None

    def metrics(self) -> dict[str, Any]:
        """The `progress_*` fields of a metrics entry."""
        return {
            "progress_shard_index": self.shard_index,
            "progress_shard_count": self.shard_count,
            "progress_step_in_shard": self.step_in_shard,
            "progress_steps_in_shard": self.steps_per_shard,
            "progress_global_step": self.global_step,
            "progress_global_steps": self.global_steps,
            "progress_percent_complete": self.percent_complete,
            "progress_elapsed_ms": self.elapsed_ms,
            "progress_eta_ms": self.eta_ms,
            "progress_eta_iso": self.eta_iso,
        }


def snapshot(
    context: ProgressContext, step: int, *, elapsed_ms: float, executed: int, process_ms: float, now_ms: float
) -> Snapshot:
    """Progress after `step` (1-based, within the shard).

    elapsed_ms: time the run has taken, with earlier processes. executed, process_ms: steps that this process has done
    and the time it took for them; the ETA is the remaining steps at that rate. now_ms: epoch milliseconds, for
    `eta_iso`.
    """
    elapsed = max(0.0, elapsed_ms)
    per_shard = context.steps_per_shard
    if per_shard is None:
        return Snapshot(context.shard_index, context.shard_count, step, None, None, None, None, elapsed, None, None)
    done = min(step, per_shard)
    global_step = (context.shard_index - 1) * per_shard + done
    global_steps = per_shard * context.shard_count
    eta = (global_steps - global_step) * (max(0.0, process_ms) / executed) if executed > 0 else None
    return Snapshot(
        shard_index=context.shard_index,
        shard_count=context.shard_count,
        step_in_shard=done,
        steps_per_shard=per_shard,
        global_step=global_step,
        global_steps=global_steps,
        percent_complete=global_step / global_steps * 100,
        elapsed_ms=elapsed,
        eta_ms=eta,
        eta_iso=None if eta is None else iso_time(now_ms + eta),
    )


class Progress:
    """Progress of the steps of this process. It begins to count time when it is made."""

    def __init__(
        self,
        context: ProgressContext,
        clock: Callable[[], float],
        elapsed_before_ms: float = 0.0,
        now: Callable[[], float] | None = None,
    ) -> None:
        """Both clocks give milliseconds: `clock` may start anywhere, `now` counts from 1970 (None: `clock` does).

        `elapsed_before_ms` is what earlier processes of the run took.
        """
        self.context = context
        self._now = now or clock
        self.executed = 0
        self._clock = clock
        self._began = clock()
        self._elapsed_before = elapsed_before_ms

    @property
    def elapsed_ms(self) -> float:
        """Time of the whole run so far: what a checkpoint keeps."""
        return self._elapsed_before + max(0.0, self._clock() - self._began)

    def finish_step(self, step: int) -> Snapshot:
        """Count one executed step, which was step `step` of the shard, and tell the progress after it."""
        self.executed += 1
        process = max(0.0, self._clock() - self._began)
        return snapshot(
            self.context,
            step,
            elapsed_ms=self._elapsed_before + process,
            executed=self.executed,
            process_ms=process,
            now_ms=self._now(),
        )


def _positive(value: Any) -> int | None:
    return int(value) if is_integer(value) and value > 0 else None
