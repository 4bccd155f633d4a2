"""Each op over torch gives the values and gradients of the reference, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.backends.reference import kernels
from hybrid.backends.torch import attention, head, philox
from hybrid.backends.torch.ops import Microbatch, TorchOps
from hybrid.data.batch import IGNORE
from hybrid.ops import Linear, Norm, OpError
from hybrid.random.streams import stream_key
from ops.cases import CASES, Array, Case, random_arrays, run, traced, upstream_weights

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5  # norm of the difference over norm: the contract for one op in f32


def relative_error(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / max(float(np.linalg.norm(expected)), 1.0))


def tensors(arrays: dict[str, Array], **options: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array.astype(np.float32), **options) for name, array in arrays.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradient_equal_the_reference(case: Case) -> None:
    it = traced(case, "f32")
    parameters, floats = random_arrays(case, 3)
    upstream = upstream_weights(case, it, 4)
    outputs, gradients = run(it, parameters, floats, upstream)

    leaves = tensors({**parameters, **floats}, requires_grad=True)
    ids = {name: torch.tensor(array.astype(np.int64)) for name, array in case.ids.items()}
    result = case.trace(TorchOps(), {**leaves, **ids, **tensors(case.fixed)})
    results = result if isinstance(result, tuple) else (result,)
    torch.autograd.backward(results, [torch.tensor(w.astype(np.float32)) for w in upstream])
    for got, want in zip(results, outputs, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got.detach().numpy(), want) < TOLERANCE
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert relative_error(leaf.grad.numpy(), gradients[name]) < TOLERANCE, name


@pytest.mark.parametrize("precision", ["mixed-f16", "mixed-bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mixed_precision_rounds_activations_and_computes_in_f32(case: Case, precision: str) -> None:
    act, unit = {"mixed-f16": (torch.float16, 2e-3), "mixed-bf16": (torch.bfloat16, 2e-2)}[precision]
    it = traced(case, "f32")
    parameters, floats = random_arrays(case, 3)
    upstream = upstream_weights(case, it, 4)
    outputs, gradients = run(it, parameters, floats, upstream)
    leaves = tensors({**parameters, **floats}, requires_grad=True)
    given = {name: leaf if name in parameters or name in case.f32 else leaf.to(act) for name, leaf in leaves.items()}
    ids = {name: torch.tensor(array.astype(np.int64)) for name, array in case.ids.items()}
    result = case.trace(TorchOps(act), {**given, **ids, **tensors(case.fixed)})
    results = result if isinstance(result, tuple) else (result,)
    torch.autograd.backward(
        results, [torch.tensor(w.astype(np.float32)).to(r.dtype) for r, w in zip(results, upstream, strict=True)]
    )
    types = [value.dtype for value in it.executor.graph.outputs.values()][: len(results)]
    for got, want, kind in zip(results, outputs, types, strict=True):
        assert got.dtype == (act if kind == "act" else torch.float32)
        assert relative_error(got.detach().float().numpy(), want) < unit
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        assert relative_error(leaf.grad.numpy(), gradients[name]) < 4 * unit, name


# --- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_exactly_what_the_reference_keeps(rate: float) -> None:
    """Also with an odd number of elements a row, samples in any order, and words at both ends of their range."""
    shape, seed, step = (3, 5, 7), 2**40 + 3, 4_000_000_000
    samples = np.array([7, 0, 4_294_967_295], np.uint32)
    ops = TorchOps(seed=seed, sites={"here": "block", "there": "block"})
    ops.training = True
    ops.microbatch = Microbatch(sample_ids=torch.tensor(samples.astype(np.int64)), data_step=torch.tensor([step]))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    keys = np.array([stream_key(seed, "dropout/here")], np.uint32)
    expected = kernels.dropout(x, samples, np.array([step], np.uint32), keys, site=0, rate=rate)
    np.testing.assert_array_equal(ops.dropout(torch.tensor(x), "here", rate).numpy(), expected)
    assert not np.array_equal(ops.dropout(torch.tensor(x), "there", rate).numpy(), expected)
    ops.training = False
    np.testing.assert_array_equal(ops.dropout(torch.tensor(x), "here", rate).numpy(), x)


def test_philox_words_are_those_of_the_definition() -> None:
    from hybrid.random.philox_numpy import philox4x32

    counters = np.random.default_rng(1).integers(0, 2**32, (200, 4), np.uint32)
    counters[0], counters[1] = 0, 0xFFFFFFFF
    key = (0xFFFFFFFF, 0x9E3779B9)
    columns = [torch.tensor(counters[:, i].astype(np.int64)) for i in range(4)]
    words = torch.stack(philox.philox4x32((columns[0], columns[1], columns[2], columns[3]), torch.tensor(key)), 1)
    np.testing.assert_array_equal(words.numpy(), philox4x32(counters, key))


# --- attention and the head: no large intermediates ---------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_logits_never_exist_whole_in_either_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, vocabulary = 64, 8, 300
    results = []
    for chunk in (1, 1000, 1 << 30):
        monkeypatch.setattr(head, "CPU_CHUNK", chunk)
        draw = np.random.default_rng(5).standard_normal
        x = torch.tensor(draw((rows, width)), dtype=torch.float32, requires_grad=True)
        weight = torch.tensor(draw((vocabulary, width)), dtype=torch.float32, requires_grad=True)
        targets = torch.arange(rows) % vocabulary
        targets[::5] = IGNORE
        with Largest() as largest:
            loss, nll = TorchOps().cross_entropy_head(x, Linear(weight), targets, torch.tensor([0.1]))
            torch.autograd.backward([loss, nll], [torch.tensor(draw(rows)).float(), torch.tensor(draw(rows)).float()])
        whole = rows * vocabulary
        assert largest.elements == whole if chunk > whole else largest.elements < whole / 2
        results.append([t.detach().numpy() for t in (loss, nll, x.grad, weight.grad)])  # type: ignore[union-attr]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_ignored_rows_give_exactly_nothing_even_where_the_logits_are_not_finite() -> None:
    x = torch.ones(2, 2)
    x[0] = torch.inf
    x.requires_grad_()
    weight = torch.ones(3, 2, requires_grad=True)
    loss, nll = TorchOps().cross_entropy_head(x, Linear(weight), torch.tensor([IGNORE, 1]), torch.tensor([0.1]))
    assert loss[0] == nll[0] == 0.0
    loss.sum().backward()
    assert x.grad is not None and bool((x.grad[0] == 0.0).all() and x.grad.isfinite().all())


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_attention_is_the_same_in_blocks_of_queries_and_makes_no_square_of_the_length(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    time = 60
    draw = np.random.default_rng(2).standard_normal
    q, k, v, do = (torch.tensor(draw((2, time, heads, 4))).float() for heads in (4, 2, 2, 4))
    segments = torch.tensor(np.sort(np.random.default_rng(3).integers(1, 5, (2, time)), axis=1))
    results = []
    for queries in (time, 7):
        monkeypatch.setattr(attention, "QUERIES", queries)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with Largest() as largest:
            o = TorchOps().attention(leaves[0], leaves[1], leaves[2], segments, scale=0.5, window=window)
            o.backward(do)
        if queries == 7:
            assert largest.elements < 2 * time * time
        results.append([o.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_one_segment_need_no_mask_and_padding_behind_them_neither() -> None:
    def plain(*rows: list[int]) -> bool:
        return attention.is_plain(np.array(rows, np.uint32))

    assert plain([1, 1, 1, 1], [3, 3, 0, 0], [0, 0, 0, 0])
    assert not plain([1, 1, 2, 2])
    assert not plain([1, 1, 1, 1], [0, 0, 1, 1])
    assert not plain([1, 1, 0, 2])
    assert attention.blocks(torch.ones(1, 4), None, plain=True) is None
    assert attention.blocks(torch.ones(1, 4), 4, plain=True) is None
    assert attention.blocks(torch.ones(1, 4), 3, plain=True) is not None


# --- what is refused ----------------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    ops = TorchOps()
    x, ids = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)
    heads = torch.ones(2, 3, 4, 5)
    refused = {
        r"add: both arguments must have one shape.*float32\[2, 3, 4\], float32\[4\]": lambda: ops.add(x, torch.ones(4)),
        "mul: both arguments": lambda: ops.mul(x, x.half()),
        "linear: the weight": lambda: ops.linear(x, Linear(torch.ones(5, 3))),
        "linear: the bias": lambda: ops.linear(x, Linear(torch.ones(5, 4), torch.ones(1))),
        "rms_norm: an RMS norm has no bias": lambda: ops.rms_norm(x, Norm(torch.ones(4), torch.ones(4)), 1e-5),
        "layer_norm: eps": lambda: ops.layer_norm(x, Norm(torch.ones(4)), 0.0),
        "rope: x must be": lambda: ops.rope(heads, ids, base=100.0, length=8),
        "attention: segment_ids are needed": lambda: ops.attention(heads, heads, heads, None, scale=1.0),
        "attention: q must be": lambda: ops.attention(heads, heads[:, :, :3], heads[:, :, :3], ids, scale=1.0),
        "attention: window 0": lambda: ops.attention(heads, heads, heads, ids, scale=1.0, window=0),
        "reshape: .* does not hold": lambda: ops.reshape(x, (5, -1)),
        "split: sizes": lambda: ops.split(x, (1, 2)),
        "concat: arguments": lambda: ops.concat([x, x[:1]]),
        "cast: dtype": lambda: ops.cast(x, "f64"),
        "cross_entropy_head: targets": lambda: ops.cross_entropy_head(
            x, Linear(torch.ones(9, 4)), ids[:1], torch.ones(1)
        ),
        "scale: factor inf": lambda: ops.scale(x, float("inf")),
    }
    for message, call in refused.items():
        with pytest.raises(OpError, match=message):
            call()
    with pytest.raises(OpError, match=r"in block .layers\.3.: both"):
        ops.block(
            "layers.3", lambda ops, p, x: ops.add(x, x[0]), lambda function, ops, args: function(ops, None, *args), x
        )
