"""The rules that every shader keeps, checked on the text that a driver gets.

They exist because drivers differ where WGSL lets them: see `shaders/README.md`.
"""

from __future__ import annotations

import re
from math import prod

import pytest

from hybrid.plan.kernels.base import FLAGS_BINDING, PRECISIONS, Kernel
from hybrid.resources import resource
from shaders.catalogue import launches

KERNELS = {
    (precision, launch.kernel): None for precision in PRECISIONS for launch in launches(precision)
}  # a dict keeps the order and drops repetitions
CASES = [pytest.param(kernel, precision, id=f"{kernel.name}-{precision}") for precision, kernel in KERNELS]
DECLARATION = re.compile(r"@group\(0\) @binding\((\d+)\) var<storage, (read|read_write)> (\w+): array<([\w<>]+)>;")
CHECKED_STORES = ("to_act(", "to_act4(", "to_wide_act(", "to_c(")


def code(kernel: Kernel, precision: str) -> str:
    """The source without comments."""
    return re.sub(r"//[^\n]*", "", kernel.source(precision))


def test_every_shader_file_is_in_the_catalogue():
    files = {path.name for path in resource("shaders").glob("*.wgsl")}
    assert files == {kernel.file for _, kernel in KERNELS}


def test_a_kernel_name_means_one_pipeline():
    for precision in PRECISIONS:
        meaning: dict[str, tuple[object, ...]] = {}
        for p, kernel in KERNELS:
            if p == precision:
                pipeline = (kernel.source(p), kernel.constants, kernel.bindings, kernel.uniforms)
                assert meaning.setdefault(kernel.name, pipeline) == pipeline, kernel.name


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_bindings_and_uniforms_are_what_the_launcher_says(kernel, precision):
    source = code(kernel, precision)
    declared = {int(n): (name, access) for n, access, name, _ in DECLARATION.findall(source)}
    flags = declared.pop(FLAGS_BINDING, None)
    assert list(declared) == list(range(1, len(kernel.bindings) + 1))
    assert [declared[n] for n in declared] == [(b.name, b.access) for b in kernel.bindings]
    assert (flags is not None) == (precision == "mixed-f16" and kernel.stores_activations)
    struct = re.search(r"struct Uniforms \{(.*?)\}", source, re.DOTALL)
    fields = re.findall(r"(\w+): (u32|f32)", struct.group(1)) if struct else []
    assert tuple(fields) == kernel.uniforms


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_a_kernel_fits_the_default_limits(kernel, precision):
    assert len(kernel.bindings) <= 7
    assert kernel.invocations <= 256
    source = code(kernel, precision)
    values = dict((*kernel.defines, *kernel.constants))
    size = re.search(r"@workgroup_size\(([^)]*)\)", source).group(1)
    assert prod(values.get(word) or int(word) for word in re.findall(r"\w+", size)) == kernel.invocations
    assert kernel.workgroup_storage <= 16_384
    assert bool(kernel.workgroup_storage) == ("var<workgroup>" in source)


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_functions_that_drivers_get_wrong_are_not_used(kernel, precision):
    source = code(kernel, precision)
    assert not re.search(r"\b(sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|pow)\s*\(", source)
    for argument in re.findall(r"\btanh\s*\(([^;]*)", source):
        assert re.match(r"clamp\([^,]+, \S*-15\.0\)?, \S*15\.0\)", argument), f"unclamped tanh({argument}"


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_nothing_relies_on_nan_or_infinity(kernel, precision):
    source = code(kernel, precision)
    for left, right in re.findall(r"([\w.\[\]]+)\s*[!=]=\s*([\w.\[\]]+)", source):
        assert left != right, f"{left} compared with itself"
    assert not re.search(r"\b(inf|infinity|nan|isnan|isinf)\b", source, re.IGNORECASE)
    assert not re.search(r"bitcast<f32>\(0x[7f]f[89a-f]", source, re.IGNORECASE)
    assert not re.search(r"/\s*0\.0\b", source)
    for literal in re.findall(r"\b\d+(?:\.\d*)?e\+?\d+", source):
        assert float(literal) <= 3.4028235e38, literal


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_floats_are_never_added_atomically(kernel, precision):
    text = "\n".join(line for line in code(kernel, precision).splitlines() if "overflow_flags" not in line)
    assert "atomic" not in text


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_every_activation_is_stored_through_the_range_check(kernel, precision):
    source = code(kernel, precision)
    for binding in kernel.bindings:
        if binding.element == "act" and binding.access == "read_write":
            stores = re.findall(rf"\b{binding.name}\[[^=;]*\]\s*([-+*/]?)=(?!=)\s*([^;]*)", source)
            assert stores, f"{binding.name} is never written"
            for operator, value in stores:
                assert not operator, f"{binding.name} {operator}= {value} adds in f16"
                assert value.startswith(CHECKED_STORES), f"{binding.name} = {value}"


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_sums_are_kept_in_f32(kernel, precision):
    body = kernel.source(precision).split("struct Uniforms", 1)[-1]
    assert not re.search(r"\bvar(<workgroup>)? \w+\s*(:\s*(array<)?(act|f16|wide_act)|=\s*(act|wide_act)\d?\()", body)


@pytest.mark.parametrize("path", sorted(resource("shaders").glob("*.wgsl")), ids=lambda p: p.name)
def test_a_file_leaves_enable_lines_to_the_prelude_and_says_what_it_computes(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^\s*enable ", text, re.MULTILINE)
    assert text.startswith("// ")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.webgpu
@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_naga_accepts_every_kernel(kernel, precision, device, request):
    if precision == "mixed-f16":
        request.getfixturevalue("f16_device")
    device.device.create_shader_module(code=kernel.source(precision), label=kernel.name)
