"""The vocabulary: every operation a model or an objective may use, each with one signature.

A model is a plain function of `(ops, parameters, inputs, config)`. Whoever implements `Ops` decides what running it
means: the tracer records a graph, the torch backend computes under autograd. Nothing here returns a Python number,
and `block` is the only control construct: loops and conditions in a model depend on its configuration alone.

Shape letters: B batch, T time, C model width, H query heads, K key/value heads, D head width, V vocabulary, N = B*T
rows. Element types: "act" is the type of activations (f32, or f16 in mixed precision; the reference also runs f64);
"f32" is at least f32 in every precision; "u32" is for ids and positions. Whatever the storage type, arithmetic
happens in at least f32.

Every method raises `OpError`, naming the op, the shapes it got and the enclosing block, when its arguments do not fit
its signature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import cos, sin
from sys import byteorder
from typing import Any, TypeAlias, TypeVar

from hybrid.errors import HybridError
from hybrid.random.shuffle import mix32

# What flows between ops. A graph `Value` for the tracer, a `torch.Tensor` for torch: model code never looks inside.
Tensor: TypeAlias = Any
Result = TypeVar("Result")

NO_TOKEN = 0xFFFFFFFF  # stands for a token before the start of a segment: no vocabulary has this id
TOP_K_LIMIT = 256  # teacher columns of one row, at most
MIN_TEMPERATURE = 1e-4
PROBABILITY_FLOOR = 1e-8  # below it a probability counts as this in the loss of a distillation


class OpError(HybridError, ValueError):
    """An op was applied to shapes, element types or values outside its definition, or cannot be differentiated."""


@dataclass(frozen=True)
class Linear:
    """Leaf of a parameter tree: a matrix [out, in] and, if there is one, a bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """Leaf of a parameter tree: gain [C] and, for a layer norm that has one, bias [C]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Table:
    """Leaf of a parameter tree: an embedding table [rows, C]."""

    weight: Tensor


class Ops(ABC):
    """See the module text. Arguments are positional tensors and leaves first, static settings after."""

    # --- structure ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def block(self, label: str, function: Callable[..., Result], parameters: Any, *arguments: Any) -> Result:
        """Run `function(ops, parameters, *arguments)` as one unit named `label`.

        Every parameter is read inside a block. For the tracer a block is a scope and a recomputation boundary; for
        torch, `parameters` is a module and the block calls it (so that sharding, checkpointing and compilation wrap
        it). Blocks may nest.
        """

    # --- parameters against activations ------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, ids: Tensor, table: Table) -> Tensor:
        """Rows of a table. ids u32 [B, T], table [V, C] -> act [B, T, C]; y[b, t] = table[ids[b, t]].

        Its gradient needs a row index of the ids, made on the host: `ids` must be an input of the program ("ids" or
        "positions").
        """

    @abstractmethod
    def hashed_ngram_embedding(
        self, ids: Tensor, segment_ids: Tensor | None, table: Table, *, order: int, seed: int = 0
    ) -> Tensor:
        """Rows of a table chosen by the last `order` tokens. ids, segment_ids u32 [B, T], table [buckets, C] ->
        act [B, T, C]; y[b, t] = table[ngram_bucket((ids[b, t - order + 1], .., ids[b, t]), buckets, seed)].

        A token before the row's start, or of another segment than position t, enters the hash as `NO_TOKEN`, so that
        the first positions of a segment have rows of their own. order is at least 2; seed, a u32, makes several
        tables (or several looks at one table) collide differently. Join the results with `concat` or `add`.

        Its gradient needs a row index of the buckets, made on the host under the prefix `ngram_prefix(order, buckets,
        seed)`: `ids` and `segment_ids` must be the inputs of these names. In a decoding trace `segment_ids` is None
        and the tokens before the first come from the input `previous_ids` u32 [1, P], the latest last, P = the largest
        order of the model less 1; where there is none it holds `NO_TOKEN`.
        Source: hash embeddings, Svenstrup, Hansen and Winther 2017, arXiv:1709.03933; n-gram tables as memory:
        Huang et al. 2025, "Over-Tokenized Transformer", arXiv:2501.16975.
        """

    @abstractmethod
    def linear(self, x: Tensor, leaf: Linear) -> Tensor:
        """x act [.., I], weight [O, I], bias [O] or none -> act [.., O]; y = x @ weight.T + bias, summed in f32."""

    @abstractmethod
    def rms_norm(self, x: Tensor, leaf: Norm, eps: float) -> Tensor:
        """x act [.., C], weight [C] -> act [.., C]; y = x / sqrt(mean(x^2) + eps) * weight, statistics in f32.

        Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467. A bias is an error.
        """

    @abstractmethod
    def layer_norm(self, x: Tensor, leaf: Norm, eps: float) -> Tensor:
        """x act [.., C], weight [C], bias [C] or none -> act [.., C]; y = (x - mean) / sqrt(var + eps) * weight + bias.

        The variance is the biased one (divided by C). Source: Ba, Kiros and Hinton 2016, "Layer Normalization",
        arXiv:1607.06450.
        """

    # --- attention ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def rope(self, x: Tensor, positions: Tensor, *, base: float, length: int) -> Tensor:
        """Rotary positions. x act [B, T, H, D], positions u32 [B, T], each less than `length` -> act [B, T, H, D].

        Pairs (x1, x2) = (x[i], x[i + D/2]) turn by the angle a = position * base^(-2i/D):
        y1 = x1 cos a - x2 sin a, y2 = x2 cos a + x1 sin a. D must be even. Cosines and sines come from
        `rope_table(length, D, base)`. Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, in the half-split layout
        of the Llama models.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention. q act [B, T, H, D], k and v act [B, T, K, D], segment_ids u32 [B, T] -> act [B, T, H, D].

        o[b, i, h] = sum_j softmax_j(scale * q[b, i, h] . k[b, j, g]) v[b, j, g] with g = h // (H / K), over the keys
        j <= i that lie in the segment of i and, given a window, satisfy i - j < window. H must be a multiple of K. No
        T x T buffer is ever stored; there is no dropout on probabilities. In a decoding trace `segment_ids` is None,
        and keys and values of earlier calls come from a cache: one cache for each call of `attention` in the model.
        Sources: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245;
        tiling: Dao et al. 2022, arXiv:2205.14135; window: Beltagy et al. 2020, arXiv:2004.05150.
        """

    # --- element by element ------------------------------------------------------------------------------------------

    @abstractmethod
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b; equal shapes and element types (act or f32)."""

    @abstractmethod
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b; equal shapes and element types (act or f32)."""

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor, for a finite factor known when the model is built; act or f32."""

    @abstractmethod
    def gelu(self, x: Tensor) -> Tensor:
        """x / 2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), act. Source: Hendrycks and Gimpel 2016,
        arXiv:1606.08415 (tanh form)."""

    @abstractmethod
    def silu(self, x: Tensor) -> Tensor:
        """x / (1 + exp(-x)), act. Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118."""

    @abstractmethod
    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0)^2, act. Source: So et al. 2021, "Primer", arXiv:2109.08668."""

    @abstractmethod
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, act, equal shapes. Source: Shazeer 2020, "GLU Variants Improve Transformer",
        arXiv:2002.05202."""

    @abstractmethod
    def dropout(self, x: Tensor, site: str, rate: float) -> Tensor:
        """x act [B, T, C] -> act: each element becomes 0 with probability `rate`, else x * float32(1 / (1 - rate)).

        0 <= rate < 1; the identity at rate 0 and outside training. Element e = t*C + c of the row whose index in the
        global batch is j is kept at data step s when word e & 3 of philox4x32((e >> 2, j, s, 0), stream_key(seed,
        "dropout/" + site)) is at least floor(rate * 2^32). So masks depend neither on how a batch is split nor on the
        runtime. A site may be used once in a model. Source: Srivastava et al. 2014, "Dropout", JMLR 15.
        """

    @abstractmethod
    def add_noise(self, x: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """x act [..], noise f32 of the same shape, levels f32 [2] -> act; y = levels[0] * x + levels[1] * noise.

        With levels (sqrt(r / (1 + r)), sqrt(1 / (1 + r))) at the signal-to-noise ratio r it keeps the variance of x.
        The noise is an input that the host draws, in float64 where its generator has logarithms and cosines, so that
        every runtime adds the same numbers; levels may change from step to step. Source: Kingma et al. 2021,
        "Variational Diffusion Models", arXiv:2107.00630.
        """

    @abstractmethod
    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Change the element type between "act" and "f32"."""

    # --- shape -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in row-major order under another shape; copies nothing. Any element type.

        An entry 0 keeps the dimension of x at that place; one entry may be -1 and takes what remains.
        """

    @abstractmethod
    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Cut the last axis into pieces of the given sizes, which add up to it. act or f32."""

    @abstractmethod
    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        """Join along the last axis; other dimensions and element types equal. act or f32."""

    @abstractmethod
    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """x act [.., C] read as N rows, index u32 [M] with entries below N -> act [M, C]; y[m] = x[index[m]]."""

    # --- reductions and losses ---------------------------------------------------------------------------------------

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """x f32 [N] -> f32 [1]."""

    @abstractmethod
    def mean(self, x: Tensor) -> Tensor:
        """x f32 [N] -> f32 [1], the sum divided by N."""

    @abstractmethod
    def mse(self, a: Tensor, b: Tensor) -> Tensor:
        """Mean of (a - b)^2 over all elements; a and b of equal shape and element type (act or f32) -> f32 [1]."""

    @abstractmethod
    def log_softmax(self, x: Tensor) -> Tensor:
        """x act or f32 [N, V] -> f32 [N, V]; y = x - log(sum_v exp(x)) along each row."""

    @abstractmethod
    def cross_entropy_head(self, x: Tensor, output: Linear, targets: Tensor, z_loss: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection and loss in one. x act [.., C] read as N rows, weight [V, C], targets u32 with N entries,
        z_loss f32 [1] -> (loss, nll), f32 [N] each.

        With logits l = weight @ x[n] and lse = log(sum_v exp(l_v)): nll = lse - l[target], loss = nll + z_loss *
        lse^2. A row whose target is `IGNORE` gives exactly 0 in both and no gradient. Logits are made in chunks of
        rows: N x V of them never exist at once. A bias is an error. Source of the z-loss: Chowdhery et al. 2022,
        "PaLM", arXiv:2204.02311.
        """

    @abstractmethod
    def topk_kl(
        self,
        x: Tensor,
        output: Linear,
        teacher_ids: Tensor,
        teacher_probs: Tensor,
        teacher_targets: Tensor,
        *,
        temperature: float = 1.0,
        alpha_kl: float = 1.0,
        alpha_nll: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output projection and distillation loss against the k likeliest tokens of a teacher.

        x act [.., C] read as N rows, weight [V, C], teacher_ids u32 [N, K] below V, teacher_probs f32 [N, K],
        teacher_targets u32 with N entries (a column 0..K-1, or `IGNORE`) -> (loss, kl, nll), f32 [N] each.

        With the logits l = (weight @ x[n])[teacher_ids[n]], q = softmax(l / temperature) over these K columns alone,
        and p = max(teacher_probs[n], 0) made to add up to 1 (uniform if they are all 0):
        kl = sum_k max(p_k, f) (log max(p_k, f) - log max(q_k, f)) with f = `PROBABILITY_FLOOR`;
        nll = -log max(q[target], f), 0 where the target is ignored; loss = alpha_kl * kl + alpha_nll * nll.
        The floor bounds the loss, not what is learnt: d loss / d l_k = (alpha_kl (q_k - p_k) + alpha_nll (q_k -
        [k == target])) / temperature, without the factor temperature^2 of the source. Only loss can be differentiated.

        A column whose id is `IGNORE` is absent; a row without columns gives exactly 0 in all three and no gradient. An
        id that occurs twice counts twice. K is at most `TOP_K_LIMIT`, temperature at least `MIN_TEMPERATURE`. Logits
        are made in chunks of rows, as in `cross_entropy_head`; a bias is an error. Source: Hinton, Vinyals and Dean
        2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531.
        """

    @abstractmethod
    def triplet_hinge(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        mask: Tensor,
        columns: Tensor | None = None,
        *,
        margin: float,
    ) -> Tensor:
        """Rows nearer to their positives than to their negatives, by a margin. anchor, positive and negative act
        [N, C], mask u32 [N], columns u32 [N, K] below C or None -> f32 [N].

        y = max(0, margin + d(anchor, positive) - d(anchor, negative)), where d is the mean of squared differences over
        the C columns, or over those that `columns` names for the row (one named twice counts twice). A row whose mask
        is 0 gives exactly 0 and no gradient, as does one at exactly 0. The margin is finite and not negative. Source:
        Schroff, Kalenichenko and Philbin 2015, "FaceNet", arXiv:1503.03832.
        """


def ngram_bucket(gram: Sequence[int], buckets: int, seed: int) -> int:
    """The table row of an n-gram of token ids, oldest first (u32 each; `NO_TOKEN` where there is none).

    h = mix32(seed + n * 0x9e3779b9), then h = mix32(h ^ id) for each id, all modulo 2^32; the row is h mod buckets.
    mix32 is the mixer of `random.shuffle`: shifts, exclusive ors and 32-bit products, which Python, NumPy, WGSL,
    JavaScript (`Math.imul`) and torch compute alike.
    """
    h = mix32((seed + len(gram) * 0x9E3779B9) & 0xFFFFFFFF)
    for token in gram:
        h = mix32(h ^ token)
    return h % buckets


def ngram_prefix(order: int, buckets: int, seed: int) -> str:
    """What stands before `row_order` and its companions in the names of an n-gram table's row index."""
    return f"ngram_{order}_{buckets}_{seed}_"


@lru_cache(maxsize=8)  # pure Python: a long context takes a second
def rope_table(length: int, head_width: int, base: float) -> bytes:
    """The constant of `rope`: little-endian float32 [length, head_width], row p = [cos(p * w_0) .. cos(p * w_h),
    sin(p * w_0) .. sin(p * w_h)].

    w_i = base^(-2i / head_width) for i < head_width / 2. Computed in float64 and rounded once, so that every runtime
    has the same bits.
    """
    frequencies = [base ** (-2.0 * i / head_width) for i in range(head_width // 2)]
    table = array("f")
    for position in range(length):
        angles = [position * frequency for frequency in frequencies]
        table.extend([cos(angle) for angle in angles])
        table.extend([sin(angle) for angle in angles])
    return little_endian(table)


def little_endian(values: array[float]) -> bytes:
    """The bytes of a float array as the plan stores them."""
    if byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()
