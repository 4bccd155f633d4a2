"""Model FLOP utilisation: what part of a device's peak the arithmetic of a model is.

Counted are products of matrices, forward and backward (3 x forward: the backward pass has two products for each one),
of the layers as they are executed: a looped model counts each pass, grouped-query attention its narrower keys and
values. Recomputed activations, norms, softmax and the lookup of embeddings count nothing. A multiplication with its
addition is 2 FLOP. Source: Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B.

Two conventions for attention are in use, and both are given. `full`: each query against all T keys, as if there were
no mask. `causal`: against those it can see, which is (T + 1) / 2 on average, or fewer with a window. Segments of packed
rows are not looked at: both assume one document a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid.models.config import ModelConfig

FORMULA = "3 * 2 * (matrix elements of the executed layers and the head) + 3 * 4 * heads * headWidth * keys, a token"

# Dense peaks in FLOP/s, from the makers' data sheets: no sparsity. By words of the device's name, first match first.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"mixed-bf16": 2250e12, "mixed-f16": 2250e12}),
    ("H200", {"mixed-bf16": 989e12, "mixed-f16": 989e12, "tf32": 494e12, "f32": 67e12}),
    ("H100 PCIe", {"mixed-bf16": 756e12, "mixed-f16": 756e12, "tf32": 378e12, "f32": 51e12}),
    ("H100", {"mixed-bf16": 989e12, "mixed-f16": 989e12, "tf32": 494e12, "f32": 67e12}),
    ("A100", {"mixed-bf16": 312e12, "mixed-f16": 312e12, "tf32": 156e12, "f32": 19.5e12}),
    ("L40S", {"mixed-bf16": 362e12, "mixed-f16": 362e12, "tf32": 183e12, "f32": 91.6e12}),
    ("L4", {"mixed-bf16": 121e12, "mixed-f16": 121e12, "tf32": 60e12, "f32": 30.3e12}),
)


@dataclass(frozen=True)
class TokenFlops:
    """FLOP of training on one token (forward and backward), by convention of attention."""

    full: float
    causal: float


def flops_per_token(model: ModelConfig, sequence_length: int) -> TokenFlops:
    """Of a model on rows of `sequence_length` tokens."""
    c, d, layers = model.width, model.head_width, len(model.schedule)
    attention = c * d * (2 * model.heads + 2 * model.kv_heads)
    feed_forward = (3 if model.gated else 2) * c * model.feed_forward_width
    matrices = layers * (attention + feed_forward) + model.vocabulary_size * c
    scores = 4 * model.heads * d * layers  # two products, of the scores and of the values, for each key

    def total(keys: float) -> float:
        return 3.0 * (2 * matrices + scores * keys)

    return TokenFlops(total(sequence_length), total(visible_keys(sequence_length, model.window)))


def visible_keys(sequence_length: int, window: int | None) -> float:
    """Mean number of keys that a query of a row sees, its own included."""
    reach = min(window or sequence_length, sequence_length)
    return (reach * (reach + 1) / 2 + (sequence_length - reach) * reach) / sequence_length


def peak_flops(device: str, precision: str, numerics: str = "exact") -> float | None:
    """The dense peak of a device, by its name, in FLOP/s; None where it is not in the table. f32 with fast numerics
    runs in TF32."""
    kind = "tf32" if precision == "f32" and numerics == "fast" else precision
    words = set(device.replace("-", " ").split())
    for part, peaks in PEAKS:
        if words.issuperset(part.split()):
            return peaks.get(kind)
    return None


@dataclass(frozen=True)
class Utilisation:
    """full and causal: shares of the peak, by convention of attention. peak: FLOP/s of all devices together."""

    full: float
    causal: float
    peak: float

    def text(self) -> str:
        """For a log: the numbers, the peak and the formula."""
        return (
            f"MFU {self.full:.1%} (attention over all keys), {self.causal:.1%} (over those it sees), of "
            f"{self.peak / 1e12:g} TFLOP/s dense; FLOP = {FORMULA}"
        )


@dataclass(frozen=True)
class Budget:
    """What a run's arithmetic is measured by. peak: FLOP/s of all its devices together; None where it is not known."""

    flops: TokenFlops
    peak: float | None

    def at(self, tokens_per_second: float) -> Utilisation | None:
        """tokens_per_second: positions of all devices, targets or not. None before the first, and without a peak."""
        if self.peak is None or tokens_per_second <= 0:
            return None
        part = tokens_per_second / self.peak
        return Utilisation(self.flops.full * part, self.flops.causal * part, self.peak)

    def text(self) -> str:
        """For the beginning of a run; empty where no peak is known."""
        if self.peak is None:
            return ""
        return (
            f"MFU is of {self.peak / 1e12:g} TFLOP/s dense; a token takes {self.flops.full:.4g} FLOP (attention over "
            f"all keys) or {self.flops.causal:.4g} (over those it sees): {FORMULA}"
        )


def budget(model: ModelConfig, sequence_length: int, precision: str, described: dict[str, Any]) -> Budget:
    """described: what the session says of itself."""
    device = (described.get("gpuAdapter") or {}).get("name") or described.get("adapter") or ""
    peak = peak_flops(str(device), precision, (described.get("numerics") or {}).get("name", "exact"))
    return Budget(
        flops_per_token(model, sequence_length), None if peak is None else peak * int(described.get("worldSize", 1))
    )


def utilisation(
    model: ModelConfig, sequence_length: int, tokens_per_second: float, peak: float, devices: int = 1
) -> Utilisation:
    """tokens_per_second: positions of all devices, targets or not. peak: FLOP/s of one device."""
    flops, whole = flops_per_token(model, sequence_length), peak * devices
    return Utilisation(flops.full * tokens_per_second / whole, flops.causal * tokens_per_second / whole, whole)
