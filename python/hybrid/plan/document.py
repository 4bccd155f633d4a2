"""The plan document: what crosses from the compiler to an executor, in memory and as JSON.

A plan holds arenas (lists of buffers, called pages), tensors (slices of pages), kernels (WGSL and constants) and
programs (lists of commands). An executor only allocates, uploads, dispatches and reads back. `docs/formats/plan.md`
describes the JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import ConfigError, LimitExceeded
from hybrid.plan.kernels.base import FLAGS_BINDING, Kernel
from hybrid.plan.profile import DeviceProfile

FORMAT = "hybrid.plan"
VERSION = 1
ITEM_BYTES = {"f32": 4, "f16": 2, "u32": 4}
ACCESS = ("read", "read_write")


@dataclass(frozen=True)
class PlanTensor:
    """A named slice of one page. `offset` in bytes; `shape` may be empty for raw words."""

    arena: str
    page: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    group: str | None = None

    @property
    def elements(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class PlanKernel:
    """A compute pipeline. `bindings`: (binding number, access) of its storage buffers; binding 0 is the uniform struct,
    whose scalar types are the letters of `uniforms` ("u" for u32, "f" for f32). `features`: what its WGSL needs enabled
    besides `f16`; `subgroups` must be enabled by a directive in browsers and must not be in wgpu-py, so the executor
    adds it, not the source."""

    source: str
    constants: tuple[tuple[str, float], ...]
    bindings: tuple[tuple[int, str], ...]
    uniforms: str
    entry: str = "main"
    features: tuple[str, ...] = ()

    @staticmethod
    def of(kernel: Kernel, source: str, precision: str, writable: frozenset[int] = frozenset()) -> PlanKernel:
        """The pipeline of a catalogue kernel, whose source in this precision has the sha256 `source`."""
        bindings = [(i + 1, "read_write" if i in writable else b.access) for i, b in enumerate(kernel.bindings)]
        if precision == "mixed-f16" and kernel.stores_activations:
            bindings.append((FLAGS_BINDING, "read_write"))
        types = "".join({"u32": "u", "f32": "f"}[kind] for _, kind in kernel.uniforms)
        return PlanKernel(source, tuple(sorted(kernel.constants)), tuple(bindings), types, features=kernel.features)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "entry": self.entry,
            "constants": dict(self.constants),
            "bindings": [[number, access] for number, access in self.bindings],
            "uniforms": self.uniforms,
            **({"features": list(self.features)} if self.features else {}),
        }


@dataclass(frozen=True)
class BoundSlice:
    """A range of a page bound to one binding. Bytes; `offset` counts from the start of the page."""

    arena: str
    page: int
    offset: int
    size: int


@dataclass(frozen=True)
class Choice:
    """One way to run a dispatch: kernel name, its uniform values, its grid, and what this way is called among the
    variants of its product class."""

    kernel: str
    uniforms: tuple[float | int, ...]
    workgroups: tuple[int, int, int]
    variant: str = ""


@dataclass(frozen=True)
class Dispatch:
    """One dispatch. `choices` holds alternatives with the same bindings (the first is the default); `product_class`
    names what is timed once per adapter to choose among them. `phase` is "forward", "backward" or ""."""

    choices: tuple[Choice, ...]
    bindings: tuple[BoundSlice, ...]
    label: str
    phase: str = ""
    product_class: str | None = None


@dataclass(frozen=True)
class Clear:
    """Zero whole pages of an arena."""

    arena: str


Command = Dispatch | Clear


@dataclass
class Plan:
    """See the module text. `constant_data` carries the binary constants by sha256; on disk they are files of that
    name."""

    model: dict[str, Any]
    shape: dict[str, int]
    precision: str
    requires: dict[str, Any]
    arenas: dict[str, list[int]]
    tensors: dict[str, PlanTensor]
    kernels: dict[str, PlanKernel]
    sources: dict[str, str]
    constants: dict[str, str]  # tensor name -> sha256 of its bytes
    programs: dict[str, list[Command]]
    settings: dict[str, Any] = field(default_factory=dict)
    constant_data: dict[str, bytes] = field(default_factory=dict)

    def dispatches(self, program: str) -> Iterator[Dispatch]:
        for command in self.programs[program]:
            if isinstance(command, Dispatch):
                yield command

    def arena_bytes(self, arena: str) -> int:
        return sum(self.arenas.get(arena, ()))

    def to_json(self) -> dict[str, Any]:
        """The JSON document (constants by hash only)."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "requires": self.requires,
            "model": self.model,
            "shape": self.shape,
            "precision": self.precision,
            "settings": self.settings,
            "arenas": {name: {"pages": list(pages)} for name, pages in self.arenas.items()},
            "tensors": {
                name: {
                    "arena": t.arena,
                    "page": t.page,
                    "offset": t.offset,
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    **({"group": t.group} if t.group else {}),
                }
                for name, t in self.tensors.items()
            },
            "kernels": {name: kernel.to_json() for name, kernel in self.kernels.items()},
            "sources": self.sources,
            "constants": {
                name: {"sha256": sha, "bytes": len(self.constant_data[sha])} for name, sha in self.constants.items()
            },
            "programs": {name: [_command_to_json(c) for c in commands] for name, commands in self.programs.items()},
        }

    @staticmethod
    def from_json(document: Mapping[str, Any], constant_data: Mapping[str, bytes]) -> Plan:
        """Parse and check a document. Raises ConfigError for a foreign format or version and for constants that do not
        match."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ConfigError(
                f"plan: format {document.get('format')!r} version {document.get('version')!r}; this program reads "
                f"{FORMAT!r} version {VERSION}: compile the plan again"
            )
        try:
            plan = Plan(
                model=dict(document["model"]),
                shape=dict(document["shape"]),
                precision=document["precision"],
                requires=dict(document["requires"]),
                settings=dict(document["settings"]),
                arenas={name: [int(b) for b in a["pages"]] for name, a in document["arenas"].items()},
                tensors={
                    name: PlanTensor(t["arena"], t["page"], t["offset"], tuple(t["shape"]), t["dtype"], t.get("group"))
                    for name, t in document["tensors"].items()
                },
                kernels={
                    name: PlanKernel(
                        k["source"],
                        tuple(sorted(k["constants"].items())),
                        tuple((int(n), a) for n, a in k["bindings"]),
                        k["uniforms"],
                        k["entry"],
                        tuple(k.get("features", ())),
                    )
                    for name, k in document["kernels"].items()
                },
                sources=dict(document["sources"]),
                constants={name: c["sha256"] for name, c in document["constants"].items()},
                programs={
                    name: [_command_from_json(c) for c in commands] for name, commands in document["programs"].items()
                },
                constant_data=dict(constant_data),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"plan: malformed document ({type(error).__name__}: {error})") from error
        for name, sha in plan.constants.items():
            data = plan.constant_data.get(sha)
            if data is None or hashlib.sha256(data).hexdigest() != sha:
                raise ConfigError(f"plan: constant {name!r} is missing or does not have the sha256 {sha}")
        for sha, text in plan.sources.items():
            if hashlib.sha256(text.encode()).hexdigest() != sha:
                raise ConfigError(f"plan: source {sha} does not have that sha256")
        return plan

    def hash(self) -> str:
        """Stable hash of the document: what `kernelPathId` names."""
        return stable_hash(self.to_json())


def _command_to_json(command: Command) -> dict[str, Any]:
    if isinstance(command, Clear):
        return {"clear": command.arena}
    result: dict[str, Any] = {
        "choices": [
            {
                "kernel": c.kernel,
                "uniforms": list(c.uniforms),
                "workgroups": list(c.workgroups),
                **({"variant": c.variant} if c.variant else {}),
            }
            for c in command.choices
        ],
        "bindings": [[b.arena, b.page, b.offset, b.size] for b in command.bindings],
        "label": command.label,
    }
    if command.phase:
        result["phase"] = command.phase
    if command.product_class:
        result["class"] = command.product_class
    return result


def _command_from_json(item: Mapping[str, Any]) -> Command:
    if "clear" in item:
        return Clear(str(item["clear"]))
    choices = tuple(
        Choice(
            c["kernel"],
            tuple(c["uniforms"]),
            (c["workgroups"][0], c["workgroups"][1], c["workgroups"][2]),
            c.get("variant", ""),
        )
        for c in item["choices"]
    )
    bindings = tuple(BoundSlice(arena, page, offset, size) for arena, page, offset, size in item["bindings"])
    return Dispatch(choices, bindings, item["label"], item.get("phase", ""), item.get("class"))


def check_plan(plan: Plan, profile: DeviceProfile) -> None:
    """Refuse a plan that this device, or any WebGPU device, would refuse, before anything is allocated.

    Raises LimitExceeded (tensor or kernel, limit, remedy) when the device is too small, ConfigError when the plan
    breaks a rule: a slice outside its page, an unaligned offset, one page bound `read` and `read_write` in a dispatch,
    or overlapping writable slices.
    """
    limits = profile.limits
    missing = [f for f in plan.requires.get("features", ()) if f not in profile.features]
    if missing:
        raise LimitExceeded(f"plan needs the device feature(s) {', '.join(missing)}: use precision f32 on this device")
    for arena, pages in plan.arenas.items():
        for page in pages:
            if page > limits["maxBufferSize"]:
                raise LimitExceeded(
                    f"arena {arena!r}: a page of {page} bytes exceeds maxBufferSize {limits['maxBufferSize']}"
                )
    for name, tensor in plan.tensors.items():
        pages = plan.arenas.get(tensor.arena, [])
        if (
            not (0 <= tensor.page < len(pages))
            or tensor.offset < 0
            or tensor.offset + tensor.bytes > pages[tensor.page]
        ):
            raise ConfigError(f"tensor {name!r} lies outside its arena {tensor.arena!r}")
        if tensor.offset % 256:
            raise ConfigError(f"tensor {name!r} starts at {tensor.offset}, not at a 256-byte boundary")
    for name, kernel in plan.kernels.items():
        if kernel.source not in plan.sources:
            raise ConfigError(f"kernel {name!r} names the source {kernel.source}, which the plan does not hold")
        if len(kernel.bindings) > limits["maxStorageBuffersPerShaderStage"]:
            raise LimitExceeded(
                f"kernel {name!r} binds {len(kernel.bindings)} storage buffers: this device allows "
                f"{limits['maxStorageBuffersPerShaderStage']}"
            )
        if not re.fullmatch("[uf]*", kernel.uniforms) or any(access not in ACCESS for _, access in kernel.bindings):
            raise ConfigError(f"kernel {name!r}: malformed uniforms or access modes")
    for program in plan.programs:
        for dispatch in plan.dispatches(program):
            _check_dispatch(plan, dispatch, program, limits)


def _check_dispatch(plan: Plan, dispatch: Dispatch, program: str, limits: Mapping[str, int]) -> None:
    where = f"program {program!r}, dispatch {dispatch.label!r}"
    for b in dispatch.bindings:
        pages = plan.arenas.get(b.arena, [])
        if not (0 <= b.page < len(pages)) or b.offset < 0 or b.size <= 0 or b.offset + b.size > pages[b.page]:
            raise ConfigError(f"{where}: a binding lies outside arena {b.arena!r}")
        if b.offset % limits["minStorageBufferOffsetAlignment"]:
            raise ConfigError(f"{where}: binding offset {b.offset} is not aligned")
        if b.size > limits["maxStorageBufferBindingSize"]:
            raise LimitExceeded(
                f"{where}: a binding of {b.size} bytes exceeds maxStorageBufferBindingSize "
                f"{limits['maxStorageBufferBindingSize']}: use a smaller batch, sequence or model"
            )
    for choice in dispatch.choices:
        kernel = plan.kernels.get(choice.kernel)
        if kernel is None:
            raise ConfigError(f"{where}: unknown kernel {choice.kernel!r}")
        if len(kernel.bindings) != len(dispatch.bindings) or len(kernel.uniforms) != len(choice.uniforms):
            raise ConfigError(
                f"{where}: kernel {choice.kernel!r} wants {len(kernel.bindings)} buffers and "
                f"{len(kernel.uniforms)} uniforms, not {len(dispatch.bindings)} and {len(choice.uniforms)}"
            )
        if any(not 1 <= n <= limits["maxComputeWorkgroupsPerDimension"] for n in choice.workgroups):
            raise ConfigError(f"{where}: workgroups {choice.workgroups} out of range")
        conflict = access_conflict(kernel.bindings, dispatch.bindings)
        if conflict:
            raise ConfigError(f"{where}: {conflict}")


def access_conflict(accesses: tuple[tuple[int, str], ...], bindings: tuple[BoundSlice, ...]) -> str | None:
    """Why WebGPU would refuse these bindings together, or None: a buffer is either read-only or writable in one
    dispatch, and writable ranges do not overlap."""
    by_page: dict[tuple[str, int], list[tuple[str, BoundSlice]]] = {}
    for (_, access), b in zip(accesses, bindings, strict=True):
        by_page.setdefault((b.arena, b.page), []).append((access, b))
    for (arena, page), bound in by_page.items():
        kinds = {access for access, _ in bound}
        if len(kinds) == 2:
            return f"page {page} of arena {arena!r} is bound read and read_write at once"
        if kinds == {"read_write"}:
            spans = sorted((b.offset, b.offset + b.size) for _, b in bound)
            if any(nxt[0] < prev[1] for prev, nxt in pairwise(spans)):
                return f"writable bindings overlap on page {page} of arena {arena!r}"
    return None
