"""What a device can do, as the compiler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024

# The limits every WebGPU implementation guarantees (WebGPU specification, "Limits", default column), in its own names.
DEFAULT_LIMITS: dict[str, int] = {
    "maxBufferSize": 256 * MIB,
    "maxStorageBufferBindingSize": 128 * MIB,
    "maxUniformBufferBindingSize": 64 * 1024,
    "maxStorageBuffersPerShaderStage": 8,
    "maxComputeInvocationsPerWorkgroup": 256,
    "maxComputeWorkgroupSizeX": 256,
    "maxComputeWorkgroupStorageSize": 16 * 1024,
    "maxComputeWorkgroupsPerDimension": 65_535,
    "minStorageBufferOffsetAlignment": 256,
    "minUniformBufferOffsetAlignment": 256,
}


@dataclass(frozen=True)
class DeviceProfile:
    """Limits (WebGPU names, bytes or counts) and optional features (`shader-f16`, `timestamp-query`) that a plan may
    rely on.

    page_cap: upper bound of one buffer in bytes, below `maxBufferSize` when a driver is better off with smaller ones.
    subgroup_size: as measured in a shader, 0 for a device without `subgroups`. cpu: whether the adapter is a software
    driver; None when nobody knows. Both only choose which variants of a kernel are offered.
    """

    limits: dict[str, int] = field(default_factory=lambda: dict(DEFAULT_LIMITS))
    features: frozenset[str] = frozenset()
    page_cap: int = 256 * MIB
    subgroup_size: int = 0
    cpu: bool | None = None

    @property
    def page_bytes(self) -> int:
        return min(self.page_cap, self.limits["maxBufferSize"]) & ~0xFFF

    @property
    def binding_bytes(self) -> int:
        return min(self.limits["maxStorageBufferBindingSize"], self.page_bytes) & ~0xFFF
