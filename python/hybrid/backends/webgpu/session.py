"""A training session on WebGPU: compiles the plan, keeps the device fed, reads results back without stalling it.

A step uploads one small record and, for each microbatch, its tokens; the loss, counts, norm, flags, loss scale and
optimizer counter stay on the device, which writes one row per step into a ring. Rows are copied out every
`metrics_interval` steps and collected once a later fence has passed, so that reading them never waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult
from hybrid.backends.row_index import row_index
from hybrid.backends.sampling import generate
from hybrid.backends.state_check import check_state
from hybrid.backends.validate import validate_batch
from hybrid.backends.webgpu.device import Device, load_wgpu, open_device
from hybrid.backends.webgpu.executor import MAX_FENCES, Executor, Fence, Progress, Timestamps, device_profile
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

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_STEPS_AHEAD = 2
MAX_SECONDS_AHEAD = 0.25
TRAINING = ("begin", "forward_backward", "optimizer_stats", "optimizer_apply")
DECODING = ("prefill", "decode")
QUERY_SLOTS = 4096  # what one query set may hold


P = ParamSpec("P")
R = TypeVar("R")


def _tells_loss(method: Callable[Concatenate[WebGPUSession, P], R]) -> Callable[Concatenate[WebGPUSession, P], R]:
    """Whatever a lost device lets fail inside the method, the caller gets DeviceLost."""

    @wraps(method)
    def call(self: WebGPUSession, /, *arguments: P.args, **options: P.kwargs) -> R:
        result: R = self.executor.guarded(lambda: method(self, *arguments, **options))
        return result

    return call


@dataclass
class _Readback:
    """Ring rows on their way to the host."""

    promise: Any
    buffer: Any
    steps: list[int]
    fence: int  # number of the step fence after which the copy has run
    passes: dict[int, list[tuple[str, int]]]


class WebGPUSession:
    """Implements `backends.protocol.TrainingSession`. Constructor arguments are those of the reference session plus:

    adapter: index or part of a name (None: the best). device: an open device instead. metrics_interval: steps between
    ring readbacks. variants: product class -> variant name; None times them once per adapter and remembers the winners.
    tune: compile every variant and time none. progress(text, done, total).
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
        metrics_interval: int = 1,
        variants: Mapping[str, str] | None = None,
        tune: bool = False,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.seed = seed
        self._clock = clock
        self._owns_device = device is None
        self.device = device or open_device(adapter)
        profile = device_profile(self.device)
        cache = VariantCache(self.device, precision)
        known = cache.read() if variants is None else variants
        self.plan = compile_plan(
            PlanSettings(
                model,
                batch_size,
                sequence_length,
                precision,
                optimizer,
                max_grad_norm,
                loss_scaling,
                recompute,
                variants=known,
                tune=tune,
            ),
            profile,
        )
        self._ring_rows = int(self.plan.settings["ringRows"])
        if not 1 <= metrics_interval <= self._ring_rows // 2:
            raise ConfigError(f"metrics interval {metrics_interval}: expected 1 to {self._ring_rows // 2} steps")
        self._interval = metrics_interval
        self.scaler = DynamicLossScaler(loss_scaling)
        self.executor = Executor(self.device, self.plan, profile)
        self.executor.choices = {} if tune else choose_variants(self.executor, known, progress)
        if variants is None and self.executor.choices.items() - known.items():
            cache.add(self.executor.choices)
        self.executor.prepare([p for p in self.plan.programs if p not in DECODING], progress)
        self._warm_up()
        self._prepare_host()
        self.reset()

    # Set-up

    def _warm_up(self) -> None:
        """Drivers compile at first dispatch: run every program once on zeros, then wipe what it left."""
        self.executor.run(*(p for p in self.plan.programs if p not in DECODING and p != "load"))
        self.executor.clear([a for a in self.plan.arenas if a != "tables"])
        self.executor.wait()

    def _prepare_host(self) -> None:
        wgpu = load_wgpu()
        usage = wgpu.BufferUsage
        self._inputs = _InputLayout(self.executor, prefix="")
        ring = self.plan.tensors["ring"]
        self._slots = 0
        self._queries: Any = None
        self._queries_written = 0  # slots 0 .. this have been written at least once: steps take theirs without gaps
        if self.device.has_timestamps:
            create = self.device.device.create_query_set
            self._queries = self.executor.guarded(lambda: create(type=wgpu.QueryType.timestamp, count=QUERY_SLOTS))
            self._resolved = self.executor.buffer(QUERY_SLOTS * 8, usage.QUERY_RESOLVE | usage.COPY_SRC)
        times = QUERY_SLOTS * 8 if self._queries else 0
        self._readback_buffers = [
            self.executor.buffer(ring.bytes + times, usage.COPY_DST | usage.MAP_READ) for _ in range(2)
        ]
        self._free_buffers = list(self._readback_buffers)

    def reset(self) -> None:
        """Fresh weights from the seed's streams, zero moments, step 0."""
        state = SessionState(
            model=initial_values(self.model, self.seed),
            optimizer={},
            optimizer_step=0,
            scaler=self.scaler.state(),
        )
        self._load(state, fresh=True)

    def _load(self, state: SessionState, *, fresh: bool = False) -> None:
        executor = self.executor
        executor.clear(["moment1", "moment2", "grads", "state", "flags", "metrics", "step"])
        for name, array in state.model.items():
            executor.write_tensor(name, array)
        for name, array in state.optimizer.items():
            executor.write_tensor(name, array)
        if "load" in self.plan.programs:
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
        self._begun = 0
        self._inspected = False
        self._unread: list[int] = []
        self._passes: dict[int, list[tuple[str, int]]] = {}
        self._results: list[StepResult] = []
        self._readbacks: deque[_Readback] = deque()
        self._fences: deque[tuple[int, Fence, float]] = deque()
        self._fence_count = 0
        self._fence_passed = 0
        self._last_fence_time: float | None = None
        self._step_seconds = 0.0
        self._query_cursor = 0

    def _refill_schedule(self) -> None:
        """Rows for the optimizer steps from the last known one on. Uploaded in order with submitted work, so steps in
        flight keep theirs."""
        first = self._optimizer_step + 1
        count = int(self.plan.settings["scheduleRows"])
        table = np.zeros(self.plan.tensors["schedule"].elements, np.float32)
        table[:1].view(np.uint32)[0] = first
        table[8:] = np.asarray(schedule_rows(self.optimizer, first, count), np.float64).astype(np.float32).reshape(-1)
        self.executor.write_tensor("schedule", table)
        self._schedule_first, self._schedule_used = first, 0

    # The step

    @_tells_loss
    def begin(self, info: StepInfo) -> None:
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
        self._timestamps = self._new_timestamps(info)

    def _new_timestamps(self, info: StepInfo) -> Timestamps | None:
        slots = 2 * (3 * info.microbatches + 3)
        if self._queries is None or slots * (self._interval + 1) * 2 > QUERY_SLOTS:
            return None
        if self._query_cursor + slots > QUERY_SLOTS:
            self._query_cursor = 0
        return Timestamps(self._queries, self._query_cursor, slots)

    @_tells_loss
    def accumulate(self, batch: Batch) -> None:
        if self._info is None:
            raise RuntimeError("accumulate: begin comes first")
        self._upload(batch)
        encoder = self.executor.encoder()
        if self._begun == 0:
            self.executor.encode(encoder, "begin", self._timestamps)
        self.executor.encode(encoder, "forward_backward", self._timestamps)
        self.executor.submit(encoder)
        self._begun += 1

    def _upload(self, batch: Batch) -> None:
        validate_batch(batch, self.model.vocabulary_size, self.model.context_length, self._inputs.shape)
        self._inputs.write(batch)

    @_tells_loss
    def inspect(self) -> StepResult:
        info = self._require_complete("inspect")
        self.executor.run("optimizer_stats")
        self._inspected = True
        row = info.data_step % self._ring_rows
        ring = self.plan.tensors["ring"]
        raw = self.executor.read_bytes(ring.arena, ring.page, ring.offset + row * 64, 64)
        return self._decode_row(np.frombuffer(raw, np.uint32), {}, "none")

    @_tells_loss
    def apply(self) -> None:
        info = self._require_complete("apply")
        encoder = self.executor.encoder()
        if not self._inspected:
            self.executor.encode(encoder, "optimizer_stats", self._timestamps)
        self.executor.encode(encoder, "optimizer_apply", self._timestamps)
        self._unread.append(info.data_step)
        if self._timestamps is not None:
            self._passes[info.data_step] = self._timestamps.passes
            self._query_cursor = self._timestamps.next
            self._queries_written = max(self._queries_written, self._query_cursor)
        due = len(self._unread) >= self._interval and bool(self._free_buffers)
        buffer = self._copy_ring(encoder) if due else None
        self.executor.submit(encoder)
        self._fence_count += 1
        self._fences.append((self._fence_count, self.executor.fence(), self._clock()))
        if buffer is not None:
            self._map_ring(buffer)
        self._info, self._inspected = None, False
        if self.scaler.enabled and not self.scaler.powers_of_two():
            self._synchronise_scale()
        self._bound_work_in_flight()

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

    def _bound_work_in_flight(self) -> None:
        """At most two steps, or as many as fit a quarter of a second: bounds the latency of stopping and of results."""
        allowed = MAX_STEPS_AHEAD
        if self._step_seconds > 0:
            allowed = max(allowed, min(MAX_FENCES - 2, int(MAX_SECONDS_AHEAD / self._step_seconds)))
        while len(self._fences) > allowed:
            self._pass_fence()

    def _pass_fence(self) -> None:
        number, fence, submitted = self._fences.popleft()
        fence.wait()
        now = self._clock()
        since = self._last_fence_time if self._last_fence_time is not None else submitted
        seconds = now - max(since, submitted)
        self._step_seconds = seconds if not self._step_seconds else 0.8 * self._step_seconds + 0.2 * seconds
        self._last_fence_time = now
        self._fence_passed = number

    # Results

    def _copy_ring(self, encoder: Any) -> Any:
        buffer = self._free_buffers.pop()
        ring = self.plan.tensors["ring"]
        encoder.copy_buffer_to_buffer(self.executor.page(ring), ring.offset, buffer, 0, ring.bytes)
        if self._queries is not None and self._queries_written:
            # Only what was written: SwiftShader waits for ever for a query that never was.
            encoder.resolve_query_set(self._queries, 0, self._queries_written, self._resolved, 0)
            encoder.copy_buffer_to_buffer(self._resolved, 0, buffer, ring.bytes, QUERY_SLOTS * 8)
        return buffer

    def _map_ring(self, buffer: Any) -> None:
        mode = load_wgpu().MapMode.READ
        self.executor.counters.readbacks += 1
        promise = self.executor.guarded(lambda: buffer.map_async(mode))
        passes = {step: self._passes.pop(step) for step in self._unread if step in self._passes}
        self._readbacks.append(_Readback(promise, buffer, self._unread, self._fence_count, passes))
        self._unread = []

    def _collect(self) -> None:
        readback = self._readbacks.popleft()
        data = np.frombuffer(self.executor.mapped(readback.promise, readback.buffer, readback.buffer.size), np.uint8)
        self._free_buffers.append(readback.buffer)
        ring_bytes = self.plan.tensors["ring"].bytes
        rows = data[:ring_bytes].view(np.uint32).reshape(self._ring_rows, -1)
        ticks = data[ring_bytes:].view(np.uint64)
        for step in readback.steps:
            times, source = self._times(readback.passes.get(step), ticks)
            result = self._decode_row(rows[step % self._ring_rows], times, source)
            if result.data_step != step:
                raise RuntimeError(f"metrics ring: expected the row of step {step}, found step {result.data_step}")
            self.scaler.update(result.overflow and self.scaler.overflow_check)
            exact = self.scaler.enabled and self.scaler.powers_of_two()
            if exact and self.scaler.scale != result.loss_scale_after:
                raise RuntimeError(
                    f"step {step}: the device's loss scale {result.loss_scale_after} is not the host's "
                    f"{self.scaler.scale}"
                )
            self._optimizer_step = result.optimizer_step
            self._results.append(result)

    def _times(self, passes: list[tuple[str, int]] | None, ticks: NDArray[np.uint64]) -> tuple[dict[str, float], str]:
        """Milliseconds by phase from timestamps in nanoseconds."""
        if not passes or ticks.size == 0:
            return {}, "none"
        spans = [(phase, int(ticks[slot]), int(ticks[slot + 1])) for phase, slot in passes]
        if any(end < begin for _, begin, end in spans):
            return {}, "none"
        by_phase = {"forward": 0.0, "backward": 0.0, "": 0.0}
        for phase, begin, end in spans:
            by_phase[phase] += (end - begin) / 1e6
        total = (max(e for *_, e in spans) - min(b for _, b, _ in spans)) / 1e6
        return {
            "step_time_ms": total,
            "forward_ms": by_phase["forward"],
            "backward_ms": by_phase["backward"],
            "optimizer_ms": by_phase[""],
        }, "device"

    def _decode_row(self, row: NDArray[np.uint32], times: dict[str, float], source: str) -> StepResult:
        floats = row.view(np.float32)
        flags = int(row[7])
        loss_overflow = bool(flags & layout.FLAG_LOSS_OVERFLOW)
        norm_finite = not flags & layout.FLAG_NORM_NOT_FINITE
        return StepResult(
            data_step=int(row[0]),
            loss=FLOAT32_MAX if loss_overflow else float(floats[1]),
            nll=FLOAT32_MAX if loss_overflow else float(floats[2]),
            target_tokens=int(row[3]),
            grad_norm=float(floats[4]) if norm_finite else None,
            clip_factor=float(floats[5]),
            loss_scale=float(floats[6]),
            overflow=bool(flags & layout.FLAG_OVERFLOW),
            loss_overflow=loss_overflow,
            nan_count=int(row[8]),
            inf_count=int(row[9]),
            optimizer_step=int(row[10]),
            growth_counter=int(row[11]),
            loss_scale_after=float(floats[12]) if self.scaler.enabled else 1.0,
            timing_source=source,
            **times,
        )

    @_tells_loss
    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        self.executor.check()
        if wait:
            while self._readbacks:
                self._collect()
            if self._unread:
                encoder = self.executor.encoder()
                buffer = self._copy_ring(encoder)
                self.executor.submit(encoder)
                self._map_ring(buffer)
                self._collect()
            while self._fences:
                self._pass_fence()
        while self._readbacks and self._readbacks[0].fence <= self._fence_passed:
            self._collect()
        results, self._results = self._results, []
        return results

    # Evaluation and sampling

    @_tells_loss
    def evaluate(self, batch: Batch) -> Evaluation:
        if self._info is not None:
            raise RuntimeError("evaluate: a step is under way; apply it first")
        self._upload(batch)
        self.executor.run("evaluate")
        words = self.executor.read_tensor("eval_state").view(np.float32)
        return Evaluation(float(words[layout.NLL_ACC]), batch.target_tokens)

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
        for start in range(0, len(window), size):
            part = window[start : start + size]
            logits = self._decode("prefill", part + [0] * (size - len(part)), start, len(part) - 1)
        return logits

    def _decode_one(self, token: int, position: int) -> NDArray[np.float32]:
        return self._decode("decode", [token], position, 0)

    @_tells_loss
    def _decode(self, program: str, ids: list[int], start: int, last: int) -> NDArray[np.float32]:
        write = self.executor.write_tensor
        positions = np.minimum(np.arange(start, start + len(ids)), self.model.context_length - 1)
        write(f"{program}/ids", np.array(ids, np.uint32))
        write(f"{program}/positions", positions.astype(np.uint32))
        write(f"{program}/start", np.array([start], np.uint32))
        write(f"{program}/last", np.array([last], np.uint32))
        self.executor.run(program)
        return self.executor.read_tensor("logits")

    # State

    @_tells_loss
    def export_state(self) -> SessionState:
        if self._info is not None:
            raise RuntimeError("export_state: a step is under way; apply it first")
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
            "pipelines": self.executor.counters.pipelines_created,
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
        self.executor.close()
        for buffer in self._readback_buffers:
            buffer.destroy()
        if self._owns_device:
            self.device.close()


