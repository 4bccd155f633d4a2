"""Element by element: `elementwise.wgsl`, `add_noise.wgsl`, `dropout.wgsl`, `copy_columns.wgsl`.

All take the number of elements; one that divides by 4 moves four at a time.
"""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

_WORKGROUP = 64
_A = Binding("a", "read", "act")
_B = Binding("b", "read", "act")
_C = Binding("c", "read", "act")
_Y = Binding("y", "read_write", "act")
_Z = Binding("z", "read_write", "act")


def add(elements: int, *, precision: str, element: str = "act") -> Launch:
    """Bindings: a, b, y of `element`. y = a + b."""
    return _binary("add", elements, element)


def mul(elements: int, *, precision: str, element: str = "act") -> Launch:
    """Bindings: a, b, y of `element`. y = a * b."""
    return _binary("mul", elements, element)


def scale(elements: int, factor: float, *, precision: str, element: str = "act") -> Launch:
    """Bindings: a, y of `element`. y = factor * a."""
    bindings = (Binding("a", "read", element), Binding("y", "read_write", element))
    return _launch("scale" if element == "act" else "scale_f32", bindings, elements, factor)


def gelu(elements: int, *, precision: str) -> Launch:
    """Bindings: a, y. y = a/2 * (1 + tanh(sqrt(2/pi) * (a + 0.044715 a^3)))."""
    return _launch("gelu", (_A, _Y), elements)


def gelu_grad(elements: int, *, precision: str) -> Launch:
    """Bindings: a, b (the gradient of gelu(a)), y."""
    return _launch("gelu_grad", (_A, _B, _Y), elements)


def silu(elements: int, *, precision: str) -> Launch:
    """Bindings: a, y. y = a * sigmoid(a)."""
    return _launch("silu", (_A, _Y), elements)


def silu_grad(elements: int, *, precision: str) -> Launch:
    """Bindings: a, b (the gradient of silu(a)), y."""
    return _launch("silu_grad", (_A, _B, _Y), elements)


def relu2(elements: int, *, precision: str) -> Launch:
    """Bindings: a, y. y = max(a, 0)^2."""
    return _launch("relu2", (_A, _Y), elements)


def relu2_grad(elements: int, *, precision: str) -> Launch:
    """Bindings: a, b (the gradient of relu2(a)), y."""
    return _launch("relu2_grad", (_A, _B, _Y), elements)


def swiglu(elements: int, *, precision: str) -> Launch:
    """Bindings: a (gate), b (up), y. y = silu(a) * b."""
    return _launch("swiglu", (_A, _B, _Y), elements)


def swiglu_grad(elements: int, *, precision: str) -> Launch:
    """Bindings: a (gate), b (up), c (gradient), y (gradient of the gate), z (gradient of up)."""
    return _launch("swiglu_grad", (_A, _B, _C, _Y, _Z), elements)


def broadcast(elements: int, *, precision: str) -> Launch:
    """Bindings: a f32 [1], y f32 [elements]. y = a[0]."""
    return _launch("broadcast", (Binding("a", "read", "f32"), Binding("y", "read_write", "f32")), elements)


def cast(elements: int, *, to: str, precision: str) -> Launch:
    """Bindings: a, y: from act to f32 (`to` = "f32") or from f32 to act (`to` = "act")."""
    source, name = ("f32", "cast_act") if to == "act" else ("act", "cast_f32")
    return _launch(name, (Binding("a", "read", source), Binding("y", "read_write", to)), elements)


def add_noise(elements: int, *, precision: str) -> Launch:
    """Bindings: x act, noise f32, levels f32 [2], y act. y = levels[0] * x + levels[1] * noise."""
    bindings = (Binding("x", "read", "act"), Binding("noise", "read", "f32"), Binding("levels", "read", "f32"), _Y)
    return _noise("add_noise", bindings, frozenset(), elements, 0)


