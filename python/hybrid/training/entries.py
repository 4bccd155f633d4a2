"""From step results to the metrics stream: an entry for each step, written as it arrives, and a summary for the
view."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.backends.protocol import StepResult
from hybrid.config.loading import to_settings
from hybrid.config.resolve import optimizer_settings
from hybrid.contracts import metrics
from hybrid.contracts.environment import python_environment
from hybrid.contracts.javascript import is_finite_number
from hybrid.contracts.memory import host_stats, peak_resident_bytes
from hybrid.contracts.progress import Progress, ProgressContext
from hybrid.contracts.provenance import build_provenance
from hybrid.contracts.telemetry import Telemetry, TelemetrySettings, alerts
from hybrid.errors import AlertRaised, CheckpointCorrupt, NonFiniteError
from hybrid.models.parameters import count_parameters
from hybrid.optim.schedules import learning_rate
from hybrid.training.boards import Board
from hybrid.training.meter import Meter
from hybrid.training.metrics_log import JsonLines
from hybrid.training.start import Prepared, Services
from hybrid.training.utilisation import Utilisation, budget

MOST_SKIPPED = 100


@dataclass(frozen=True)
class StepPlace:
    """What the loop knows about a step that the device does not: its place in the data, and how fast training was
    then."""

    epoch: int
    batch: int
    ignored_targets: int
    tokens_per_second: float
    step_milliseconds: float
    data_wait_share: float = 0.0


class Entries:
    """Builds, checks and writes the entries of a session's steps, in step order.

    describe: the session's description. state: `telemetry` and `elapsedMs` of a checkpoint, to go on from.
    """

    def __init__(
        self,
        prepared: Prepared,
        services: Services,
        log: JsonLines,
        meter: Meter,
        describe: dict[str, Any],
        state: dict[str, Any],
        boards: Sequence[Board],
    ) -> None:
        config = prepared.config
        settings = to_settings(config)
        parameters = count_parameters(prepared.model)
        self._services = services
        self._log = log
        self._meter = meter
        self._boards = boards
        self._steps = prepared.steps
        self._every = config.run.log_every
        self._optimizer = optimizer_settings(config).to_dict()
        size, length = config.data.batch_size, config.data.sequence_length
        self._positions = size * length
        self.budget = budget(prepared.model, length, config.precision.type, describe)
        self._telemetry = Telemetry(TelemetrySettings.resolve(settings["telemetry"]))
        elapsed = state.get("elapsedMs", 0.0)
        if not is_finite_number(elapsed) or elapsed < 0:
            raise CheckpointCorrupt(f"session.elapsedMs is {elapsed!r:.80}: expected a number of at least 0")
        if "telemetry" in state:
            self._telemetry.restore(state["telemetry"])
        self._progress = Progress(
            ProgressContext(steps_per_shard=prepared.steps),
            lambda: services.clock() * 1000,
            elapsed,
            lambda: services.now() * 1000,
        )
        self._facts = metrics.RunFacts(
            objective=config.objective.type,
            seed=config.run.seed,
            model_id=config.run.name,
            environment_metadata=python_environment(
                {"command": "train", "surface": "python", "gpuAdapterInfo": describe.get("gpuAdapter")}
            ),
            total_param_count=parameters,
            trainable_param_count=parameters,
            trainable_groups=("decay", "no_decay"),
            kernel_path=describe.get("kernel_path"),
            build_provenance=build_provenance({}, os.environ),
        )
        self._places: dict[int, StepPlace] = {}
        self._stuck = 0  # skipped steps in a row that no smaller loss scale will help
        self._memory: dict[str, int] = {}
        self._peak = 0  # bytes on the device
        self._unreported: list[dict[str, Any]] = []

    @property
    def environment(self) -> dict[str, Any]:
        return self._facts.environment_metadata

    @property
    def provenance(self) -> dict[str, Any] | None:
        return self._facts.build_provenance

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; true after every step before it was recorded."""
        return {"telemetry": self._telemetry.state(), "elapsedMs": self._progress.elapsed_ms}

    def begin(self, step: int, place: StepPlace, memory: dict[str, int]) -> None:
        """A step was handed to the session; its result comes later."""
        self._places[step] = place
        self._memory = memory
        self._peak = max(self._peak, memory.get("total", 0))

    def record(self, results: list[StepResult]) -> None:
        """Write the entries of results that have arrived. Raises AlertRaised, after writing, if the run is to end on
        alerts."""
        for result in results:
            entry = self._build(result, self._places.pop(result.data_step))
            self._write(entry)
            self._telemetry.check(entry)
            self._check_divergence(result)

    def _check_divergence(self, result: StepResult) -> None:
        """Raise NonFiniteError when step after step is skipped, and the loss scale cannot come down to change that."""
        stuck = result.overflow and result.loss_scale_after == result.loss_scale
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck == MOST_SKIPPED:
            raise NonFiniteError(
                f"the last {MOST_SKIPPED} steps up to {result.data_step} had gradients that are not finite, and were "
                "skipped: the run has diverged; go on from an older checkpoint with a lower optimizer.lr"
            )

    def judge(self, result: StepResult) -> None:
        """Look at a step before it is applied. If it raises alerts, write its entry and raise AlertRaised."""
        learning = self._learning_rate(result)
        counters = {"nan_count": result.nan_count, "inf_count": result.inf_count}
        facts = {
            "gradient_norm_unclipped": result.grad_norm,
            **(counters if self._telemetry.settings.emit_nan_inf_counters else {}),
            "saturation_count": 0 if result.clip_factor == 1 else 1,
            "effective_lr": None if result.overflow else learning[0],
        }
        if alerts(self._telemetry.settings, facts):
            self.record([result])
            raise AlertRaised(tuple(alerts(self._telemetry.settings, facts)), result.data_step)

    def _learning_rate(self, result: StepResult) -> tuple[float, int, str]:
        """Of the optimizer step that was due: a skipped one does not count."""
        return learning_rate(self._optimizer, result.optimizer_step + (1 if result.overflow else 0))

    def _utilisation(self, step_milliseconds: float) -> Utilisation | None:
        return self.budget.at(1000 * self._positions / step_milliseconds) if step_milliseconds else None

    def _build(self, result: StepResult, place: StepPlace) -> dict[str, Any]:
        rate, index, phase = self._learning_rate(result)
        used = self._utilisation(place.step_milliseconds)
        facts = metrics.StepFacts(
            step=result.data_step,
            epoch=place.epoch,
            batch=place.batch,
            total_loss=None if result.loss_overflow else result.loss,
            step_time_ms=place.step_milliseconds if result.step_time_ms is None else result.step_time_ms,
            lr=rate,
            scheduler_index=index,
            scheduler_phase=phase,
            grad_norm=result.grad_norm,
            clip_factor=result.clip_factor,
            loss_scale=result.loss_scale,
            overflow=result.overflow,
            nan_count=result.nan_count,
            inf_count=result.inf_count,
            optimizer_step=result.optimizer_step,
            target_tokens=result.target_tokens,
            ignored_targets=place.ignored_targets,
            forward_ms=result.forward_ms,
            backward_ms=result.backward_ms,
            optimizer_ms=result.optimizer_ms,
            timing_source=result.timing_source,
            nll=None if result.loss_overflow else result.nll,
            tokens_per_second=place.tokens_per_second or None,
            memory_stats=host_stats(self._memory),
            mfu=None if used is None else used.full,
            mfu_causal=None if used is None else used.causal,
            data_wait_share=place.data_wait_share,
            peak_host_bytes=peak_resident_bytes(),
            peak_device_bytes=self._peak or None,
        )
        return metrics.build_entry(self._facts, facts, self._progress.finish_step(result.data_step), self._telemetry)

    def _write(self, entry: dict[str, Any]) -> None:
        self._log.append(entry)
        for board in self._boards:
            board.entry(entry, self._services.now())
        self._unreported.append(entry)
        if entry["step"] % self._every == 0 or entry["step"] == self._steps or entry["telemetry_alerts"]:
            self._services.view.event("step", self._summary(entry))
            self._unreported = []

    def _summary(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The last entry, with the mean loss and the skipped steps since the previous summary."""
        losses = [e["total_loss"] for e in self._unreported if not e["loss_overflow"]]
        eta = self._meter.eta_seconds(self._steps - entry["step"])
        used = self._utilisation(self._meter.step_milliseconds)
        return {
            "step": entry["step"],
            "steps": self._steps,
            "epoch": entry["epoch"],
            "loss": sum(losses) / len(losses) if losses else entry["total_loss"],
            "lr": entry["lr"],
            "gradNorm": entry["gradient_norm_unclipped"],
            "lossScale": entry["loss_scale"],
            "skipped": sum(e["overflow"] for e in self._unreported),
            "tokensPerSecond": self._meter.tokens_per_second,
            "stepMs": self._meter.step_milliseconds,
            "mfu": None if used is None else used.full,
            "mfuCausal": None if used is None else used.causal,
            "dataWaitShare": self._meter.data_wait_share,
            "memoryBytes": self._memory.get("total", 0),
            "peakMemoryBytes": self._peak,
            "etaSeconds": eta,
            "alerts": sorted({name for e in self._unreported for name in e["telemetry_alerts"]}),
        }
