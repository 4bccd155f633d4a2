"""Runs a plan's programs through wgpu-py.

Everything is made once: buffers for the arenas' pages, pipelines, bind groups, staging buffers for readback. Running a
program then only encodes dispatches. The counters say so, and a test holds them to it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.webgpu.device import Device, is_lost, load_wgpu, probe_subgroup_size, wait_for
from hybrid.errors import DeviceLost, LimitExceeded
from hybrid.plan.document import BoundSlice, Choice, Clear, Dispatch, Plan, PlanKernel, PlanTensor, check_plan
from hybrid.plan.profile import DeviceProfile

STAGING_BYTES = 16 * 1024 * 1024
FENCE_BYTES = 8
MAX_FENCES = 64
NUMPY_TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "u32": np.uint32}

Progress = Callable[[str, int, int], None]


def device_profile(device: Device) -> DeviceProfile:
    """What the compiler may rely on for this device. Measures the subgroup size, which drivers misreport."""
    size = probe_subgroup_size(device) or 0
    features = device.features | ({"subgroups"} if size else set())
    return DeviceProfile(
        limits=dict(device.limits), features=features, subgroup_size=size, cpu=_is_cpu(device.info.kind)
    )


def _is_cpu(kind: str) -> bool | None:
    return None if kind == "Unknown" else kind == "CPU"


@dataclass(frozen=True)
class Encoded:
    """A dispatch ready to encode."""

    pipeline: Any
    group: Any
    workgroups: tuple[int, int, int]
    phase: str
    label: str


@dataclass
class Counters:
    submits: int = 0
    readbacks: int = 0
    buffers_created: int = 0
    pipelines_created: int = 0
    fences: int = 0


class Executor:
    """Allocates a plan on a device and runs its programs. `choices` maps product classes to the index of the variant to
    use.

    Errors: LimitExceeded when the device cannot hold the plan; DeviceLost from any call once the device is gone.
    """

    def __init__(self, device: Device, plan: Plan, profile: DeviceProfile | None = None) -> None:
        check_plan(plan, profile or device_profile(device))
        self.device = device
        self.plan = plan
        self.counters = Counters()
        self._lost: str | None = None
        self.waited = 0.0  # seconds spent waiting for the device
        self.choices: dict[str, str] = {}
        self._wgpu = load_wgpu()
        self._pages: dict[tuple[str, int], Any] = {}
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._programs: dict[str, list[Encoded | Clear]] = {}
        self._staging: Any = None
        self._allocate()
        usage = self._wgpu.BufferUsage
        self._fence_buffers = [self.buffer(FENCE_BYTES, usage.COPY_DST | usage.MAP_READ) for _ in range(MAX_FENCES)]
        self._upload_uniforms()
        self._upload_constants()

    # Set-up

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Run a wgpu call; a lost device becomes DeviceLost, now and ever after."""
        if self._lost is not None:
            raise DeviceLost(self._lost)
        try:
            return call()
        except DeviceLost as error:
            self._lost = str(error)
            raise
        except Exception as error:
            if is_lost(self.device, error):
                self._lost = f"the device {self.device.name!r} was lost ({' '.join(str(error).split())})"
                raise DeviceLost(self._lost) from error
            raise

    def buffer(self, size: int, usage: int) -> Any:
        self.counters.buffers_created += 1
        return self.guarded(lambda: self.device.device.create_buffer(size=size, usage=usage))

    def _allocate(self) -> None:
        usage = self._wgpu.BufferUsage
        for arena, pages in self.plan.arenas.items():
            for page, size in enumerate(pages):
                try:
                    self._pages[arena, page] = self.buffer(
                        max(256, size), usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
                    )
                except DeviceLost:
                    raise
                except Exception as error:
                    total = sum(sum(p) for p in self.plan.arenas.values())
                    raise LimitExceeded(
                        f"arena {arena!r}: {size} bytes could not be allocated on {self.device.name!r} (the plan needs "
                        f"{total} in all): "
                        f"use a smaller batch or model, or recompute ({error})"
                    ) from error

    def _upload_uniforms(self) -> None:
        """One uniform buffer holds the structs of all dispatches at 256-byte steps, each distinct struct once."""
        alignment = self.device.limits["minUniformBufferOffsetAlignment"]
        self._uniform_offset: dict[tuple[str, tuple[float | int, ...]], tuple[int, int]] = {}
        blob = bytearray()
        for program in self.plan.programs:
            for dispatch in self.plan.dispatches(program):
                for choice in dispatch.choices:
                    types = self.plan.kernels[choice.kernel].uniforms
                    if not types or (types, choice.uniforms) in self._uniform_offset:
                        continue
                    data = pack_uniforms(types, choice.uniforms)
                    self._uniform_offset[types, choice.uniforms] = (len(blob), len(data))
                    blob += data + bytes(-len(data) % alignment)
        usage = self._wgpu.BufferUsage
        self._uniforms = self.buffer(max(256, len(blob)), usage.UNIFORM | usage.COPY_DST)
        if blob:
            self.guarded(lambda: self.device.queue.write_buffer(self._uniforms, 0, bytes(blob)))

    def _upload_constants(self) -> None:
        for name, sha in self.plan.constants.items():
            self.write_tensor(
                name, np.frombuffer(self.plan.constant_data[sha], dtype=NUMPY_TYPES[self.plan.tensors[name].dtype])
            )

    def pipeline(self, kernel_name: str) -> tuple[Any, Any]:
        """(pipeline, bind group layout) of a kernel, compiled at first use on this device."""
        kernel = self.plan.kernels[kernel_name]
        if kernel not in self.device.pipelines:
            self.counters.pipelines_created += 1
            self.device.pipelines[kernel] = self.guarded(lambda: self._compile(kernel_name, kernel))
        return self.device.pipelines[kernel]

    def _compile(self, name: str, kernel: PlanKernel) -> tuple[Any, Any]:
        wgpu, gpu = self._wgpu, self.device.device
        kinds = {
            "read": wgpu.BufferBindingType.read_only_storage,
            "read_write": wgpu.BufferBindingType.storage,
            "uniform": wgpu.BufferBindingType.uniform,
        }
        bindings = [*([(0, "uniform")] if kernel.uniforms else []), *kernel.bindings]
        layout = gpu.create_bind_group_layout(
            entries=[
                {"binding": number, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kinds[access]}}
                for number, access in bindings
            ]
        )
        module = gpu.create_shader_module(code=self.plan.sources[kernel.source], label=name)
        pipeline = gpu.create_compute_pipeline(
            layout=gpu.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": module, "entry_point": kernel.entry, "constants": dict(kernel.constants)},
            label=name,
        )
        return pipeline, layout

    def encoded(self, dispatch: Dispatch, choice: Choice) -> Encoded:
        """The dispatch with its pipeline and bind group; groups are shared between equal dispatches."""
        pipeline, layout = self.pipeline(choice.kernel)
        kernel = self.plan.kernels[choice.kernel]
        key = (choice.kernel, choice.uniforms, dispatch.bindings)
        if key not in self._groups:
            entries = [
                {"binding": number, "resource": self._resource(bound)}
                for (number, _), bound in zip(kernel.bindings, dispatch.bindings, strict=True)
            ]
            if kernel.uniforms:
                offset, size = self._uniform_offset[kernel.uniforms, choice.uniforms]
                entries.insert(
                    0, {"binding": 0, "resource": {"buffer": self._uniforms, "offset": offset, "size": size}}
                )
            self._groups[key] = self.guarded(
                lambda: self.device.device.create_bind_group(layout=layout, entries=entries)
            )
        return Encoded(pipeline, self._groups[key], choice.workgroups, dispatch.phase, dispatch.label)

    def _resource(self, bound: BoundSlice) -> dict[str, Any]:
        # WebGPU wants sizes in whole words; a page always has room for the last one.
        return {"buffer": self._pages[bound.arena, bound.page], "offset": bound.offset, "size": -(-bound.size // 4) * 4}

    def prepare(self, programs: Iterable[str], progress: Progress | None = None) -> None:
        """Make pipelines and bind groups of these programs (those not made yet), with the current `choices`."""
        wanted = [p for p in programs if p not in self._programs]
        kernels = list(dict.fromkeys(self.choice(d).kernel for p in wanted for d in self.plan.dispatches(p)))
        for done, kernel in enumerate(kernels):
            if progress:
                progress("compiling kernels", done, len(kernels))
            self.pipeline(kernel)
        for program in wanted:
            self._programs[program] = [
                self.encoded(command, self.choice(command)) if isinstance(command, Dispatch) else command
                for command in self.plan.programs[program]
            ]

    def choice(self, dispatch: Dispatch) -> Choice:
        """The variant in `choices` for the dispatch's class, or the default."""
        wanted = self.choices.get(dispatch.product_class or "")
        return next((c for c in dispatch.choices if c.variant == wanted), dispatch.choices[0])

    # Running

    def encoder(self) -> Any:
        return self.guarded(self.device.device.create_command_encoder)

    def encode(
        self, encoder: Any, program: str, timestamps: Timestamps | None = None, phases: Sequence[str] = ()
    ) -> None:
        """Append a program to a command encoder, or only its dispatches of some phases.

        With timestamps, forward and backward become passes of their own, each timed.
        """
        commands = [c for c in self._programs[program] if not phases or (isinstance(c, Encoded) and c.phase in phases)]
        compute: Any = None
        phase: str | None = None
        for command in commands:
            if isinstance(command, Clear):
                if compute is not None:
                    compute.end()
                    compute = None
                for (arena, _), page in self._pages.items():
                    if arena == command.arena:
                        encoder.clear_buffer(page)
                continue
            if compute is None or (timestamps is not None and command.phase and phase and command.phase != phase):
                if compute is not None:
                    compute.end()
                compute = encoder.begin_compute_pass(**(timestamps.next_pass(command.phase) if timestamps else {}))
                phase = command.phase
            compute.set_pipeline(command.pipeline)
            compute.set_bind_group(0, command.group)
            compute.dispatch_workgroups(*command.workgroups)
            phase = command.phase or phase
        if compute is not None:
            compute.end()

    def submit(self, encoder: Any) -> None:
        """Hand a command encoder to the device. A software driver may run it before this returns: waiting, that is."""
        self.counters.submits += 1
        buffer = self.guarded(encoder.finish)
        begin = time.perf_counter()
        self.guarded(lambda: self.device.queue.submit([buffer]))
        if self.device.info.is_software:
            self.waited += time.perf_counter() - begin

    def run(self, *programs: str) -> None:
        """Encode and submit programs in order."""
        encoder = self.encoder()
        for program in programs:
            self.encode(encoder, program)
        self.submit(encoder)

    def touch(self, *programs: str) -> None:
        """Submit a single workgroup of each kernel of these programs."""
        commands = [c for program in programs for c in self._programs[program] if isinstance(c, Encoded)]
        encoder = self.encoder()
        compute = encoder.begin_compute_pass()
        for command in {command.pipeline: command for command in commands}.values():
            compute.set_pipeline(command.pipeline)
            compute.set_bind_group(0, command.group)
            compute.dispatch_workgroups(1)
        compute.end()
        self.submit(encoder)

    def fence(self) -> Fence:
        """A promise that everything submitted so far has run; at most MAX_FENCES may be open.

        Made by mapping a few bytes that a last copy fills: wgpu-py 0.32 cannot call `onSubmittedWorkDone` (its callback
        has the wrong signature), and with a map pending its poll thread also keeps later submits from blocking.
        """
        buffer = self._fence_buffers.pop()
        encoder = self.encoder()
        encoder.copy_buffer_to_buffer(self._pages["flags", 0], 0, buffer, 0, FENCE_BYTES)
        self.submit(encoder)
        self.counters.fences += 1
        promise = self.guarded(lambda: buffer.map_async(self._wgpu.MapMode.READ))
        return Fence(self, buffer, promise)

    def wait(self) -> None:
        """Block until everything submitted has run."""
        self.fence().wait()

    # Data

    def write_tensor(self, name: str, data: NDArray[Any]) -> None:
        """Upload a whole tensor (element count and type as in the plan)."""
        tensor = self.plan.tensors[name]
        array = np.ascontiguousarray(data, dtype=NUMPY_TYPES[tensor.dtype]).reshape(-1)
        if array.size != tensor.elements:
            raise ValueError(f"tensor {name!r} has {tensor.elements} elements, not {array.size}")
        raw = array.view(np.uint8)
        if raw.size % 4:
            raw = np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)])
        page = self._pages[tensor.arena, tensor.page]
        step = 64 * 1024 * 1024  # queue writes are staged by the driver; a whole page at once would double the peak
        for begin in range(0, raw.size, step):
            part = raw[begin : begin + step]
            self.guarded(partial(self.device.queue.write_buffer, page, tensor.offset + begin, part))

    def write_words(self, arena: str, page: int, offset: int, data: NDArray[Any]) -> None:
        """Upload raw bytes to a page."""
        self.guarded(lambda: self.device.queue.write_buffer(self._pages[arena, page], offset, data))

    def clear(self, arenas: Sequence[str]) -> None:
        """Zero arenas."""
        encoder = self.encoder()
        for (arena, _), page in self._pages.items():
            if arena in arenas:
                encoder.clear_buffer(page)
        self.submit(encoder)

    def read_tensor(self, name: str) -> NDArray[Any]:
        """A host copy of a tensor, in its shape. Waits for the device."""
        tensor = self.plan.tensors[name]
        raw = self.read_bytes(tensor.arena, tensor.page, tensor.offset, tensor.bytes)
        return np.frombuffer(raw, dtype=NUMPY_TYPES[tensor.dtype], count=tensor.elements).reshape(tensor.shape)

    def read_bytes(self, arena: str, page: int, offset: int, size: int) -> bytearray:
        """A host copy of a range of a page (offset and size in whole words). Goes through one staging buffer, made at
        first use."""
        usage, mode = self._wgpu.BufferUsage, self._wgpu.MapMode
        if self._staging is None:
            self._staging = self.buffer(STAGING_BYTES, usage.COPY_DST | usage.MAP_READ)
        result = bytearray()
        padded = -(-size // 4) * 4
        for begin in range(0, padded, STAGING_BYTES):
            count = min(STAGING_BYTES, padded - begin)
            encoder = self.encoder()
            encoder.copy_buffer_to_buffer(self._pages[arena, page], offset + begin, self._staging, 0, count)
            self.submit(encoder)
            self.counters.readbacks += 1
            promise = self.guarded(partial(self._staging.map_async, mode.READ, 0, -(-count // 8) * 8))
            result += self.mapped(promise, self._staging, count)
        return result[:size]

    def mapped(self, promise: Any, buffer: Any, size: int) -> memoryview:
        """Wait until `buffer` is mapped, copy its first `size` bytes, and unmap it."""

        def take() -> memoryview:
            begin = time.perf_counter()
            wait_for(self.device, promise)
            self.waited += time.perf_counter() - begin
            data = buffer.read_mapped(0, size) if size else memoryview(b"")
            buffer.unmap()
            return data

        copied: memoryview = self.guarded(take)
        return copied

    def release_fence(self, buffer: Any) -> None:
        self._fence_buffers.append(buffer)

    def page(self, tensor: PlanTensor) -> Any:
        return self._pages[tensor.arena, tensor.page]

    def memory(self) -> dict[str, int]:
        """Bytes of device memory by arena, and in all."""
        sizes = {arena: sum(pages) for arena, pages in self.plan.arenas.items()}
        return {**sizes, "total": sum(sizes.values())}

    def close(self) -> None:
        """Wait for the device, unless it is lost, and free everything. A second time does nothing.

        wgpu-py keeps the promises that are pending when a device goes away, and with them buffers and the device.
        """
        if not self._pages:
            return
        with suppress(DeviceLost):
            self.wait()
        for page in self._pages.values():
            page.destroy()
        self._uniforms.destroy()
        if self._staging is not None:
            self._staging.destroy()
        for buffer in self._fence_buffers:
            buffer.destroy()
        self._pages.clear()
        self._programs.clear()
        self._groups.clear()


@dataclass(frozen=True)
class Fence:
    """See `Executor.fence`."""

    executor: Executor
    buffer: Any
    promise: Any

    def wait(self) -> None:
        self.executor.mapped(self.promise, self.buffer, 0)
        self.executor.release_fence(self.buffer)


class Timestamps:
    """Hands out query slots: two for each pass, with the pass's phase. `slots` is how many a step may use."""

    def __init__(self, query_set: Any, first: int, slots: int) -> None:
        self.query_set = query_set
        self.next = first
        self.end = first + slots
        self.passes: list[tuple[str, int]] = []  # (phase, first slot)

    def next_pass(self, phase: str) -> dict[str, Any]:
        if self.next + 2 > self.end:
            return {}
        slot = self.next
        self.next += 2
        self.passes.append((phase, slot))
        return {
            "timestamp_writes": {
                "query_set": self.query_set,
                "beginning_of_pass_write_index": slot,
                "end_of_pass_write_index": slot + 1,
            }
        }


def pack_uniforms(types: str, values: Sequence[float | int]) -> bytes:
    """The bytes of a uniform struct of u32 ("u") and f32 ("f") scalars, padded to 16 bytes."""
    data = b"".join(
        struct.pack("<I", int(value)) if kind == "u" else struct.pack("<f", value)
        for kind, value in zip(types, values, strict=True)
    )
    return data + bytes(-len(data) % 16)
