"""Every primitive as one NumPy function: the readable definition, and the oracle of the device kernels.

Functions get and return arrays of the arithmetic type (float32, or float64 in the double-precision reference); the
executor converts to and from the storage types. Ids, positions and indices are uint32. Attributes of the node are
keyword arguments. A primitive that accumulates a parameter's gradient takes the buffer as `into` and adds to it.
Formulas and sources stand in `hybrid.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.row_index import ngram_buckets, ngram_buckets_after
from hybrid.data.batch import IGNORE
from hybrid.ops import PROBABILITY_FLOOR
from hybrid.random.philox_numpy import philox4x32

Array: TypeAlias = Any  # an array of the arithmetic type: NumPy's annotations cannot follow one that varies
Ids = NDArray[np.uint32]

# Temporaries of attention and of the cross-entropy head are made in chunks of about this many elements: they stay in
# a core's cache.
CHUNK = 1 << 18
GELU_SLOPE = float(np.sqrt(2.0 / np.pi))
GELU_CUBIC = 0.044715


def rows(x: Array) -> Array:
    """x as a matrix: all axes but the last become one."""
    return x.reshape(-1, x.shape[-1])


# --- parameters against activations ----------------------------------------------------------------------------------


def embedding(ids: Ids, table: Array) -> Array:
    return table[ids]


def embedding_grad(dy: Array, row_order: Ids, row_starts: Ids, row_ids: Ids, row_count: Ids, *, into: Array) -> None:
    """Sums the gradients of equal ids in the order of their positions; see `backends.row_index`."""
    count = int(row_count[0])
    into[row_ids[:count]] += np.add.reduceat(rows(dy)[row_order], row_starts[:count].astype(np.int64), axis=0)


def hashed_ngram_embedding(ids: Ids, context: Ids, table: Array, *, order: int, seed: int, decoding: bool) -> Array:
    """context: segment ids, or in decoding the ids before the first."""
    buckets_of = ngram_buckets_after if decoding else ngram_buckets
    return table[buckets_of(ids, context, order=order, buckets=len(table), seed=seed)]


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = rows(x) @ weight.T
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_dx(dy: Array, weight: Array) -> Array:
    return (rows(dy) @ weight).reshape(*dy.shape[:-1], weight.shape[1])


def linear_dw(x: Array, dy: Array, *, into: Array) -> None:
    into += rows(dy).T @ rows(x)


def column_sum(dy: Array, *, into: Array) -> None:
    into += dy.sum(axis=0)


def rms_norm(x: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    rstd = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + x.dtype.type(eps))
    return x * rstd * weight, rstd.ravel()


def rms_norm_dx(x: Array, weight: Array, rstd: Array, dy: Array) -> Array:
    """With x' = x rstd and g = dy weight: dx = rstd (g - x' mean(g x'))."""
    rstd = rstd.reshape(*x.shape[:-1], 1)
    normal, g = x * rstd, dy * weight
    return rstd * (g - normal * np.mean(g * normal, axis=-1, keepdims=True))


def rms_norm_dw(x: Array, rstd: Array, dy: Array, *, into: Array) -> None:
    into += np.sum(rows(dy) * rows(x) * rstd[:, None], axis=0)


def layer_norm(x: Array, weight: Array, bias: Array | None = None, *, eps: float) -> tuple[Array, Array, Array]:
    mean = np.mean(x, axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean(np.square(x - mean), axis=-1, keepdims=True) + x.dtype.type(eps))
    y = (x - mean) * rstd * weight
    if bias is not None:
        y += bias
    return y, mean.ravel(), rstd.ravel()


def layer_norm_dx(x: Array, weight: Array, mean: Array, rstd: Array, dy: Array) -> Array:
    """With x' = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - x' mean(g x'))."""
    mean, rstd = mean.reshape(*x.shape[:-1], 1), rstd.reshape(*x.shape[:-1], 1)
    normal, g = (x - mean) * rstd, dy * weight
    return rstd * (g - np.mean(g, axis=-1, keepdims=True) - normal * np.mean(g * normal, axis=-1, keepdims=True))


def layer_norm_dw(x: Array, mean: Array, rstd: Array, dy: Array, *, into: Array) -> None:
    into += np.sum(rows(dy) * (rows(x) - mean[:, None]) * rstd[:, None], axis=0)


# --- attention -------------------------------------------------------------------------------------------------------


def rope(x: Array, positions: Ids, table: Array, *, inverse: bool) -> Array:
    half = x.shape[-1] // 2
    turn = table[positions][:, :, None, :]
    cosine, sine = turn[..., :half], -turn[..., half:] if inverse else turn[..., half:]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _grouped(x: Array, kv_heads: int) -> Array:
    """[B, T, H, D] -> [B*K, H/K, T, D]: the heads that share keys side by side."""
    batch, time, heads, width = x.shape
    return (
        x.reshape(batch, time, kv_heads, heads // kv_heads, width)
        .transpose(0, 2, 3, 1, 4)
        .reshape(batch * kv_heads, heads // kv_heads, time, width)
    )


def _ungrouped(x: Array, batch: int) -> Array:
    """The inverse of `_grouped`."""
    pairs, group, time, width = x.shape
    kv_heads = pairs // batch
    return (
        x.reshape(batch, kv_heads, group, time, width)
        .transpose(0, 3, 1, 2, 4)
        .reshape(batch, time, kv_heads * group, width)
    )


def _visible(segment_ids: Ids, window: int | None) -> NDArray[np.bool_]:
    """[.., T] -> [.., T, T]: whether query i sees key j."""
    index = np.arange(segment_ids.shape[-1])
    distance = index[:, None] - index[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    visible: NDArray[np.bool_] = seen & (segment_ids[..., :, None] == segment_ids[..., None, :])
    return visible


def _score_chunks(
    q: Array, k: Array, segment_ids: Ids, scale: float, window: int | None
) -> Iterator[tuple[slice, Array]]:
    """Scaled and masked scores [P, H/K, T, T] for a few of the B*K pairs of batch row and key head at a time."""
    pairs, group, time, _ = q.shape
    kv_heads = pairs // segment_ids.shape[0]
    step = max(1, CHUNK // (group * time * time))
    for start in range(0, pairs, step):
        chunk = slice(start, min(start + step, pairs))
        seen = _visible(segment_ids[np.arange(chunk.start, chunk.stop) // kv_heads], window)
        scores = (q[chunk] * q.dtype.type(scale)) @ k[chunk].swapaxes(-1, -2)
        np.copyto(scores, -np.inf, where=~seen[:, None])
        yield chunk, scores


def attention(
    q: Array, k: Array, v: Array, segment_ids: Ids, *, scale: float, window: int | None
) -> tuple[Array, Array]:
    batch, time, heads, _ = q.shape
    queries, keys, values = (_grouped(x, k.shape[2]) for x in (q, k, v))
    o, lse = np.empty_like(queries), np.empty(queries.shape[:-1], q.dtype)
    for chunk, scores in _score_chunks(queries, keys, segment_ids, scale, window):
        top = scores.max(axis=-1, keepdims=True)  # finite: a query always sees itself
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        o[chunk] = (weights @ values[chunk]) / total
        lse[chunk] = (top + np.log(total))[..., 0]
    return _ungrouped(o, batch), lse.reshape(batch, heads, time)


def attention_delta(o: Array, do: Array) -> Array:
    return np.sum(o * do, axis=-1).transpose(0, 2, 1)


def _attention_gradients(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    segment_ids: Ids,
    scale: float,
    window: int | None,
) -> Iterator[tuple[slice, Array, Array]]:
    """(chunk, probabilities, gradient of the unscaled scores), from grouped q, k, v, do [B*K, H/K, T, D]."""
    lse, delta = lse.reshape(*q.shape[:-1], 1), delta.reshape(*q.shape[:-1], 1)
    for chunk, scores in _score_chunks(q, k, segment_ids, scale, window):
        weights = np.exp(scores - lse[chunk])
        gradient = weights * (do[chunk] @ v[chunk].swapaxes(-1, -2) - delta[chunk])
        yield chunk, weights, gradient * q.dtype.type(scale)


def attention_dq(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    segment_ids: Ids,
    *,
    scale: float,
    window: int | None,
) -> Array:
    queries, keys, values, outputs = (_grouped(x, k.shape[2]) for x in (q, k, v, do))
    dq = np.empty_like(queries)
    for chunk, _, gradient in _attention_gradients(
        queries, keys, values, outputs, lse, delta, segment_ids, scale, window
    ):
        dq[chunk] = gradient @ keys[chunk]
    return _ungrouped(dq, q.shape[0])


def attention_dkv(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    lse: Array,
    delta: Array,
    segment_ids: Ids,
    *,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    queries, keys, values, outputs = (_grouped(x, k.shape[2]) for x in (q, k, v, do))
    dk, dv = np.empty_like(keys), np.empty_like(values)
    for chunk, weights, gradient in _attention_gradients(
        queries, keys, values, outputs, lse, delta, segment_ids, scale, window
    ):
        # The heads of a group share the keys: their gradients add up.
        dv[chunk] = (weights.swapaxes(-1, -2) @ outputs[chunk]).sum(axis=1, keepdims=True)
        dk[chunk] = (gradient.swapaxes(-1, -2) @ queries[chunk]).sum(axis=1, keepdims=True)
    return _ungrouped(dk, q.shape[0]), _ungrouped(dv, q.shape[0])


def cache_write(x: Array, cache: Array, start: Ids) -> None:
    """x [1, T, K, D] to rows start .. start + T - 1 of the cache [L, K, D]."""
    first = int(start[0])
    cache[first : first + x.shape[1]] = x[0]


def attention_cached(
    q: Array, cache_k: Array, cache_v: Array, start: Ids, *, scale: float, window: int | None
) -> Array:
    """Query t of q [1, T, H, D] stands at row start + t and sees cache rows up to its own."""
    first, time = int(start[0]), q.shape[1]
    length, kv_heads = first + time, cache_k.shape[1]
    queries = _grouped(q, kv_heads)
    keys, values = (cache[:length].transpose(1, 0, 2)[:, None] for cache in (cache_k, cache_v))
    distance = (first + np.arange(time))[:, None] - np.arange(length)[None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = np.where(seen, (queries * q.dtype.type(scale)) @ keys.swapaxes(-1, -2), q.dtype.type(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return _ungrouped((weights @ values) / weights.sum(axis=-1, keepdims=True), 1)


# --- element by element ----------------------------------------------------------------------------------------------


def add(a: Array, b: Array) -> Array:
    return a + b


def mul(a: Array, b: Array) -> Array:
    return a * b


def scale(x: Array, *, factor: float) -> Array:
    return x * x.dtype.type(factor)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(GELU_SLOPE * (x + GELU_CUBIC * (x * x * x))))


def gelu_grad(x: Array, dy: Array) -> Array:
    squared = x * x
    t = np.tanh(GELU_SLOPE * (x + GELU_CUBIC * (squared * x)))
    slope = GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * squared)
    return dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def silu_grad(x: Array, dy: Array) -> Array:
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


def relu2(x: Array) -> Array:
    return np.square(np.maximum(x, 0.0))


def relu2_grad(x: Array, dy: Array) -> Array:
    return dy * 2.0 * np.maximum(x, 0.0)


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def swiglu_grad(gate: Array, up: Array, dy: Array) -> tuple[Array, Array]:
    s = sigmoid(gate)
    active = gate * s
    return dy * up * (s + active * (1.0 - s)), dy * active


def dropout(x: Array, sample_ids: Ids, data_step: Ids, dropout_keys: Ids, *, site: int, rate: float) -> Array:
    batch, elements = x.shape[0], x.shape[1] * x.shape[2]
    blocks = -(-elements // 4)
    counters = np.zeros((batch, blocks, 4), np.uint32)
    counters[:, :, 0] = np.arange(blocks)
    counters[:, :, 1] = sample_ids[:, None]
    counters[:, :, 2] = data_step[0]
    key = int(dropout_keys[site, 0]), int(dropout_keys[site, 1])
    words = philox4x32(counters.reshape(-1, 4), key).reshape(batch, blocks * 4)[:, :elements]
    kept = words >= np.uint32(int(rate * 2**32))
    return np.where(kept.reshape(x.shape), x * x.dtype.type(np.float32(1.0 / (1.0 - rate))), x.dtype.type(0.0))


def add_noise(x: Array, noise: Array, levels: Array) -> Array:
    return levels[0] * x + levels[1] * noise


def add_noise_grad(dy: Array, levels: Array, *, level: int) -> Array:
    """Of x at level 0, of the noise at level 1."""
    return levels[level] * dy


def cast(x: Array, *, dtype: str) -> Array:
    return x  # the executor stores the result in the type of the output


# --- shape -----------------------------------------------------------------------------------------------------------


def reshape(x: Array, *, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


def split(x: Array, *, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=-1))


def concat(*xs: Array) -> Array:
    return np.concatenate(xs, axis=-1)


def gather_rows(x: Array, index: Ids) -> Array:
    return x[index]


def scatter_rows(dy: Array, index: Ids, *, rows: int) -> Array:
    """[M, C] -> [rows, C]: row n is the sum of the dy[m] with index[m] = n."""
    dx = np.zeros((rows, dy.shape[1]), dy.dtype)
    np.add.at(dx, index, dy)
    return dx


def broadcast(seed: Array, *, shape: tuple[int, ...]) -> Array:
    return np.full(shape, seed[0])


# --- reductions and losses -------------------------------------------------------------------------------------------


def sum(x: Array) -> Array:
    return np.sum(x, keepdims=True)


def mean(x: Array) -> Array:
    return np.mean(x, keepdims=True)


def mse(a: Array, b: Array) -> Array:
    return np.mean(np.square(a - b)).reshape(1)


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def log_softmax_grad(y: Array, dy: Array) -> Array:
    """From the output y: dx = dy - exp(y) sum(dy)."""
    return dy - np.exp(y) * dy.sum(axis=-1, keepdims=True)


def _row_chunks(count: int, vocabulary: int) -> Iterator[slice]:
    step = max(1, 4 * CHUNK // vocabulary)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def cross_entropy_head(x: Array, weight: Array, targets: Ids, z_loss: Array) -> tuple[Array, Array, Array]:
    counted = targets != IGNORE
    nll, lse = np.zeros(len(x), x.dtype), np.zeros(len(x), x.dtype)
    for chunk in _row_chunks(len(x), len(weight)):
        logits = x[chunk] @ weight.T
        top = logits.max(axis=-1)
        lse[chunk] = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
        picked = logits[np.arange(len(logits)), np.where(counted[chunk], targets[chunk], 0)]
        nll[chunk] = lse[chunk] - picked
    zero = x.dtype.type(0.0)
    return np.where(counted, nll + z_loss[0] * np.square(lse), zero), np.where(counted, nll, zero), lse


def cross_entropy_head_grad(
    x: Array, weight: Array, targets: Ids, z_loss: Array, lse: Array, drows: Array, *, into: Array | None
) -> Array:
    """d loss / d logit_v = (1 + 2 z lse) softmax_v - [v == target], times drows; the weight's gradient goes to
    `into`, if given."""
    counted = targets != IGNORE
    dx = np.empty_like(x)
    for chunk in _row_chunks(len(x), len(weight)):
        gradient = np.exp(x[chunk] @ weight.T - lse[chunk, None])
        gradient *= (1.0 + 2.0 * z_loss[0] * lse[chunk])[:, None]
        gradient[np.arange(len(gradient)), np.where(counted[chunk], targets[chunk], 0)] -= 1.0
        gradient *= drows[chunk, None]
        gradient[~counted[chunk]] = 0.0
        dx[chunk] = gradient @ weight
        if into is not None:
            into += gradient.T @ x[chunk]
    return dx


def topk_kl(
    x: Array,
    weight: Array,
    teacher_ids: Ids,
    teacher_probs: Array,
    teacher_targets: Ids,
    *,
    temperature: float,
    alpha_kl: float,
    alpha_nll: float,
) -> tuple[Array, Array, Array]:
    kl, nll = np.zeros(len(x), x.dtype), np.zeros(len(x), x.dtype)
    floor = x.dtype.type(PROBABILITY_FLOOR)
    for chunk in _teacher_chunks(teacher_ids, weight):
        ids = teacher_ids[chunk]
        p, log_q = _teacher_and_student(x[chunk], weight, ids, teacher_probs[chunk], temperature)
        floored = np.maximum(p, floor)
        terms = floored * (np.log(floored) - np.maximum(log_q, np.log(floor)))
        kl[chunk] = np.where(ids != IGNORE, terms, 0.0).sum(axis=1)
        target = _one_hot(teacher_targets[chunk], ids)
        nll[chunk] = -np.where(target, np.maximum(log_q, np.log(floor)), 0.0).sum(axis=1)
    return x.dtype.type(alpha_kl) * kl + x.dtype.type(alpha_nll) * nll, kl, nll


def topk_kl_grad(
    x: Array,
    weight: Array,
    teacher_ids: Ids,
    teacher_probs: Array,
    teacher_targets: Ids,
    loss: Array,
    drows: Array,
    *,
    temperature: float,
    alpha_kl: float,
    alpha_nll: float,
    into: Array | None,
) -> Array:
    """d loss / d logit of column k = (alpha_kl (q_k - p_k) + alpha_nll (q_k - [k == target])) / temperature, times
    drows; the weight's gradient goes to `into`, if given."""
    dx = np.empty_like(x)
    for chunk in _teacher_chunks(teacher_ids, weight):
        ids = teacher_ids[chunk]
        p, log_q = _teacher_and_student(x[chunk], weight, ids, teacher_probs[chunk], temperature)
        q = np.exp(log_q)
        target = _one_hot(teacher_targets[chunk], ids)
        gradient = alpha_kl * (q - p) + alpha_nll * np.where(target.any(axis=1, keepdims=True), q - target, 0.0)
        gradient = np.where(ids != IGNORE, gradient * (drows[chunk, None] / temperature), 0.0).astype(x.dtype)
        known = np.where(ids != IGNORE, ids, 0)
        dx[chunk] = (gradient[:, None] @ weight[known])[:, 0]
        if into is not None:
            np.add.at(into, known, gradient[:, :, None] * x[chunk, None])
    return dx


def _teacher_chunks(teacher_ids: Ids, weight: Array) -> Iterator[slice]:
    """Few enough rows for K rows of the weight each."""
    step = max(1, 4 * CHUNK // (teacher_ids.shape[1] * weight.shape[1]))
    return (slice(start, start + step) for start in range(0, len(teacher_ids), step))


def _teacher_and_student(
    x: Array, weight: Array, ids: Ids, probabilities: Array, temperature: float
) -> tuple[Array, Array]:
    """(teacher's probabilities, student's log-probabilities) over the K columns; absent ones have 0 and -inf."""
    there = ids != IGNORE
    p = np.where(there, np.maximum(probabilities, 0.0), 0.0).astype(x.dtype)
    total = p.sum(axis=1, keepdims=True)
    uniform = there / np.maximum(there.sum(axis=1, keepdims=True), 1)
    p = np.where(total > 0.0, p / np.where(total > 0.0, total, 1.0), uniform).astype(x.dtype)
    logits = (weight[np.where(there, ids, 0)] @ x[:, :, None])[:, :, 0] / x.dtype.type(temperature)
    logits = np.where(there, logits, -np.inf)
    top = np.where(there.any(axis=1), logits.max(axis=1), 0.0)[:, None]
    return p, logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def _one_hot(targets: Ids, ids: Ids) -> Array:
    """bool [N, K]: the target's column, unless it is absent."""
    return (np.arange(ids.shape[1]) == targets[:, None]) & (ids != IGNORE)


def triplet_hinge(
    anchor: Array, positive: Array, negative: Array, mask: Ids, columns: Ids | None = None, *, margin: float
) -> Array:
    if columns is not None:
        anchor, positive, negative = (np.take_along_axis(x, columns, axis=1) for x in (anchor, positive, negative))
    near = np.mean(np.square(anchor - positive), axis=1)
    far = np.mean(np.square(anchor - negative), axis=1)
    hinge = np.maximum(anchor.dtype.type(margin) + near - far, 0.0)
    return np.where(mask != 0, hinge, 0.0)


def triplet_hinge_grad(u: Array, v: Array, mask: Ids, hinge: Array, drows: Array, columns: Ids | None = None) -> Array:
    """2/K (u - v) on the columns that count, times drows, in rows with a hinge that is not 0."""
    active = (mask != 0) & (hinge != 0.0)
    counted = u.shape[1] if columns is None else columns.shape[1]
    du = (u - v) * (2.0 / counted * drows)[:, None]
    if columns is not None:
        times = np.zeros_like(u)
        np.add.at(times, (np.arange(len(u))[:, None], columns), 1.0)
        du = np.where(times > 0.0, times * du, 0.0)
    return np.where(active[:, None], du, 0.0)


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        *(embedding, embedding_grad, hashed_ngram_embedding, linear, linear_dx, linear_dw, column_sum),
        *(rms_norm, rms_norm_dx, rms_norm_dw, layer_norm, layer_norm_dx, layer_norm_dw),
        *(rope, attention, attention_delta, attention_dq, attention_dkv, cache_write, attention_cached),
        *(add, mul, scale, gelu, gelu_grad, silu, silu_grad, relu2, relu2_grad, swiglu, swiglu_grad, dropout, cast),
        *(add_noise, add_noise_grad, topk_kl, topk_kl_grad, triplet_hinge, triplet_hinge_grad),
        *(reshape, split, concat, gather_rows, scatter_rows, broadcast),
        *(sum, mean, mse, log_softmax, log_softmax_grad, cross_entropy_head, cross_entropy_head_grad),
    )
}
