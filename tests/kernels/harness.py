"""Run one kernel launch on NumPy arrays.

Every buffer is followed by guard bytes inside its binding: NaN patterns after what is only read, so that a read past
the end shows in the result, and a fixed pattern after what is written, which must come back untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.webgpu.device import Device, load_wgpu, open_device
from hybrid.plan.kernels.base import FLAGS_BINDING, Kernel, Launch

TOLERANCE = {"f32": 1e-5, "mixed-f16": 2e-3}  # norm of difference over norm, against float64
GUARD_BYTES = 64
_POISON = b"\xff\xff\xff\xff"  # NaN as f32 and as f16
_SENTINEL = b"\x5a\x5a\x5a\x5a"
_PIPELINES: dict[tuple[int, Kernel, str], tuple[Any, Any]] = {}


class Outputs(list[NDArray[Any]]):
    """The arrays of the read_write bindings, in order.

    `overflow` tells whether an f16 store did not fit, `weight_overflow` the same of an f16 copy of a weight.
    """

    overflow: bool = False
    weight_overflow: bool = False


@cache
def shared_device() -> Device:
    return open_device(default_limits=True)


def run(
    launch: Launch, arrays: Sequence[NDArray[Any]], precision: str = "f32", device: Device | None = None
) -> Outputs:
    """Dispatch `launch` once. arrays: one per binding in order; a read_write one gives the initial contents.

    Floating arrays for `act` bindings are stored as f16 in mixed-f16 and come back as float32.
    """
    kernel, uniforms, workgroups = launch
    target = device or shared_device()
    wgpu, gpu = load_wgpu(), target.device
    if len(arrays) != len(kernel.bindings):
        raise ValueError(f"{kernel.name}: {len(arrays)} arrays for {len(kernel.bindings)} bindings")
    if len(uniforms) != len(kernel.uniforms):
        raise ValueError(f"{kernel.name}: {len(uniforms)} uniform values for {len(kernel.uniforms)} uniforms")
    pipeline, layout = compile_kernel(kernel, precision, target)

    storage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    buffers, sizes = [], []
    for binding, array in zip(kernel.bindings, arrays, strict=True):
        data = np.ascontiguousarray(array, dtype=_dtype(binding.element, precision)).tobytes()
        sizes.append(len(data))
        guard = _POISON if binding.access == "read" else _SENTINEL
        padding = GUARD_BYTES + -len(data) % 16
        guarded = data + (guard * (padding // 4 + 1))[:padding]
        buffers.append(gpu.create_buffer_with_data(data=guarded, usage=storage))
    numbers = list(range(1, len(buffers) + 1))
    if kernel.uniforms:
        packed = pack_uniforms(kernel, uniforms)
        buffers.append(gpu.create_buffer_with_data(data=packed, usage=wgpu.BufferUsage.UNIFORM))
        numbers.append(0)
    if has_flags(kernel, precision):
        buffers.append(gpu.create_buffer_with_data(data=bytes(256), usage=storage))
        numbers.append(FLAGS_BINDING)
    entries = [
        {"binding": number, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
        for number, buffer in zip(numbers, buffers, strict=True)
    ]
    group = gpu.create_bind_group(layout=layout, entries=entries)
    encoder = gpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(*workgroups)
    compute.end()
    gpu.queue.submit([encoder.finish()])

    outputs = Outputs()
    for binding, array, buffer, size in zip(kernel.bindings, arrays, buffers, sizes, strict=False):
        if binding.access != "read_write":
            continue
        raw = bytes(gpu.queue.read_buffer(buffer))
        after = raw[size:]
        if after != (_SENTINEL * (len(after) // 4 + 1))[: len(after)]:
            raise AssertionError(f"{kernel.name} wrote past the end of {binding.name}")
        result = np.frombuffer(raw[:size], dtype=_dtype(binding.element, precision)).reshape(np.shape(array))
        outputs.append(result.astype(np.float32) if result.dtype == np.float16 else result.copy())
    if has_flags(kernel, precision):
        flags = np.frombuffer(gpu.queue.read_buffer(buffers[-1], size=8), np.uint32)
        outputs.overflow, outputs.weight_overflow = bool(flags[0]), bool(flags[1])
    for buffer in buffers:
        buffer.destroy()
    return outputs


def padded(logits: NDArray[Any]) -> NDArray[Any]:
    """Rows of logits as the losses take them, with something in the padding that would show in any sum."""
    return np.pad(logits, ((0, 0), (0, -logits.shape[1] % 4)), constant_values=90.0)


def compile_kernel(kernel: Kernel, precision: str, device: Device) -> tuple[Any, Any]:
    """The pipeline and its bind group layout, made from `Kernel.bindings` so that a wrong declaration is refused."""
    key = (id(device), kernel, precision)
    if key not in _PIPELINES:
        wgpu, gpu = load_wgpu(), device.device
        entries = [_layout_entry(0, "uniform")] if kernel.uniforms else []
        for number, binding in enumerate(kernel.bindings, 1):
            entries.append(_layout_entry(number, "storage" if binding.access == "read_write" else "read-only-storage"))
        if has_flags(kernel, precision):
            entries.append(_layout_entry(FLAGS_BINDING, "storage"))
        for entry in entries:
            entry["visibility"] = wgpu.ShaderStage.COMPUTE
        layout = gpu.create_bind_group_layout(entries=entries)
        module = gpu.create_shader_module(code=kernel.source(precision), label=kernel.name)
        pipeline = gpu.create_compute_pipeline(
            layout=gpu.create_pipeline_layout(bind_group_layouts=[layout]),
            compute={"module": module, "entry_point": "main", "constants": dict(kernel.constants)},
        )
        _PIPELINES[key] = (pipeline, layout)
    return _PIPELINES[key]


def has_flags(kernel: Kernel, precision: str) -> bool:
    return precision == "mixed-f16" and kernel.stores_activations


def pack_uniforms(kernel: Kernel, values: Sequence[float | int]) -> bytes:
    """The uniform struct: one 4-byte scalar after another, padded to 16 bytes."""
    words = b"".join(
        (np.float32(value) if kind == "f32" else np.uint32(value)).tobytes()
        for (_, kind), value in zip(kernel.uniforms, values, strict=True)
    )
    return words + bytes(-len(words) % 16)


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Norm of the difference over the norm of what was expected, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    difference = float(np.linalg.norm((actual - expected).ravel()))
    size = float(np.linalg.norm(expected.ravel()))
    return difference / size if size > 0 else difference


def assert_close(actual: NDArray[Any], expected: NDArray[Any], precision: str = "f32") -> None:
    """Within the parity contract's tolerance for one op."""
    error = relative_error(actual, expected)
    assert np.shape(actual) == np.shape(expected), f"shape {np.shape(actual)}, expected {np.shape(expected)}"
    assert error <= TOLERANCE[precision], f"relative error {error:.3g}, allowed {TOLERANCE[precision]}"


def stored(array: NDArray[Any], precision: str) -> NDArray[np.float64]:
    """The values that an activation holds once stored: rounded to its element type, as float64."""
    return np.asarray(array, np.float16 if precision == "mixed-f16" else np.float32).astype(np.float64)


def _layout_entry(number: int, kind: str) -> dict[str, Any]:
    return {"binding": number, "buffer": {"type": kind}}


def _dtype(element: str, precision: str) -> type[np.generic]:
    if element == "u32":
        return np.uint32
    return np.float16 if element == "act" and precision == "mixed-f16" else np.float32
