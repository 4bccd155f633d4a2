"""Adapters and devices: which GPUs there are, which one to use, and opening it with the limits that training wants.

wgpu is imported here and nowhere at module level, so that a machine without it can still run everything else.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError, DeviceLost, HybridError
from hybrid.plan.profile import DEFAULT_LIMITS as PLAN_LIMITS

# What a device is asked for when the adapter offers it. Plans say themselves what they cannot do without.
WANTED_FEATURES = ("shader-f16", "timestamp-query", "timestamp-query-inside-encoders", "subgroup")

# What every WebGPU implementation grants without asking: what plans count on, and the rest of the specification's table
# that concerns compute.
DEFAULT_LIMITS = {
    **PLAN_LIMITS,
    "maxBindGroups": 4,
    "maxBindingsPerBindGroup": 1000,
    "maxDynamicUniformBuffersPerPipelineLayout": 8,
    "maxDynamicStorageBuffersPerPipelineLayout": 4,
    "maxUniformBuffersPerShaderStage": 12,
    "maxComputeWorkgroupSizeY": 256,
    "maxComputeWorkgroupSizeZ": 64,
}

# Raised to what the adapter has, because more of each means fewer slices and larger tiles. All others stay at their
# defaults, so that nothing comes to depend by accident on what one machine happens to offer.
_RAISED_LIMITS = (
    "maxStorageBufferBindingSize",
    "maxBufferSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeWorkgroupStorageSize",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupSizeX",
    "maxComputeWorkgroupSizeY",
)

# How long a result may take before the device is asked whether it is still there.
PATIENCE_SECONDS = 1.0

DRIVER_HINT = (
    "Install a Vulkan driver: the GPU vendor's own on Windows and Linux (Debian and Ubuntu also have a software one: "
    "`apt install mesa-vulkan-drivers`); macOS brings Metal. `python -m hybrid doctor` shows what is found."
)


class NoAdapter(HybridError):
    """There is no WebGPU adapter to use; the message says what to install."""


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as the driver reports it.

    kind is "DiscreteGPU", "IntegratedGPU", "CPU" (a software driver) or "Unknown"; backend is "Vulkan", "Metal",
    "D3D12".
    `index` is the position in `list_adapters()`, by which the user can choose it.
    """

    index: int
    name: str
    vendor: str
    description: str
    kind: str
    backend: str
    features: frozenset[str]
    limits: dict[str, int]
    handle: Any = field(repr=False, compare=False)

    @property
    def is_software(self) -> bool:
        return self.kind == "CPU"

    def line(self) -> str:
        """The adapter in one line, for lists and errors."""
        return f"{self.index}: {self.name} ({self.backend}, {self.kind})"


