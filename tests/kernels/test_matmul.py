"""Matrix products against float64: every form, epilogue, mix of elements and odd shape."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.backends.webgpu.device import probe_subgroup_size
from hybrid.plan.kernels import matmul
from kernels.harness import assert_close, run, shared_device, stored

pytestmark = pytest.mark.webgpu
FORMS = matmul.FORMS
ODD = [(1, 1, 1), (3, 5, 7), (33, 65, 127), (65, 7, 33), (127, 3, 5), (5, 127, 1), (1, 65, 64), (7, 64, 33)]
EVEN = [(4, 4, 4), (33, 36, 40), (64, 128, 32), (130, 20, 64), (7, 260, 12)]


def _matrices(form: str, m: int, n: int, k: int, elements: tuple[str, str, str], precision: str):
    rng = np.random.default_rng(m * 10007 + n * 101 + k)

    def make(shape, element):
        return stored(rng.normal(size=shape), precision if element == "act" else "f32")

    a = make((k, m) if form == "tn" else (m, k), elements[0])
    b = make((n, k) if form == "nt" else (k, n), elements[1])
    c = make((m, n), elements[2])
    return a, b, c


def _expected(form: str, a, b):
    return (a.T if form == "tn" else a) @ (b.T if form == "nt" else b)


@pytest.mark.parametrize("shape", ODD + EVEN, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_shape_gives_the_product(form, shape, precision):
    a, b, c = _matrices(form, *shape, ("act", "act", "f32"), precision)
    launch = matmul.product(form, *shape, c="f32", precision=precision)
    (got,) = run(launch, [a, b, c], precision)
    assert_close(got, _expected(form, a, b), precision)


ELEMENTS = [("act", "act", "act"), ("f32", "act", "act"), ("act", "act", "f32"), ("f32", "f32", "f32")]
EPILOGUES = ("", "bias", "accumulate", "bias residual accumulate")


@pytest.mark.parametrize("elements", ELEMENTS, ids="-".join)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(20, 36, 24), (9, 10, 11)], ids=["vectors", "scalars"])
def test_epilogues_add_in_f32_before_the_one_rounding(shape, form, epilogue, elements, precision):
    m, n, k = shape
    a, b, c = _matrices(form, *shape, elements, precision)
    rng = np.random.default_rng(5)
    bias = rng.normal(size=n).astype(np.float32).astype(np.float64)
    residual = stored(rng.normal(size=(m, n)), precision)
    words = epilogue.split()
    expected = _expected(form, a, b) + ("bias" in words) * bias + ("residual" in words) * residual
    expected += ("accumulate" in words) * c
    launch = matmul.product(
        form, m, n, k, a=elements[0], b=elements[1], c=elements[2], precision=precision,
        bias="bias" in words, residual="residual" in words, accumulate="accumulate" in words,
    )  # fmt: skip
    arrays = [a, b, *([bias] if "bias" in words else []), *([residual] if "residual" in words else []), c]
    (got,) = run(launch, arrays, precision)
    assert_close(got, expected, precision)


def _runs_here(name: str) -> bool:
    lanes = matmul.VARIANTS[name].lanes
    return lanes <= (probe_subgroup_size(shared_device()) or 0) if lanes else True


@pytest.mark.parametrize("name", matmul.VARIANTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_variant_gives_the_same_bits(form, name, precision):
    """So that the choice of a variant cannot change a run."""
    m, n, k = 70, 76, 44
    a, b, c = _matrices(form, m, n, k, ("act", "act", "f32"), precision)
    if form == "tn":
        a = np.pad(a, ((0, 0), (0, 2)))
    lda = a.shape[1]
    if not _runs_here(name):
        return
    results = [
        run(matmul.product(form, m, n, k, c="f32", lda=lda, variant=v, precision=precision), [a, b, c], precision)[0]
        for v in (name, "r8x8")
    ]
    assert_close(results[0], _expected(form, a, b)[:m], precision)
    assert np.array_equal(*results)