class _InputLayout:
    """Where the batch's tensors lie in the input arena, so that one upload carries them all."""

    def __init__(self, executor: Executor, prefix: str) -> None:
        tensors = {name: t for name, t in executor.plan.tensors.items() if t.arena == "inputs" and "/" not in name}
        self.executor = executor
        self.tensors = tensors
        shape = tensors["ids"].shape
        self.shape = (shape[0], shape[1])
        self.begin = min(t.offset for t in tensors.values())
        self.end = max(t.offset + t.bytes for t in tensors.values())
        others = [
            t
            for n, t in executor.plan.tensors.items()
            if t.arena == "inputs" and n not in tensors and self.begin < t.offset < self.end
        ]
        if others or any(t.page for t in tensors.values()):
            raise RuntimeError("input arena: the batch's tensors must lie side by side on one page")
        self.words = np.zeros((self.end - self.begin) // 4, np.uint32)

    def write(self, batch: Batch) -> None:
        values: dict[str, NDArray[Any]] = {
            "ids": batch.ids,
            "targets": batch.targets,
            "positions": batch.positions,
            "segment_ids": batch.segment_ids,
            "sample_ids": batch.sample_ids,
        }
        values |= row_index(batch.ids)
        if "pos_row_order" in self.tensors:
            values |= row_index(batch.positions, "pos_")
        for name, tensor in self.tensors.items():
            begin = (tensor.offset - self.begin) // 4
            self.words[begin : begin + tensor.elements] = values[name].reshape(-1)
        self.executor.write_words("inputs", 0, self.begin, self.words)