@dataclass(frozen=True)
class Device:
    """An open device. `limits` and `features` are what was granted, under their WebGPU names."""

    info: AdapterInfo
    device: Any = field(repr=False)  # wgpu.GPUDevice
    features: frozenset[str]
    limits: dict[str, int]
    # Compiled pipelines with their bind group layouts, by kernel: sessions on one device share them.
    pipelines: dict[Any, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def adapter(self) -> Any:
        return self.info.handle

    @property
    def queue(self) -> Any:
        return self.device.queue

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def vendor(self) -> str:
        return self.info.vendor

    @property
    def backend(self) -> str:
        return self.info.backend

    @property
    def has_f16(self) -> bool:
        return "shader-f16" in self.features

    @property
    def has_timestamps(self) -> bool:
        return "timestamp-query" in self.features

    def close(self) -> None:
        self.device.destroy()


@cache
def load_wgpu() -> Any:
    """The wgpu module.

    Mesa complains on standard error when XDG_RUNTIME_DIR is unset, so it gets a private folder.
    """
    if not os.environ.get("XDG_RUNTIME_DIR") and hasattr(os, "getuid"):
        os.environ["XDG_RUNTIME_DIR"] = _runtime_folder()
    try:
        import wgpu
        from wgpu.backends.wgpu_native.extras import set_instance_extras
    except (ImportError, OSError, RuntimeError) as error:  # the wheel is missing, or its native library does not load
        raise NoAdapter(
            f"the Python package wgpu cannot be loaded ({error}): pip install 'wgpu>=0.22'. {DRIVER_HINT}"
        ) from error
    # Vulkan, Metal and Direct3D 12. OpenGL shows most devices a second time, computes less reliably, and takes half a
    # second to look for.
    with contextlib.suppress(RuntimeError):  # somebody in this process has used wgpu before: it is set up already
        set_instance_extras(backends=["Primary"])
    return wgpu


def _runtime_folder() -> str:
    """The same for all processes of a user, so that those which are killed leave nothing behind."""
    folder = Path(tempfile.gettempdir()) / f"hybrid-runtime-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return str(folder)
    private = tempfile.mkdtemp(prefix="hybrid-runtime-")  # the name is taken by something that is not ours
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def list_adapters() -> list[AdapterInfo]:
    """Every adapter that wgpu sees, best first: real GPUs before software drivers."""
    wgpu = load_wgpu()
    try:
        handles = wgpu.gpu.enumerate_adapters_sync()
    except Exception as error:  # drivers fail in their own ways; all of them mean that there is nothing to use
        raise NoAdapter(f"the WebGPU adapters cannot be listed ({error}). {DRIVER_HINT}") from error
    described = sorted((a for a in (_describe(0, h) for h in handles) if a.backend != "OpenGL"), key=_rank)
    return [_describe(index, adapter.handle) for index, adapter in enumerate(described)]


def choose_adapter(adapters: list[AdapterInfo], wanted: str | None = None) -> AdapterInfo:
    """The adapter to use: the best one, or the one named by index or by a part of its name, vendor or interface.

    Case does not matter. NoAdapter when there is none; ConfigError (with the list) when `wanted` names none.
    """
    if wanted is None:
        if adapters:
            return adapters[0]
        raise NoAdapter(f"no WebGPU adapter is found. {DRIVER_HINT}")
    wanted = wanted.strip()
    if wanted.isdecimal():
        matches = [adapter for adapter in adapters if adapter.index == int(wanted)]
    else:
        matches = [adapter for adapter in adapters if wanted and wanted.casefold() in _searchable(adapter)]
    if not matches:
        listed = "; ".join(adapter.line() for adapter in adapters) or "none"
        raise ConfigError(f"adapter {wanted!r} is not known: expected an index or a part of a name from: {listed}")
    return matches[0]  # the list is in order of preference


def open_device(
    adapter: str | None = None, *, features: Iterable[str] = WANTED_FEATURES, default_limits: bool = False
) -> Device:
    """Open a device on the chosen adapter (see `choose_adapter`).

    features: the ones to ask for; those that the adapter lacks are left out, and `Device.features` says what was
    granted. default_limits: ask for no more than WebGPU's default limits, as the most modest browser would.
    """
    info = choose_adapter(list_adapters(), adapter)
    granted = [name for name in dict.fromkeys(features) if name in info.features]
    limits = dict(DEFAULT_LIMITS)
    if not default_limits:
        for name in _RAISED_LIMITS:
            limits[name] = max(limits[name], info.limits[name])
    short = [name for name, value in limits.items() if _falls_short(name, info.limits[name], value)]
    for name in short:  # an old driver; the plan compiler judges by what was granted
        limits[name] = info.limits[name]
    try:
        device = info.handle.request_device_sync(required_features=granted, required_limits=limits)
    except Exception as error:
        raise NoAdapter(f"adapter {info.line()} cannot open a device ({error}). {DRIVER_HINT}") from error
    return Device(info, device, frozenset(granted), limits)


def probe_subgroup_size(device: Device) -> int | None:
    """How many invocations run in lockstep, measured in a shader; None without subgroups.

    Drivers report a range, and some report it wrongly, so nothing but `@builtin(subgroup_size)` is believed.
    """
    if "subgroup" not in device.features and "subgroups" not in device.features:
        return None
    wgpu = load_wgpu()
    gpu = device.device
    module = gpu.create_shader_module(code=_SUBGROUP_PROBE)
    pipeline = gpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
    buffer = gpu.create_buffer(size=4, usage=wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC)
    group = gpu.create_bind_group(
        layout=pipeline.get_bind_group_layout(0), entries=[{"binding": 0, "resource": {"buffer": buffer}}]
    )
    encoder = gpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(pipeline)
    compute.set_bind_group(0, group)
    compute.dispatch_workgroups(1)
    compute.end()
    gpu.queue.submit([encoder.finish()])
    size = int(memoryview(gpu.queue.read_buffer(buffer)).cast("I")[0])
    buffer.destroy()
    return size


_SUBGROUP_PROBE = """
@group(0) @binding(0) var<storage, read_write> size: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_size) subgroup: u32) {
  if (lane == 0u) { size[0] = subgroup; }
}
"""


def is_lost(device: Device, error: BaseException | None = None) -> bool:
    """Whether the device is gone, judged by a caught wgpu `error` or else by trying it. Never waits for the device.

    wgpu-py only logs the loss and has no promise to ask, but every later call on a lost device is refused in words
    that say so.
    """
    if error is not None and _says_lost(error):
        return True
    try:  # for rare use: wgpu keeps some memory of every command buffer that is not submitted
        device.device.create_command_encoder().finish()
    except Exception:  # whatever it is, a device that cannot do nothing is of no more use
        return True
    return False


def wait_for(device: Device, promise: Any) -> Any:
    """The result of a promise of this device. Errors: the promise's own, or DeviceLost.

    A promise of wgpu-py that is pending when its device goes away is never settled, so now and then the device is
    tried. The promise's event is not public; without it there is only waiting without end.
    """
    event = getattr(promise, "_thread_event", None)
    if event is not None:
        while not event.wait(PATIENCE_SECONDS):
            if is_lost(device):
                raise DeviceLost(f"the device {device.name!r} was lost while its work was waited for")
    return promise.sync_wait()


def _says_lost(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".casefold()
    return "lost" in text and "device" in text


def _describe(index: int, handle: Any) -> AdapterInfo:
    info = handle.info
    return AdapterInfo(
        index=index,
        name=str(info.get("device", "")) or "unnamed adapter",
        vendor=str(info.get("vendor", "")),
        description=str(info.get("description", "")),
        kind=str(info.get("adapter_type", "Unknown")),
        backend=str(info.get("backend_type", "Unknown")),
        features=frozenset(str(name) for name in handle.features),
        limits={_camel(str(name)): int(value) for name, value in dict(handle.limits).items()},
        handle=handle,
    )


def _rank(adapter: AdapterInfo) -> int:
    order = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")
    return order.index(adapter.kind) if adapter.kind in order else 2


def _searchable(adapter: AdapterInfo) -> str:
    return f"{adapter.name} {adapter.vendor} {adapter.description} {adapter.backend}".casefold()


def _falls_short(name: str, offered: int, wanted: int) -> bool:
    return offered > wanted if name.startswith("min") else offered < wanted


def _camel(name: str) -> str:
    """`max-buffer-size` as WebGPU spells it: `maxBufferSize`."""
    first, *rest = name.replace("_", "-").split("-")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)
