"""What a kernel is, how its source is made from the file in `shaders/` and the prelude, and what one launch of it
looks like.

Conventions of every kernel:

* `@group(0) @binding(0)` is a uniform struct of u32 and f32 scalars, in the order of `Kernel.uniforms`.
* `@binding(1)`, `@binding(2)`, ... are storage buffers in the order of `Kernel.bindings`, seven at most.
* The entry point is `main`. Workgroup size and tile sizes are `override` constants; array lengths, which WGSL wants
  as constant expressions, are `const` lines that the prelude adds (`Kernel.defines`).
* Activations have the alias `act` (and `act2`, `act4` for vectors): f32, or f16 in mixed precision. Every store to
  an activation goes through `to_act` or `to_act4`, which in f16 raises a flag in `overflow_flags` (binding 8, added
  by the prelude) when the f32 value does not fit.
* `wide` is the unit in which a kernel moves data when `Kernel.vector` is set: vec4<f32> with 4, f32 with 1 (for
  lengths that are no multiple of four). `wide_act` is the same in activations, `to_wide_act` the checked store,
  `total(v)` the sum of its elements, WIDTH their number.
* `//#repeat i ROWS` ... `//#end` stands for its lines once for each i below the define ROWS, with `$i` replaced. It
  makes named registers where one would like an array, because drivers put an array that a loop indexes into memory.
* A grid of more than 65,535 workgroups is folded into y: kernels take their index from `workgroup_index(id, count)`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from hybrid.resources import resource

MAX_WORKGROUPS = 65_535
FLAGS_BINDING = 8
PRECISIONS = ("f32", "mixed-f16")


@dataclass(frozen=True)
class Binding:
    """One storage buffer: its name in the WGSL, access ("read" or "read_write") and element ("act", "f32" or
    "u32").
    """

    name: str
    access: str
    element: str


@dataclass(frozen=True)
class Kernel:
    """One compute pipeline: a WGSL file with the constants that specialise it.

    uniforms: (name, "u32" | "f32") in struct order. constants: `override` values. defines: `const NAME: u32 =
    value;` lines of the prelude. switches: text alternatives for bindings that exist only in some variants (`//#if
    NAME` ... `//#else` ... `//#endif` lines).
    """

    name: str
    file: str
    bindings: tuple[Binding, ...]
    uniforms: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, float], ...] = ()
    defines: tuple[tuple[str, int], ...] = ()
    switches: frozenset[str] = frozenset()
    workgroup_storage: int = 0  # bytes, for checking against limits
    invocations: int = 64  # threads of a workgroup
    vector: int = 0  # elements of `wide` (4 or 1); 0: the file does not use it
    features: tuple[str, ...] = ()  # WebGPU features beyond those of the precision, such as "subgroups"

    @property
    def stores_activations(self) -> bool:
        return any(b.element == "act" and b.access == "read_write" for b in self.bindings)

    def source(self, precision: str, writable: frozenset[int] = frozenset()) -> str:
        """The WGSL text for this precision: prelude, then the file with its switches resolved.

        writable: positions in `bindings` that the file declares `read` and this plan must declare `read_write`,
        because a page that they share with an output is written in the same dispatch.
        """
        text = resolve_switches(shader_text(self.file), self.switches, self.file)
        text = unroll(text, dict(self.defines), self.file)
        for position in writable:
            declaration = rf"(@binding\({position + 1}\)\s+var<storage,\s*)read(\s*>)"
            text, count = re.subn(declaration, r"\1read_write\2", text)
            if count != 1:
                raise ValueError(f"{self.name}: {self.file} declares binding {position + 1} as read {count} times")
        return prelude(precision, self.stores_activations, self.defines) + _WIDE[self.vector] + text


class Launch(NamedTuple):
    """One dispatch without its buffers: the kernel, the values of its uniforms in order, and the workgroup grid."""

    kernel: Kernel
    uniforms: tuple[float | int, ...]
    workgroups: tuple[int, int, int]


def grid(workgroups: int) -> tuple[int, int, int]:
    """`workgroups` in one line, folded into y beyond 65,535.

    Surplus groups must return early (`workgroup_index` >= count).
    """
    if workgroups <= MAX_WORKGROUPS:
        return (max(1, workgroups), 1, 1)
    rows = -(-workgroups // MAX_WORKGROUPS)
    return (-(-workgroups // rows), rows, 1)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def shader_text(file: str) -> str:
    return resource(f"shaders/{file}").read_text(encoding="utf-8")


def resolve_switches(text: str, switches: frozenset[str], file: str) -> str:
    """Keep or drop the lines between `//#if NAME`, `//#else` and `//#endif`. Blocks may nest."""
    kept: list[str] = []
    stack: list[bool] = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word.startswith("//#if "):
            stack.append(word.removeprefix("//#if ").strip() in switches)
        elif word == "//#else":
            stack[-1] = not stack[-1]
        elif word == "//#endif":
            if not stack:
                raise ValueError(f"{file}:{number}: //#endif without //#if")
            stack.pop()
        elif all(stack):
            kept.append(line)
    if stack:
        raise ValueError(f"{file}: //#if without //#endif")
    return "\n".join(kept) + "\n"


def unroll(text: str, counts: dict[str, int], file: str) -> str:
    """Write out the lines between `//#repeat i NAME` and `//#end` once for each i below `counts[NAME]`. Blocks may
    nest.

    `i` is one letter; `$i` becomes the number, also within a name.
    """
    blocks: list[tuple[str, str, list[str]]] = [("", "", [])]  # letter, name of the count, lines; the first is the file
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word.startswith("//#repeat "):
            _, letter, name = word.split()
            if len(letter) != 1 or name not in counts:
                raise ValueError(f"{file}:{number}: {word!r}: expected a letter and a define of {sorted(counts)}")
            blocks.append((letter, name, []))
        elif word == "//#end":
            if len(blocks) == 1:
                raise ValueError(f"{file}:{number}: //#end without //#repeat")
            letter, name, lines = blocks.pop()
            for i in range(counts[name]):
                blocks[-1][2].extend(inner.replace(f"${letter}", str(i)) for inner in lines)
        else:
            blocks[-1][2].append(line)
    if len(blocks) > 1:
        raise ValueError(f"{file}: //#repeat without //#end")
    return "\n".join(blocks[0][2]) + "\n"


def prelude(precision: str, stores_activations: bool, defines: tuple[tuple[str, int], ...]) -> str:
    """`enable` lines, element aliases, checked stores and constants that stand before every kernel file."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: expected one of {PRECISIONS}")
    half = precision == "mixed-f16"
    lines = ["enable f16;"] if half else []
    element = "f16" if half else "f32"
    lines += [f"alias act = {element};", f"alias act2 = vec2<{element}>;", f"alias act4 = vec4<{element}>;"]
    lines += [f"const {name}: u32 = {value}u;" for name, value in defines]
    if half and stores_activations:
        flags = "var<storage, read_write> overflow_flags: array<atomic<u32>>;"
        lines += [f"@group(0) @binding({FLAGS_BINDING}) {flags}", _CHECKED_STORES]
    else:
        lines += ["fn to_act(v: f32) -> act { return act(v); }", "fn to_act4(v: vec4<f32>) -> act4 { return act4(v); }"]
    lines.append("fn workgroup_index(id: vec3<u32>, count: vec3<u32>) -> u32 { return id.x + id.y * count.x; }\n")
    return "\n".join(lines)


