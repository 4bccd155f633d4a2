"""A training session on WebGPU: compiles the plan, keeps the device fed, reads results back without stalling it.

A step uploads one small record and, for each microbatch, its tokens; the loss, counts, norm, flags, loss scale and
optimizer counter stay on the device, which writes one row per step into a ring. Rows are copied out every
`metrics_interval` steps and collected once a later fence has passed, so that reading them never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult
from hybrid.backends.row_index import previous_ids
from hybrid.backends.sampling import generate
from hybrid.backends.state_check import check_state
from hybrid.backends.validate import validate_batch
from hybrid.backends.webgpu.device import Device, open_device
from hybrid.backends.webgpu.executor import Executor, Progress, device_profile
from hybrid.backends.webgpu.flight import Flight
from hybrid.backends.webgpu.inputs import InputLayout
from hybrid.backends.webgpu.metrics_ring import MetricsRing, decode_row
from hybrid.backends.webgpu.timing import StepTimer
from hybrid.backends.webgpu.variants import VariantCache, choose_variants
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.data.batch import Batch
from hybrid.errors import ConfigError, DataContractError
from hybrid.models.config import ModelConfig
from hybrid.models.initial_numpy import initial_values
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows as schedule_rows
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.kernels import state as layout
from hybrid.random.streams import stream_key

TRAINING = ("begin", "forward_backward", "optimizer_stats", "optimizer_apply")
DECODING = ("prefill", "decode")

P = ParamSpec("P")
R = TypeVar("R")


def _tells_loss(method: Callable[Concatenate[WebGPUSession, P], R]) -> Callable[Concatenate[WebGPUSession, P], R]:
    """Whatever a lost device lets fail inside the method, the caller gets DeviceLost."""

    @wraps(method)
    def call(self: WebGPUSession, /, *arguments: P.args, **options: P.kwargs) -> R:
        result: R = self.executor.guarded(lambda: method(self, *arguments, **options))
        return result

    return call


def _open(adapter: str | None, default_limits: bool) -> Device:
    return open_device(adapter, features=(), default_limits=True) if default_limits else open_device(adapter)


class WebGPUSession:
    """Implements `backends.protocol.TrainingSession`. Constructor arguments are those of the reference session plus:

    adapter: index or part of a name (None: the best). default_limits: ask it for WebGPU's default limits and no
    features. device: an open device instead; the caller closes it. metrics_interval: steps between ring readbacks.
    variants: product class -> variant name; None times them once per adapter and remembers the winners. tune: compile
    every variant and time none. training: False makes a session that evaluates and generates only, at a fraction of
    the memory and of the start-up. progress(text, done, total).
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        batch_size: int,
        sequence_length: int,
        precision: str = "f32",
        optimizer: OptimizerSettings,
        max_grad_norm: float | None = None,
        loss_scaling: dict[str, Any] | None = None,
        seed: int = 1337,
        recompute: bool = False,
        adapter: str | None = None,
        device: Device | None = None,
        default_limits: bool = False,
        metrics_interval: int = 1,
        variants: Mapping[str, str] | None = None,
        tune: bool = False,
        training: bool = True,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.seed = seed
        self._clock = clock
        self._owns_device = device is None
        self.device = device or _open(adapter, default_limits)
        try:
            self._set_up(
                PlanSettings(
                    model,
                    batch_size,
                    sequence_length,
                    precision,
                    optimizer,
                    max_grad_norm,
                    loss_scaling,
                    recompute,
                    tune=tune,
                    training=training,
                ),
                metrics_interval,
                variants,
                progress,
            )
        except BaseException:
            if self._owns_device:
                self.device.close()
            raise

    # Set-up

    def _set_up(
        self,
        settings: PlanSettings,
        metrics_interval: int,
        variants: Mapping[str, str] | None,
        progress: Progress | None,
    ) -> None:
        profile = device_profile(self.device)
        cache = VariantCache(self.device, settings.precision)
        known = cache.read() if variants is None else variants
        self.plan = compile_plan(replace(settings, variants=known), profile)
        self.scaler = DynamicLossScaler(settings.loss_scaling)
        self.executor = Executor(self.device, self.plan, profile)
        self.executor.choices = {} if settings.tune else choose_variants(self.executor, known, progress)
        if variants is None and self.executor.choices.items() - known.items():
            cache.add(self.executor.choices)
        self._trains = settings.training
        if self._trains:
            self.executor.prepare(TRAINING, progress)
            if progress:
                progress("first run of the kernels", 0, 1)
            self._warm_up()
        self._inputs = InputLayout(self.executor)
        self._timer = StepTimer(self.executor, metrics_interval)
        self._ring = MetricsRing(self.executor, self._timer, metrics_interval)
        self.reset()

    def _warm_up(self) -> None:
        """Drivers compile at first dispatch: run a workgroup of each kernel of a step, then wipe what it left."""
        self.executor.touch(*TRAINING)
        self.executor.clear([a for a in self.plan.arenas if a != "tables"])
        self.executor.wait()

    def reset(self) -> None:
        """Fresh weights from the seed's streams, zero moments, step 0."""
        state = SessionState(
            model=initial_values(self.model, self.seed),
            optimizer={},
            optimizer_step=0,
            scaler=self.scaler.state(),
        )
        self._load(state)

    def _load(self, state: SessionState) -> None:
        executor = self.executor
        executor.clear(["moment1", "moment2", "grads", "state", "flags", "metrics", "step"])
        for name, array in state.model.items():
            executor.write_tensor(name, array)
        for name, array in state.optimizer.items() if self._trains else ():
            executor.write_tensor(name, array)
        if "load" in self.plan.programs:
            executor.prepare(["load"])
            executor.run("load")
        self.scaler = DynamicLossScaler(self.plan.settings["lossScaling"])
        self.scaler.restore(state.scaler)
        words = np.zeros(64, np.uint32)
        words[layout.OPTIMIZER_STEP] = state.optimizer_step
        words[layout.LOSS_SCALE] = np.float32(self.scaler.scale).view(np.uint32)
        words[layout.GROWTH_COUNTER] = self.scaler.growth_counter
        words[layout.SCALER_ENABLED] = int(self.scaler.enabled)
        executor.write_tensor("step_state", words)
        sites = self.plan.settings["dropoutSites"]
        if sites:
            keys = np.array([stream_key(self.seed, f"dropout/{site}") for site in sites], np.uint32)
            executor.write_tensor("dropout_keys", keys)
        self._optimizer_step = state.optimizer_step  # known for certain; the device may be ahead by the steps in flight
        self._refill_schedule()
        self._info: StepInfo | None = None
        self._seen: list[int] = []  # tokens in the key/value caches
        self._begun = 0
        self._inspected = False
        self._results: list[StepResult] = []
        self._ring.reset()
        self._flight = Flight(executor, self._clock)

    def _refill_schedule(self) -> None:
        """Rows for the optimizer steps from the last known one on. Uploaded in order with submitted work, so steps in
        flight keep theirs."""
        first = self._optimizer_step + 1
        count = int(self.plan.settings["scheduleRows"])
        table = np.zeros(self.plan.tensors["schedule"].elements, np.float32)
        table[:1].view(np.uint32)[0] = first
        table[8:] = np.asarray(schedule_rows(self.optimizer, first, count), np.float64).astype(np.float32).reshape(-1)
        self.executor.write_tensor("schedule", table)
        self._schedule_used = 0

    # The step

    @_tells_loss
    def begin(self, info: StepInfo) -> None:
        if not self._trains:
            raise RuntimeError("begin: this session was made without its training programs")
        if info.target_tokens < 1:
            raise DataContractError(f"step {info.data_step} has no target tokens: its loss would have no meaning")
        if info.microbatches < 1:
            raise ConfigError(f"step {info.data_step} has {info.microbatches} microbatches: expected at least 1")
        if self._info is not None:
            raise RuntimeError(f"begin: step {self._info.data_step} was not applied")
        if self._schedule_used >= int(self.plan.settings["scheduleRows"]) - 1:
            self.poll_metrics(wait=True)
            self._refill_schedule()
        self._schedule_used += 1
        words = np.zeros(64, np.uint32)
        words[0], words[1] = info.data_step, info.target_tokens
        words[2:4] = np.array([1.0 / info.target_tokens, info.z_loss], np.float32).view(np.uint32)
        self.executor.write_tensor("step_input", words)
        self._info, self._begun = info, 0
        self._timestamps = self._timer.begin(info)
        self._calibrating = self._timer.calibrating(info)

    @_tells_loss
    def accumulate(self, batch: Batch) -> None:
        if self._info is None:
            raise RuntimeError("accumulate: begin comes first")
        self._upload(batch)
        if self._begun == 0:
            self._encode_and_submit("begin")
        if self._calibrating:
            self._timer.piece("forward", lambda: self._encode_and_submit("forward_backward", ("forward",)))
            self._timer.piece("backward", lambda: self._encode_and_submit("forward_backward", ("backward", "")))
        else:
            self._encode_and_submit("forward_backward")
        self._begun += 1

    def _encode_and_submit(self, program: str, phases: tuple[str, ...] = ()) -> None:
        encoder = self.executor.encoder()
        self.executor.encode(encoder, program, self._timestamps, phases)
        self.executor.submit(encoder)

    def _upload(self, batch: Batch) -> None:
        validate_batch(batch, self.model.vocabulary_size, self.model.context_length, self._inputs.shape)
        self._inputs.write(batch)

    @_tells_loss
    def inspect(self) -> StepResult:
        info = self._require_complete("inspect")
        self.executor.run("optimizer_stats")
        self._inspected = True
        return decode_row(self._ring.read_row(info.data_step), {}, "none")

    @_tells_loss
    def apply(self) -> None:
        info = self._require_complete("apply")
        if self._calibrating:
            self._timer.piece("optimizer", lambda: self._finish_step(info))
        else:
            self._finish_step(info)
        self._info, self._inspected = None, False
        if self.scaler.enabled and not self.scaler.powers_of_two():
            self._synchronise_scale()

    def _finish_step(self, info: StepInfo) -> None:
        encoder = self.executor.encoder()
        if not self._inspected:
            self.executor.encode(encoder, "optimizer_stats", self._timestamps)
        self.executor.encode(encoder, "optimizer_apply", self._timestamps)
        copied = self._ring.add(info.data_step, self._timer.end(self._timestamps), encoder)
        self.executor.submit(encoder)
        if copied is not None:
            self._ring.send(copied, after=self._flight.submitted + 1)
        self._flight.add()

    def _synchronise_scale(self) -> None:
        """Scales that are not powers of two are inexact in float32: the host's scaler decides, at the price of waiting
        for each step."""
        collected = self.poll_metrics(wait=True)
        self._results = collected + self._results
        words = self.executor.read_tensor("step_state").copy()
        words[layout.LOSS_SCALE] = np.float32(self.scaler.scale).view(np.uint32)
        self.executor.write_tensor("step_state", words)

    def _require_complete(self, action: str) -> StepInfo:
        if self._info is None or self._begun != self._info.microbatches:
            wanted = self._info.microbatches if self._info else 0
            raise RuntimeError(f"{action}: {self._begun if self._info else 0} of {wanted} microbatches accumulated")
        return self._info

    # Results

    @_tells_loss
    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        if wait:
            self._take(self._ring.collect_all(self._flight.submitted))
            self._flight.drain()
        self._take(self._ring.collect(self._flight.passed))
        results, self._results = self._results, []
        return results

    def _take(self, results: Iterator[StepResult]) -> None:
        """Replay the overflow flags in the host's scaler, which must come to the device's scale."""
        for result in results:
            self.scaler.update(result.overflow and self.scaler.overflow_check)
            exact = self.scaler.enabled and self.scaler.powers_of_two()
            if exact and self.scaler.scale != result.loss_scale_after:
                raise RuntimeError(
                    f"step {result.data_step}: the device's loss scale {result.loss_scale_after} is not the host's "
                    f"{self.scaler.scale}"
                )
            self._optimizer_step = result.optimizer_step
            self._results.append(result)

    # Evaluation and sampling

    @_tells_loss
    def evaluate(self, batch: Batch) -> Evaluation:
        if self._info is not None:
            raise RuntimeError("evaluate: a step is under way; apply it first")
        self.executor.prepare(["evaluate"])
        self._upload(batch)
        half = self.plan.precision == "mixed-f16"
        if half:  # of stores, which a step clears when it begins, and of weights, which stands
            self.executor.write_tensor("overflow_flags", self.executor.read_tensor("overflow_flags") * [0, 1])
        self.executor.run("evaluate")
        words = self.executor.read_tensor("eval_state").view(np.float32)
        overflow = half and bool(self.executor.read_tensor("overflow_flags").any())
        return Evaluation(float(words[layout.NLL_ACC]), batch.target_tokens, overflow)

    @_tells_loss
    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        if self._info is not None:
            raise RuntimeError("generate: a step is under way; apply it first")
        self.executor.prepare(DECODING)
        return generate(
            self._prefill,
            self._decode_one,
            prompt,
            options,
            vocabulary_size=self.model.vocabulary_size,
            context_length=self.model.context_length,
        )

    def _prefill(self, window: list[int]) -> NDArray[np.float32]:
        size = int(self.plan.settings["prefillTokens"])
        logits = np.zeros(0, np.float32)
        self._seen = []
        for start in range(0, len(window), size):
            part = window[start : start + size]
            logits = self._decode("prefill", part + [0] * (size - len(part)), start, len(part) - 1)
            self._seen += part
        return logits

    def _decode_one(self, token: int, position: int) -> NDArray[np.float32]:
        logits = self._decode("decode", [token], position, 0)
        self._seen.append(token)
        return logits

    @_tells_loss
    def _decode(self, program: str, ids: list[int], start: int, last: int) -> NDArray[np.float32]:
        write = self.executor.write_tensor
        positions = np.minimum(np.arange(start, start + len(ids)), self.model.context_length - 1)
        write(f"{program}/ids", np.array(ids, np.uint32))
        write(f"{program}/positions", positions.astype(np.uint32))
        write(f"{program}/start", np.array([start], np.uint32))
        write(f"{program}/last", np.array([last], np.uint32))
        before = self.plan.tensors.get(f"{program}/previous_ids")
        if before is not None:
            write(f"{program}/previous_ids", previous_ids(self._seen, before.shape[1]))
        self.executor.run(program)
        return self.executor.read_tensor("logits")

    # State

    @_tells_loss
    def export_state(self) -> SessionState:
        if self._info is not None:
            raise RuntimeError("export_state: a step is under way; apply it first")
        if not self._trains:
            raise RuntimeError("export_state: this session was made without its training programs, it has no moments")
        model: dict[str, NDArray[np.float32]] = {}
        moments: dict[str, NDArray[np.float32]] = {}
        for arena, prefix, target in (
            ("params", "", model),
            ("moment1", "moment1/", moments),
            ("moment2", "moment2/", moments),
        ):
            pages = [
                np.frombuffer(self.executor.read_bytes(arena, page, 0, size), np.float32)
                for page, size in enumerate(self.plan.arenas[arena])
            ]
            for spec in self._parameter_names():
                tensor = self.plan.tensors[prefix + spec]
                begin = tensor.offset // 4
                target[prefix + spec] = pages[tensor.page][begin : begin + tensor.elements].reshape(tensor.shape).copy()
        words = self.executor.read_tensor("step_state")
        scaler = {**self.scaler.state()}
        if self.scaler.enabled:
            scaler["scale"] = float(words.view(np.float32)[layout.LOSS_SCALE])
            scaler["growthCounter"] = int(words[layout.GROWTH_COUNTER])
        return SessionState(model, moments, int(words[layout.OPTIMIZER_STEP]), scaler)

    def _parameter_names(self) -> list[str]:
        return [name for group in self.plan.settings["groups"] for name in group["names"]]

    @_tells_loss
    def import_state(self, state: SessionState) -> None:
        check_state(state, {name: self.plan.tensors[name].shape for name in self._parameter_names()})
        self.poll_metrics(wait=True)
        self._load(state)

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "webgpu",
            "precision": self.plan.precision,
            "kernel_path": f"wgsl-{self.plan.precision}",
            "plan_hash": self.plan.hash(),
            "variants": dict(self.executor.choices),
            "gpuAdapter": {
                "name": self.device.name,
                "vendor": self.device.vendor,
                "description": self.device.info.description,
                "backend": self.device.backend,
                "adapterType": self.device.info.kind,
            },
        }

    def memory(self) -> dict[str, int]:
        return self.executor.memory()

    def counters(self) -> dict[str, int]:
        c = self.executor.counters
        return {
            "submits": c.submits,
            "readbacks": c.readbacks,
            "buffers_created": c.buffers_created,
            "pipelines_created": c.pipelines_created,
            "fences": c.fences,
        }

    def close(self) -> None:
        """Wait for what is under way and free everything. Once is enough; more does no harm."""
        self.executor.close()
        self._ring.close()
        if self._owns_device:
            self.device.close()
