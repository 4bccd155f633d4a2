"""Matrix products against float64: every form, variant, epilogue, mix of elements and awkward shape."""

from __future__ import annotations

from itertools import cycle, product

import numpy as np
import pytest

from hybrid.backends.webgpu.device import probe_subgroup_size
from hybrid.plan.kernels import matmul
from hybrid.plan.kernels.base import MAX_WORKGROUPS
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu
FORMS = matmul.FORMS
ODD = [(1, 1, 1), (3, 5, 7), (33, 65, 127), (65, 7, 33), (127, 3, 5), (5, 127, 1), (1, 65, 64), (7, 64, 33)]
EVEN = [(4, 4, 4), (33, 36, 40), (64, 128, 32), (130, 20, 64), (7, 260, 12)]
EPILOGUES = [
    ("", ("f32", "act", "act")),
    ("bias", ("act", "act", "act")),
    ("accumulate", ("act", "act", "f32")),
    ("residual", ("act", "act", "act")),
    ("bias residual accumulate", ("f32", "f32", "f32")),
    ("bias residual accumulate", ("act", "f32", "act")),
]


def _matrices(form: str, m: int, n: int, k: int, elements: tuple[str, str, str], precision: str):
    """a, b, c as their elements hold them."""
    rng = np.random.default_rng(m * 10007 + n * 101 + k)
    shapes = ((k, m) if form == "tn" else (m, k), (n, k) if form == "nt" else (k, n), (m, n))
    return [
        stored(rng.normal(size=shape), precision if element == "act" else "f32")
        for shape, element in zip(shapes, elements, strict=True)
    ]


def _product(form: str, a, b):
    return (a.T if form == "tn" else a) @ (b.T if form == "nt" else b)


