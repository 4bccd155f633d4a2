"""Matrix products with fused epilogues: `matmul.wgsl`, and `matmul_any.wgsl` for awkward shapes.

    form "nt": C[M, N] = A[M, K] * B[N, K]^T     linear forward: x, weight [out, in]
    form "nn": C[M, N] = A[M, K] * B[K, N]       gradient of the input: dy, weight
    form "tn": C[M, N] = A[K, M]^T * B[K, N]     gradient of the weight: dy, x

C = product (+ bias per column) (+ residual, laid out like C) (+ C itself). Elements are "act" or "f32" each; sums are
f32. Every variant of a shape adds the same terms in the same order: four along K at a time, in ascending K. A variant
is therefore a choice of speed, and a product is repeatable bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid

FORMS = ("nt", "nn", "tn")
_UNIFORMS = tuple(
    (name, "u32") for name in ("m", "n", "k", "lda", "ldb", "ldc", "a_offset", "b_offset", "c_offset", "accumulate")
)


@dataclass(frozen=True)
class Variant:
    """How a product is cut into blocks of 4 x 4, threads and workgroups; `matmul.wgsl` says what each part does.

    rows, columns: outputs of one thread. threads_m, threads_n: the workgroup. lanes: how many lanes of a subgroup
    share their loads of A, the least subgroup size that the variant runs with; 0 for no subgroup operations. step:
    how much of K the workgroup copies to workgroup memory at a time; 0 for none.
    """

    rows: int
    columns: int
    threads_m: int
    threads_n: int
    lanes: int = 0
    step: int = 0

    @property
    def invocations(self) -> int:
        return self.threads_m * self.threads_n

    @property
    def workgroup_storage(self) -> int:
        """Bytes."""
        return 4 * self.step * (self.rows * self.threads_m + self.columns * self.threads_n)


# r: registers only. s: subgroup broadcasts among so many lanes. t: tiles in workgroup memory.
VARIANTS: dict[str, Variant] = {
    "r4x4": Variant(4, 4, 4, 8),
    "r8x8": Variant(8, 8, 1, 8),
    "r16x8": Variant(16, 8, 1, 8),
    "r16x16": Variant(16, 16, 1, 8),
    "s4_16x4": Variant(16, 4, 1, 8, lanes=4),
    "s4_32x8": Variant(32, 8, 1, 8, lanes=4),
    "s8_16x4": Variant(16, 4, 1, 8, lanes=8),
    "s8_32x4": Variant(32, 4, 1, 8, lanes=8),
    "s8_32x8": Variant(32, 8, 1, 8, lanes=8),
    "t32": Variant(4, 4, 8, 8, step=16),
    "t64": Variant(8, 8, 8, 8, step=16),
    "t64_wide": Variant(4, 4, 16, 16, step=16),
    "t128x64": Variant(8, 4, 16, 16, step=16),
}
_ANY = {"any1x4": Variant(1, 4, 1, 32), "any4x4": Variant(4, 4, 4, 8)}


def product(
    form: str,
    m: int,
    n: int,
    k: int,
    *,
    a: str = "act",
    b: str = "act",
    c: str = "act",
    bias: bool = False,
    residual: bool = False,
    accumulate: bool = False,
    lda: int | None = None,
    ldb: int | None = None,
    ldc: int | None = None,
    a_offset: int = 0,
    b_offset: int = 0,
    c_offset: int = 0,
    variant: str | None = None,
    precision: str,
) -> Launch:
    """One product. Bindings: a, b, (bias f32 [N]), (residual act, leading dimension and offset of C), c.

    lda, ldb, ldc: elements from one row of the stored matrix to the next (default: its width). Offsets in elements.
    variant: a name of VARIANTS; where the shape does not allow it (widths, leading dimensions or offsets that are no
    multiples of 4, or fewer than 4 rows) the fallback is used whatever the name. ValueError for anything unknown.
    """
    _check(form, m, n, k, a, b, c)
    lda = lda or (m if form == "tn" else k)
    ldb = ldb or (k if form == "nt" else n)
    ldc = ldc or n
    bindings = [Binding("a", "read", a), Binding("b", "read", b)]
    switches = {form.upper()}
    if bias:
        bindings.append(Binding("bias", "read", "f32"))
        switches.add("BIAS")
    if residual:
        bindings.append(Binding("residual", "read", "act"))
        switches.add("RESIDUAL")
    bindings.append(Binding("c", "read_write", c))
    switches |= {f"{name}_F32" for name, element in (("A", a), ("B", b), ("C", c)) if element == "f32"}

    sizes = (m, n, k, lda, ldb, ldc, a_offset, b_offset, c_offset)
    if not _vectors(form, *sizes):
        return _fallback(form, bindings, switches, sizes, accumulate)
    name = variant or variants(form, m, n, k)[0]
    if name not in VARIANTS:
        raise ValueError(f"matrix product variant {name!r}: expected one of {', '.join(VARIANTS)}")
    cut = VARIANTS[name]
    shared = max(1, cut.lanes // 4)
    title = _name(form, name, switches)
    switches |= ({"SUBGROUPS"} if cut.lanes else set()) | ({"TILES"} if cut.step else set())
    switches |= {"HALF"} if precision == "mixed-f16" else set()
    kernel = Kernel(
        name=title,
        file="matmul.wgsl",
        bindings=tuple(bindings),
        uniforms=_UNIFORMS,
        defines=(
            ("ROW_LOADS", cut.rows // 4 // shared),
            ("BLOCKS_A_LOAD", shared),
            ("COLUMN_BLOCKS", cut.columns // 4),
            ("THREADS_M", cut.threads_m),
            ("THREADS_N", cut.threads_n),
            *((("STEP", cut.step),) if cut.step else ()),
        ),
        switches=frozenset(switches),
        workgroup_storage=cut.workgroup_storage,
        invocations=cut.invocations,
        features=("subgroups",) if cut.lanes else (),
    )
    return Launch(kernel, (*sizes, int(accumulate)), _grid(cut, m, n))


def variants(form: str, m: int, n: int, k: int, *, subgroup_size: int = 0, cpu: bool | None = None) -> tuple[str, ...]:
    """The sensible variants for this shape, best guess first: two or three, and of a tiny product only the guess. All
    need at most 256 invocations and 16 KiB.

    subgroup_size: the measured one; 0 for a device or compiler without subgroup operations. cpu: whether the adapter
    is a CPU driver; None when nobody knows.
    """
    size = _size(m, n, k)
    tiled = ("t64", "t32") if size == "large" else ("t32", "t64")
    # On CPU drivers 32 x 8 is fastest from some millions of terms on, by a tenth to a third, and compiles in twice the
    # time: where products are large that is soon won back.
    if subgroup_size >= 8:
        others = {"medium": ("s8_32x4", "s8_16x4"), "large": ("s8_32x8", "s8_32x4")}.get(size, ("s8_16x4", "r8x8"))
    elif subgroup_size >= 4:
        others = {"medium": ("s4_16x4", "s4_32x8"), "large": ("s4_32x8", "s4_16x4")}.get(size, ("s4_16x4", "r8x8"))
    else:
        others = {"medium": ("r8x8", "r16x8"), "large": ("r8x8", "r16x8")}.get(size, ("r8x8", "r4x4"))
    if cpu is False:
        offered: tuple[str, ...] = (*tiled, "r8x8")
    else:
        offered = others if cpu else (others[0], tiled[0], others[1])
    return offered[:1] if size == "tiny" else offered


def tune_variants(
    form: str, m: int, n: int, k: int, *, subgroup_size: int = 0, cpu: bool | None = None
) -> tuple[str, ...]:
    """What `hybrid tune` tries: every variant that runs with this subgroup size, the likely ones first."""
    likely = variants(form, m, n, k, subgroup_size=subgroup_size, cpu=cpu)
    return likely + tuple(name for name, v in VARIANTS.items() if v.lanes <= subgroup_size and name not in likely)


def product_class(form: str, m: int, n: int, k: int, *, a: str = "act", b: str = "act", c: str = "act") -> str:
    """The name under which the fastest variant is remembered: form, elements and size.

    `variants` offers the same names to every shape of a class.
    """
    return f"matmul.{form}.{a}.{b}.{c}.{_size(m, n, k)}"


def _size(m: int, n: int, k: int) -> str:
    """Shapes of one size like the same tiles. Where tiles hang over the last row much of their work is for nothing,
    which hardly depends on the rest; and only large products fill a GPU with large tiles. A tiny one is over before a
    clock that waits for the device could tell variants apart."""
    work = m * n * k
    if work < 1 << 20:
        return "tiny"
    if m <= 16:
        return "few_rows"
    return "medium" if work < 1 << 26 else "large"


def _check(form: str, m: int, n: int, k: int, a: str, b: str, c: str) -> None:
    if form not in FORMS:
        raise ValueError(f"matrix product form {form!r}: expected one of {FORMS}")
    if min(m, n, k) < 1:
        raise ValueError(f"matrix product {m} x {n} x {k}: every size must be at least 1")
    for name, element in (("a", a), ("b", b), ("c", c)):
        if element not in ("act", "f32"):
            raise ValueError(f"matrix product element of {name} {element!r}: expected 'act' or 'f32'")


def _vectors(
    form: str, m: int, n: int, k: int, lda: int, ldb: int, ldc: int, a_offset: int, b_offset: int, c_offset: int
) -> bool:
    """Whether everything can move as vec4."""
    if any(x % 4 for x in (n, k, lda, ldb, ldc, a_offset, b_offset, c_offset)):
        return False
    return lda >= ceil_div(m, 4) * 4 if form == "tn" else m >= 4


def _fallback(
    form: str, bindings: list[Binding], switches: set[str], sizes: tuple[int, ...], accumulate: bool
) -> Launch:
    """The kernel without preconditions; `wide` along K (nt) or N (nn, tn) when that dimension allows it."""
    m, n, k, lda, ldb, ldc, a_offset, b_offset, c_offset = sizes
    wide = (k, lda, ldb, a_offset, b_offset) if form == "nt" else (n, ldb, ldc, b_offset, c_offset)
    width = 1 if any(x % 4 for x in wide) else 4
    if form == "nt":
        k, lda, ldb, a_offset, b_offset = (x // width for x in wide)
    else:
        n, ldb, ldc, b_offset, c_offset = (x // width for x in wide)
    name = "any1x4" if m < 4 else "any4x4"
    cut = _ANY[name]
    kernel = Kernel(
        name=_name(form, f"{name}_x{width}", switches),
        file="matmul_any.wgsl",
        bindings=tuple(bindings),
        uniforms=_UNIFORMS,
        defines=(
            ("ROWS", cut.rows),
            ("COLUMNS", cut.columns),
            ("THREADS_M", cut.threads_m),
            ("THREADS_N", cut.threads_n),
        ),
        switches=frozenset(switches),
        invocations=cut.invocations,
        vector=width,
    )
    uniforms = (m, n, k, lda, ldb, ldc, a_offset, b_offset, c_offset, int(accumulate))
    return Launch(kernel, uniforms, _grid(cut, m, n))


def _grid(cut: Variant, m: int, n: int) -> tuple[int, int, int]:
    return grid(ceil_div(m, cut.rows * cut.threads_m) * ceil_div(n, cut.columns * cut.threads_n))


def _name(form: str, variant: str, switches: set[str]) -> str:
    """`matmul_nt_r8x8`, then what differs from act elements without epilogue."""
    order = ("A_F32", "B_F32", "C_F32", "BIAS", "RESIDUAL")
    return "_".join(("matmul", form, variant, *(s.lower().replace("_", "") for s in order if s in switches)))
