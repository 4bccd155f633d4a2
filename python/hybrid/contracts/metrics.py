"""Metrics entries: what one training step reports, and the check that an entry keeps the schema (version 1).

Two generations of the mirrored runner validate entries. They differ in the name of one field (`runtime_preset`,
`runtime_profile`), in one objective and in two counts. Entries made here carry both names, so both accept them.
`docs/formats/metrics.md` describes every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.contracts.javascript import WHITE_SPACE, is_finite_number, is_integer
from hybrid.contracts.progress import Snapshot
from hybrid.contracts.telemetry import MODES, Telemetry, alerts
from hybrid.errors import ContractMismatch

SCHEMA_VERSION = 1
LARGEST_FLOAT32 = 3.4028234663852886e38

PRESET = "v1"  # the generation with runtime_preset
PROFILE = "v1_profile"  # the generation with runtime_profile
GENERATIONS = (PRESET, PROFILE)

OBJECTIVES = {
    PRESET: ("cross_entropy", "ul_stage1_joint", "ul_stage2_base", "kd", "triplet"),
    PROFILE: ("cross_entropy", "causal_lm_cross_entropy", "ul_stage1_joint", "ul_stage2_base", "kd", "triplet"),
}

# Numbers that an objective must report.
_UL_NUMBERS = (
    *("lambda", "loss_total", "loss_prior", "loss_decoder", "loss_recon", "latent_bitrate_proxy"),
    *("coeff_ce", "coeff_prior", "coeff_decoder", "coeff_recon"),
)
_LATENT_NUMBERS = tuple(f"latent_{kind}_{moment}" for kind in ("clean", "noise", "noisy") for moment in ("mean", "std"))
_KD_NUMBERS = ("loss_kd", "distill_temperature", "distill_alpha_kd", "distill_alpha_ce", "distill_loss_total")

# Fields that belong to the objectives; null in the entries of the others.
OBJECTIVE_FIELDS = (
    *("ul_stage", "lambda", "distill_stage", *_KD_NUMBERS, "distill_loss_ce_aux", "loss_triplet"),
    *(
        "distill_triplet_margin",
        "distill_triplet_active_count",
        "distill_stage_a_step_count",
        "distill_stage_a_kd_mean",
    ),
)


# What not every program measures: absent where nobody did.
OPTIONAL_FIELDS = ("mfu", "mfu_causal", "data_wait_share", "peak_host_bytes", "peak_device_bytes")


class _Refused(Exception):
    """The first thing that is wrong with an entry."""


def validate_entry(entry: Any, generation: str | None = None) -> None:
    """ContractMismatch with the validator's message when `entry` breaks the schema of `generation` (None: of
    either).
    """
    for name in GENERATIONS if generation is None else (generation,):
        message = entry_error(entry, name)
        if message:
            raise ContractMismatch(message)


def entry_error(entry: Any, generation: str) -> str | None:
    """The first fault of an entry in the runner's order and words; None when there is none."""
    try:
        if not isinstance(entry, Mapping):
            raise _Refused("entry must be an object.")
        _Check(entry, generation).all()
    except _Refused as fault:
        return f"training metrics: {fault}"
    return None