@pytest.mark.parametrize("shape", ODD + EVEN, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_gives_the_product(form, shape, precision):
    a, b, c = _matrices(form, *shape, ("act", "act", "f32"), precision)
    (got,) = run(matmul.product(form, *shape, c="f32", precision=precision), [a, b, c], precision)
    assert_close(got, _product(form, a, b), precision)


@pytest.mark.parametrize(("epilogue", "elements"), EPILOGUES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(20, 36, 24), (9, 10, 11)], ids=["vectors", "scalars"])
def test_epilogues_add_in_f32_before_the_one_rounding(shape, form, epilogue, elements, precision):
    m, n, k = shape
    a, b, c = _matrices(form, *shape, elements, precision)
    rng = np.random.default_rng(5)
    bias, residual = stored(rng.normal(size=n), "f32"), stored(rng.normal(size=(m, n)), precision)
    parts = {"bias": bias, "residual": residual, "accumulate": c}
    wanted = epilogue.split()
    launch = matmul.product(
        form, m, n, k, a=elements[0], b=elements[1], c=elements[2], precision=precision, **dict.fromkeys(wanted, True)
    )
    arrays = [a, b, *(parts[name] for name in wanted if name != "accumulate"), c]
    (got,) = run(launch, arrays, precision)
    expected = _product(form, a, b) + sum(parts[name] for name in wanted)
    assert_close(got, expected, precision)
    if elements[2] == "act":  # rounded once: as near to the exact sum as its element allows, but for f32 noise
        nearest = np.abs(stored(expected, precision) - expected)
        assert np.all(np.abs(got - expected) <= nearest + 1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("precision", ["f32"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", matmul.VARIANTS)
def test_every_variant_gives_the_same_bits(name, form, precision, device):
    """So that the choice of a variant cannot change a run."""
    _check_variant(name, form, precision, device)


@pytest.mark.parametrize("precision", ["mixed-f16"], indirect=True)
@pytest.mark.parametrize(("name", "form"), list(zip(matmul.VARIANTS, cycle(FORMS), strict=False)))
def test_every_variant_gives_the_same_bits_from_halves(name, form, precision, device):
    _check_variant(name, form, precision, device)


def _check_variant(name: str, form: str, precision: str, device) -> None:
    if (lanes := matmul.VARIANTS[name].lanes) > (probe_subgroup_size(device) or 0):
        pytest.skip(f"{device.name} has subgroups of less than {lanes}")
    m, n, k = 70, 76, 44
    a, b, c = _matrices(form, m, n, k, ("act", "act", "f32"), precision)
    if form == "tn":  # rows of A that end inside a vec4
        a = np.pad(a, ((0, 0), (0, 2)))
    options = {"c": "f32", "lda": a.shape[1], "precision": precision}
    (first,), (second,), (other,) = (
        run(matmul.product(form, m, n, k, variant=v, **options), [a, b, c], precision) for v in (name, name, "r8x8")
    )
    assert_close(first, _product(form, a, b)[:m], precision)
    assert np.array_equal(first, second), "two runs differ"
    assert np.array_equal(first, other), "differs from another variant"


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_larger_matrices_are_read_and_written_in_place(form, step, precision):
    """`step` 4 keeps everything on vec4 boundaries, 1 does not."""
    m, n, k = 12, 8, 20
    elements = ("act", "act", "act")
    rows, columns = 3, 2 * step
    parts = _matrices(form, m, n, k, elements, precision)
    whole = [np.full((p.shape[0] + rows, p.shape[1] + 3 * step), 9.0) for p in parts]
    for big, part in zip(whole, parts, strict=True):
        big[rows:, columns : columns + part.shape[1]] = part
    leading = [big.shape[1] for big in whole]
    offset = [rows * width + columns for width in leading]
    launch = matmul.product(
        form, m, n, k, precision=precision,
        lda=leading[0], ldb=leading[1], ldc=leading[2], a_offset=offset[0], b_offset=offset[1], c_offset=offset[2],
    )  # fmt: skip
    (got,) = run(launch, whole, precision)
    expected = whole[2].copy()
    expected[rows:, columns : columns + n] = _product(form, parts[0], parts[1])
    assert_close(got, expected, precision)
    untouched = np.ones(got.shape, bool)
    untouched[rows:, columns : columns + n] = False
    assert np.all(got[untouched] == 9.0)


def test_rows_beyond_65535_workgroups_are_folded():
    m, n, k = MAX_WORKGROUPS + 9, 1, 1
    launch = matmul.product("nt", m * 16, n, k, precision="f32")
    assert max(launch.workgroups) <= MAX_WORKGROUPS < launch.workgroups[0] * launch.workgroups[1]
    a = np.arange(m * 16, dtype=np.float32)[:, None] % 1000
    (got,) = run(launch, [a, np.full((1, 1), 2.0), np.zeros((m * 16, 1))])
    assert np.array_equal(got, 2 * a)


@pytest.mark.parametrize("shape", [(8, 8, 8), (3, 3, 3)], ids=["vectors", "scalars"])
def test_a_sum_beyond_f16_raises_the_flag_and_stores_no_infinity(shape, precision):
    m, n, k = shape
    a, b, c = np.full((m, k), 200.0), np.full((n, k), 200.0), np.zeros((m, n))
    launch = matmul.product("nt", m, n, k, precision=precision)
    outputs = run(launch, [a, b, c], precision)
    assert np.all(np.isfinite(outputs[0]))
    assert outputs.overflow == (precision == "mixed-f16")


def test_suggested_variants_exist_and_fit_the_default_limits():
    for m, n, k in [(256, 128, 128), (4, 4, 4), (16, 512, 256), (512, 768, 3072), (4096, 50304, 768)]:
        for subgroup_size in (0, 4, 8, 32):
            for cpu in (None, True, False):
                names = matmul.variants("nt", m, n, k, subgroup_size=subgroup_size, cpu=cpu)
                assert len(names) == 1 if m == 4 else 2 <= len(names) <= 4, "a tiny product is not worth timing"
                assert len(set(names)) == len(names)
                tuned = matmul.tune_variants("nt", m, n, k, subgroup_size=subgroup_size, cpu=cpu)
                assert len(tuned) >= 6 and set(names) <= set(tuned)
                for name in tuned:
                    variant = matmul.VARIANTS[name]
                    assert variant.invocations <= 256 and variant.workgroup_storage <= 16 * 1024
                    assert variant.lanes <= subgroup_size


def test_all_shapes_of_a_class_are_offered_the_same_variants():
    """So that a winner found with one of them is known to the others."""
    offered: dict[str, set[tuple[str, ...]]] = {}
    sizes = (1, 4, 16, 17, 64, 256, 1000, 4096, 50304)
    for m, n, k in product(sizes, sizes, (1, 64, 768)):
        name = matmul.product_class("nt", m, n, k)
        offered.setdefault(name, set()).add(matmul.variants("nt", m, n, k, subgroup_size=8))
    assert len(offered) == 4
    assert all(len(names) == 1 for names in offered.values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"form": "tt"}, "'tt'"),
        ({"m": 0}, "0 x 8 x 8"),
        ({"a": "f64"}, "'f64'"),
        ({"variant": "r9x9"}, "'r9x9'"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(arguments, named):
    call = {"form": "nt", "m": 8, "n": 8, "k": 8, "precision": "f32", **arguments}
    with pytest.raises(ValueError, match=named):
        matmul.product(**call)