def add_noise_grad(elements: int, *, level: int, to: str, precision: str) -> Launch:
    """Bindings: dy act, levels f32 [2], result of element `to`. result = levels[level] * dy."""
    bindings = (Binding("dy", "read", "act"), Binding("levels", "read", "f32"), Binding("result", "read_write", to))
    switches = frozenset({"GRADIENT", *(["TO_F32"] if to == "f32" else [])})
    return _noise(f"add_noise_grad_{to}", bindings, switches, elements, level)


def _noise(name: str, bindings: tuple[Binding, ...], switches: frozenset[str], elements: int, level: int) -> Launch:
    width = vector_width(elements)
    kernel = Kernel(
        f"{name}_x{width}",
        "add_noise.wgsl",
        bindings,
        (("count", "u32"), ("level", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=switches,
        invocations=_WORKGROUP,
        vector=width,
    )
    return Launch(kernel, (elements // width, level), grid(ceil_div(elements // width, _WORKGROUP)))


def dropout(samples: int, elements: int, *, site: int, rate: float, precision: str) -> Launch:
    """Bindings: x act [samples, elements], sample_ids u32 [samples], data_step u32 [1], dropout_keys u32 [S, 2], y.

    Element e of sample j is kept when word e mod 4 of Philox block (e / 4, j, data step, 0), under the site's key,
    is at least rate * 2^32; kept elements are divided by 1 - rate.
    """
    bindings = (
        Binding("x", "read", "act"),
        Binding("sample_ids", "read", "u32"),
        Binding("data_step", "read", "u32"),
        Binding("dropout_keys", "read", "u32"),
        _Y,
    )
    uniforms = (
        ("samples", "u32"),
        ("elements", "u32"),
        ("blocks", "u32"),
        ("site", "u32"),
        ("threshold", "u32"),
        ("factor", "f32"),
    )
    kernel = Kernel(
        "dropout", "dropout.wgsl", bindings, uniforms, defines=(("WORKGROUP", _WORKGROUP),), invocations=_WORKGROUP
    )
    blocks = ceil_div(elements, 4)
    values = (samples, elements, blocks, site, int(rate * 2**32), 1.0 / (1.0 - rate))
    return Launch(kernel, values, grid(ceil_div(samples * blocks, _WORKGROUP)))


def copy_columns(
    rows: int,
    columns: int,
    *,
    source_width: int,
    source_first: int,
    target_width: int,
    target_first: int,
    precision: str,
    element: str = "act",
) -> Launch:
    """Bindings: x [rows, source_width], y [rows, target_width] of `element`.

    y[:, target_first : target_first + columns] = x[:, source_first : source_first + columns].
    """
    names = ("rows", "columns", "source_width", "source_first", "target_width", "target_first")
    kernel = Kernel(
        "copy_columns" if element == "act" else "copy_columns_f32",
        "copy_columns.wgsl",
        (Binding("x", "read", element), Binding("y", "read_write", element)),
        tuple((n, "u32") for n in names),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({element.upper()}),
        invocations=_WORKGROUP,
    )
    values = (rows, columns, source_width, source_first, target_width, target_first)
    return Launch(kernel, values, grid(ceil_div(rows * columns, _WORKGROUP)))


def _binary(name: str, elements: int, element: str) -> Launch:
    bindings = tuple(Binding(n, "read_write" if n == "y" else "read", element) for n in "aby")
    return _launch(name if element == "act" else f"{name}_f32", bindings, elements)


def _launch(name: str, bindings: tuple[Binding, ...], elements: int, factor: float = 0.0) -> Launch:
    width = vector_width(elements)
    kernel = Kernel(
        name=f"{name}_x{width}",
        file="elementwise.wgsl",
        bindings=bindings,
        uniforms=(("count", "u32"), ("factor", "f32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset(
            {
                name.upper(),
                {2: "UNARY", 3: "BINARY", 5: "GATED"}[len(bindings)],
                f"FROM_{bindings[0].element.upper()}",
                f"TO_{bindings[-1].element.upper()}",
            }
        ),
        invocations=_WORKGROUP,
        vector=width,
    )
    return Launch(kernel, (elements // width, factor), grid(ceil_div(elements // width, _WORKGROUP)))