# Drivers store inf, NaN or anything for an f32 beyond the f16 range, so the value is judged before it is converted.
# The exponent test also catches NaN and infinity, which WGSL lets a compiler assume away in floating-point
# comparisons.
_CHECKED_STORES = """\
fn fits_act(v: f32) -> bool { return (bitcast<u32>(v) & 0x7fffffffu) <= 0x477fe000u; }
fn to_act(v: f32) -> act {
  if (!fits_act(v)) { atomicOr(&overflow_flags[0], 1u); return act(0.0); }
  return act(v);
}
fn fits_act4(v: vec4<f32>) -> bool {
  return !any((bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x477fe000u));
}
fn to_act4(v: vec4<f32>) -> act4 {
  if (!fits_act4(v)) { atomicOr(&overflow_flags[0], 1u); return act4(); }
  return act4(v);
}"""

_WIDE = {
    0: "",
    1: """\
const WIDTH: u32 = 1u;
alias wide = f32;
alias wide_act = act;
fn to_wide_act(v: wide) -> wide_act { return to_act(v); }
fn total(v: wide) -> f32 { return v; }
""",
    4: """\
const WIDTH: u32 = 4u;
alias wide = vec4<f32>;
alias wide_act = act4;
fn to_wide_act(v: wide) -> wide_act { return to_act4(v); }
fn total(v: wide) -> f32 { return (v.x + v.y) + (v.z + v.w); }
""",
}


def vector_width(elements: int) -> int:
    """How many of `elements` consecutive numbers a thread moves at a time: 4 if they divide evenly, else 1."""
    return 4 if elements % 4 == 0 else 1


def source_hash(text: str) -> str:
    """The name of a source in the plan: sha256 of its UTF-8 text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