class _Check:
    def __init__(self, entry: Mapping[str, Any], generation: str) -> None:
        self.entry = entry
        self.generation = generation

    def all(self) -> None:
        self.core()
        self.context()
        self.telemetry()
        self.distillation()
        self.progress()
        self.one_of_or_null("ul_stage", "stage1_joint", "stage2_base")
        self.objective()

    def core(self) -> None:
        for name, least in (("schemaVersion", 1), ("step", 1), ("epoch", 0), ("batch", 1)):
            self.integer(name, least)
        objective = self.text("objective")
        known = OBJECTIVES[self.generation]
        if objective not in known:
            raise _Refused(f"objective must be one of {', '.join(known)}.")
        for name in ("total_loss", "step_time_ms", "forward_ms", "backward_ms"):
            self.finite(name)
        for name in ("optimizer_ms", "gradient_norm_unclipped", "gradient_norm_clipped"):
            self.finite_or_null(name)
        for name in ("clipped_event_count", "total_param_count", "trainable_param_count"):
            self.integer_or_null(name, 0)
        if self.generation == PROFILE:
            self.integer_or_null("supervised_token_count", 1)
            self.integer_or_null("ignored_target_count", 0)

    def context(self) -> None:
        self.present("lr", " (nullable)")
        self.finite_or_null("lr")
        self.present("seed")
        self.finite("seed")
        self.present("model_id")
        self.text("model_id")
        for name in ("runtime_preset" if self.generation == PRESET else "runtime_profile", "kernel_path"):
            self.present(name, " (nullable)")
            self.text_or_null(name)
        self.present("environment_metadata")
        self.object("environment_metadata")
        for name in ("memory_stats", "build_provenance"):
            self.present(name, " (nullable)")
            if self.entry[name] is not None:
                self.object(name)

    def telemetry(self) -> None:
        self.finite_or_null("effective_lr")
        self.integer_or_null("scheduler_index", 0)
        self.text_or_null("scheduler_phase")
        for name in ("nan_count", "inf_count", "saturation_count"):
            self.integer_or_null(name, 0)
        mode = self.entry.get("telemetry_mode")
        if mode is not None and mode not in MODES:
            raise _Refused('telemetry_mode must be "step", "window", or "epoch".')
        self.integer_or_null("telemetry_window_size", 1)
        if self.entry.get("telemetry_alerts") is not None:
            self.texts("telemetry_alerts")
        for name in ("window_loss_avg", "window_step_time_ms_avg"):
            self.finite_or_null(name)

    def distillation(self) -> None:
        for name in ("loss_kd", "loss_triplet", "distill_temperature", "distill_alpha_kd", "distill_alpha_ce"):
            self.finite_or_null(name)
        for name in ("distill_loss_ce_aux", "distill_loss_total", "distill_triplet_margin"):
            self.finite_or_null(name)
        self.integer_or_null("distill_triplet_active_count", 0)
        for name in ("distill_stage_a_step_count", "distill_stage_a_kd_mean"):
            self.finite_or_null(name)
        self.one_of_or_null("distill_stage", "stage_a", "stage_b")
        for name in ("trainable_groups", "frozen_groups"):
            if name in self.entry:
                self.texts(name)

    def progress(self) -> None:
        pairs = (("shard_index", "shard_count"), ("step_in_shard", "steps_in_shard"), ("global_step", "global_steps"))
        for index, count in pairs:
            self.integer_or_null(f"progress_{index}", 1)
            self.integer_or_null(f"progress_{count}", 1)
        self.finite_or_null("progress_percent_complete")
        percent = self.entry.get("progress_percent_complete")
        if percent is not None and not 0 <= percent <= 100:
            raise _Refused("progress_percent_complete must be between 0 and 100.")
        for name in ("progress_elapsed_ms", "progress_eta_ms"):
            self.finite_or_null(name)
            if self.entry.get(name) is not None and self.entry[name] < 0:
                raise _Refused(f"{name} must be >= 0.")
        self.text_or_null("progress_eta_iso")
        for index, count in pairs:
            position, length = self.entry.get(f"progress_{index}"), self.entry.get(f"progress_{count}")
            if position is not None and length is not None and position > length:
                raise _Refused(f"progress_{index} must be <= progress_{count}.")

    def objective(self) -> None:
        objective = self.entry["objective"]
        if objective in ("cross_entropy", "causal_lm_cross_entropy"):
            name = "cross_entropy objective" if self.generation == PRESET else "cross-entropy objectives"
            self.must_not_set("ul_stage", name)
            self.must_not_set("distill_stage", name)
        elif objective == "kd":
            self.must_not_set("ul_stage", "kd objective")
            self.all_finite(_KD_NUMBERS)
            self.requires("distill_stage", "stage_a", "kd objective")
        elif objective == "triplet":
            self.must_not_set("ul_stage", "triplet objective")
            self.all_finite(("loss_triplet", "distill_triplet_margin"))
            self.integer("distill_triplet_active_count", 0)
            self.requires("distill_stage", "stage_b", "triplet objective")
        else:
            self.must_not_set("distill_stage", "UL objectives")
            first = objective == "ul_stage1_joint"
            self.requires("ul_stage", "stage1_joint" if first else "stage2_base", f"{objective} objective")
            self.all_finite(_UL_NUMBERS)
            if first:
                self.integer("schedule_step_index", 0)
                self.all_finite(_LATENT_NUMBERS)
            else:
                self.integer("stage1_latent_count", 1)

    def present(self, name: str, note: str = "") -> None:
        if name not in self.entry:
            raise _Refused(f"{name} is required{note}.")

    def finite(self, name: str) -> None:
        if not is_finite_number(self.entry.get(name)):
            raise _Refused(f"{name} must be a finite number.")

    def finite_or_null(self, name: str) -> None:
        if self.entry.get(name) is not None:
            self.finite(name)

    def all_finite(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.finite(name)

    def integer(self, name: str, least: int) -> None:
        value = self.entry.get(name)
        if not is_integer(value) or value < least:
            raise _Refused(f"{name} must be an integer >= {least}.")

    def integer_or_null(self, name: str, least: int) -> None:
        if self.entry.get(name) is not None:
            self.integer(name, least)

    def text(self, name: str) -> str:
        value = self.entry.get(name)
        if not isinstance(value, str) or not value.strip(WHITE_SPACE):
            raise _Refused(f"{name} must be a non-empty string.")
        return value

    def text_or_null(self, name: str) -> None:
        if self.entry.get(name) is not None:
            self.text(name)

    def texts(self, name: str) -> None:
        values = self.entry[name]
        if not isinstance(values, (list, tuple)):
            raise _Refused(f"{name} must be an array of strings.")
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise _Refused(f"{name}[{index}] must be a string.")

    def object(self, name: str) -> None:
        if not isinstance(self.entry[name], Mapping):
            raise _Refused(f"{name} must be an object.")

    def one_of_or_null(self, name: str, first: str, second: str) -> None:
        if self.entry.get(name) not in (None, first, second):
            raise _Refused(f'{name} must be "{first}", "{second}", or null.')

    def must_not_set(self, name: str, who: str) -> None:
        if self.entry.get(name) is not None:
            raise _Refused(f"{who} must not set {name}.")

    def requires(self, name: str, value: str, who: str) -> None:
        if self.entry.get(name) != value:
            raise _Refused(f'{who} requires {name}="{value}".')


@dataclass(frozen=True)
class RunFacts:
    """What is the same in every entry of a run. Counts are of elements of distinct tensors, not of padded buffers."""

    objective: str
    seed: int
    model_id: str
    environment_metadata: dict[str, Any]
    total_param_count: int
    trainable_param_count: int
    trainable_groups: tuple[str, ...]
    frozen_groups: tuple[str, ...] = ()
    runtime_preset: str | None = None
    kernel_path: str | None = None
    build_provenance: dict[str, Any] | None = None


@dataclass(frozen=True)
class StepFacts:
    """What happened in one step. Times in milliseconds.

    epoch: completed epochs; batch: 1-based within the epoch. total_loss: mean over the target tokens, None when it
    overflowed. forward_ms, backward_ms: None where nothing measured them (timing_source "none"). grad_norm: unscaled,
    before clipping, None when not finite. clip_factor: what the gradients were multiplied by. lr, scheduler_index,
    scheduler_phase: of the optimizer step that was due. nan_count, inf_count: gradient elements.
    """

    step: int
    epoch: int
    batch: int
    total_loss: float | None
    step_time_ms: float
    lr: float
    scheduler_index: int
    scheduler_phase: str
    grad_norm: float | None
    clip_factor: float
    loss_scale: float
    overflow: bool
    nan_count: int
    inf_count: int
    optimizer_step: int
    target_tokens: int
    ignored_targets: int
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    timing_source: str = "none"
    nll: float | None = None
    tokens_per_second: float | None = None
    memory_stats: dict[str, Any] | None = None
    objective_metrics: dict[str, Any] = field(default_factory=dict)
    mfu: float | None = None
    mfu_causal: float | None = None
    data_wait_share: float | None = None
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None


def build_entry(run: RunFacts, step: StepFacts, progress: Snapshot, telemetry: Telemetry) -> dict[str, Any]:
    """The metrics entry of one step, with every field of the schema (the optional ones where they were measured);
    takes the step into the telemetry's windows.

    An overflow step keeps all of its fields: the optimizer was skipped, so `effective_lr` is null and `lr` says what
    was due. A loss that overflowed is the largest float32 and marked `loss_overflow`. Objective metrics may fill
    objective fields and new ones. Errors: ContractMismatch when they would overwrite a field of the step itself, or
    when the entry breaks the schema.
    """
    settings = telemetry.settings
    loss_average, time_average = telemetry.observe(step.total_loss, step.step_time_ms, step.epoch)
    clipped = 0 if step.clip_factor == 1 else 1
    core: dict[str, Any] = {
        "schemaVersion": SCHEMA_VERSION,
        "step": step.step,
        "epoch": step.epoch,
        "batch": step.batch,
        "objective": run.objective,
        "total_loss": LARGEST_FLOAT32 if step.total_loss is None else step.total_loss,
        "step_time_ms": step.step_time_ms,
        "forward_ms": 0.0 if step.forward_ms is None else step.forward_ms,
        "backward_ms": 0.0 if step.backward_ms is None else step.backward_ms,
        "optimizer_ms": step.optimizer_ms,
        "timing_source": step.timing_source,
        "effective_lr": None if step.overflow else step.lr,
        "lr": step.lr,
        "scheduler_index": step.scheduler_index,
        "scheduler_phase": step.scheduler_phase,
        "optimizer_step": step.optimizer_step,
        "seed": run.seed,
        "model_id": run.model_id,
        "runtime_preset": run.runtime_preset,
        "runtime_profile": run.runtime_preset,
        "kernel_path": run.kernel_path,
        "environment_metadata": run.environment_metadata,
        "memory_stats": step.memory_stats,
        "build_provenance": run.build_provenance,
        "gradient_norm_unclipped": step.grad_norm,
        "gradient_norm_clipped": None if step.grad_norm is None else step.grad_norm * step.clip_factor,
        "clipped_event_count": clipped,
        "total_param_count": run.total_param_count,
        "trainable_param_count": run.trainable_param_count,
        "trainable_groups": list(run.trainable_groups),
        "frozen_groups": list(run.frozen_groups),
        "supervised_token_count": step.target_tokens,
        "ignored_target_count": step.ignored_targets,
        "tokens_per_second": step.tokens_per_second,
        "nll_loss": step.nll,
        "overflow": step.overflow,
        "skipped_optimizer_step": step.overflow,
        "loss_overflow": step.total_loss is None,
        "loss_scale": step.loss_scale,
        **progress.metrics(),
        "telemetry_mode": settings.mode,
        "telemetry_window_size": settings.window_size,
        "window_loss_avg": loss_average,
        "window_step_time_ms_avg": time_average,
        "nan_count": step.nan_count if settings.emit_nan_inf_counters else None,
        "inf_count": step.inf_count if settings.emit_nan_inf_counters else None,
        "saturation_count": clipped,
    }
    for name in step.objective_metrics:
        if name in core or name in OPTIONAL_FIELDS or name == "telemetry_alerts":
            raise ContractMismatch(
                f"objective metric {name!r} would overwrite a field of the step: give it another name"
            )
    measured = {name: getattr(step, name) for name in OPTIONAL_FIELDS}
    entry = {**core, **dict.fromkeys(OBJECTIVE_FIELDS), **step.objective_metrics}
    entry |= {name: value for name, value in measured.items() if value is not None}
    entry["telemetry_alerts"] = alerts(settings, entry)
    validate_entry(entry)
    return entry
