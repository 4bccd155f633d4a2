"""Small models of every style, random weights and batches for them, and ways to run them in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.reference.executor import Executor
from hybrid.backends.row_index import row_index
from hybrid.data.batch import IGNORE, Batch
from hybrid.graph.ir import F32, U32, Graph
from hybrid.graph.tracer import Tracer
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Inputs, decoder
from hybrid.models.parameters import parameter_specs, parameter_tree
from hybrid.plan.programs import training_graph
from hybrid.random.streams import stream_key

Array = NDArray[Any]

LLAMA = ModelConfig(
    vocabulary_size=61, context_length=24, layers=2, width=32, heads=4, kv_heads=2, feed_forward_width=48
)
GPT2 = replace(
    LLAMA,
    kv_heads=4,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
    feed_forward_width=128,
)
LOOPED = replace(LLAMA, schedule=(0, 1, 0, 1, 1), tied_embeddings=True)
WINDOWED = replace(LLAMA, window=5, head_width=6, activation="relu2")
PLAIN = replace(LLAMA, norm="layer_norm", activation="silu", kv_heads=1, positions="learned")
MODELS = {"llama": LLAMA, "gpt2": GPT2, "looped": LOOPED, "windowed": WINDOWED, "plain": PLAIN}


def random_weights(cfg: ModelConfig, seed: int = 0, dtype: Any = np.float64) -> dict[str, Array]:
    """Much larger than initial weights, gains and biases too, so that every part of the model matters."""
    draw = np.random.default_rng(seed)
    return {
        spec.name: ((1.0 if spec.init == "ones" else 0.0) + 0.2 * draw.standard_normal(spec.shape)).astype(dtype)
        for spec in parameter_specs(cfg)
    }


def make_batch(
    ids: Array, targets: Array | None = None, segments: Array | None = None, samples: Array | None = None
) -> Batch:
    """Positions restart where a segment begins; without targets, each token predicts the next of its segment."""
    ids = np.asarray(ids, np.uint32)
    segments = np.ones_like(ids) if segments is None else np.asarray(segments, np.uint32)
    positions = np.zeros_like(ids)
    for t in range(1, ids.shape[1]):
        positions[:, t] = np.where(segments[:, t] == segments[:, t - 1], positions[:, t - 1] + 1, 0)
    if targets is None:
        targets = np.full_like(ids, IGNORE)
        same = segments[:, 1:] == segments[:, :-1]
        targets[:, :-1] = np.where(same & (segments[:, 1:] != 0), ids[:, 1:], IGNORE)
    samples = np.arange(len(ids)) if samples is None else samples
    return Batch(ids, np.asarray(targets, np.uint32), positions, segments, np.asarray(samples, np.uint32))


def random_batch(cfg: ModelConfig, b: int = 3, t: int = 16, seed: int = 1) -> Batch:
    """Two or three segments a row, some padding, a few ignored targets."""
    draw = np.random.default_rng(seed)
    segments = np.sort(draw.integers(1, 4, (b, t)), axis=1).astype(np.uint32)
    segments[-1, t - 3 :] = 0
    batch = make_batch(draw.integers(0, cfg.vocabulary_size, (b, t)), segments=segments)
    targets = batch.targets.copy()
    targets[draw.random((b, t)) < 0.2] = IGNORE
    return replace(batch, targets=targets)


def inputs_of(
    batch: Batch, graph: Graph, *, data_step: int = 1, seed: int = 7, z: float = 0.0, scale: float = 1.0
) -> dict[str, Array]:
    """Every program input of a batch."""
    keys = [stream_key(seed, f"dropout/{site}") for site in graph.dropout_sites]
    return {
        **{name: getattr(batch, name) for name in ("ids", "targets", "positions", "segment_ids", "sample_ids")},
        **row_index(batch.ids),
        **row_index(batch.positions, "pos_"),
        "data_step": np.array([data_step]),
        "dropout_keys": np.array(keys, np.uint32).reshape(-1, 2),
        "z_loss": np.array([z]),
        "loss_seed": np.array([scale]),
    }


def logits(cfg: ModelConfig, weights: dict[str, Array], batch: Batch, precision: str = "f64") -> Array:
    """[B, T, V] of the whole sequence at once, without caches or dropout."""
    tracer = Tracer(training=False)
    shape = batch.ids.shape
    inputs = Inputs(*(tracer.input(name, shape, U32) for name in ("ids", "positions", "segment_ids")))
    shapes = {spec.name: spec.shape for spec in parameter_specs(cfg)}
    params = parameter_tree(cfg, lambda name: tracer.parameter(name, shapes[name]))
    head = lambda ops, output, x, inputs: ops.cast(ops.linear(x, output), F32)  # noqa: E731
    tracer.graph.outputs["logits"] = decoder(tracer, params, inputs, cfg, head)
    return Executor(tracer.graph, precision).run(inputs_of(batch, tracer.graph), weights).outputs["logits"]


def losses_and_gradients(
    cfg: ModelConfig,
    weights: dict[str, Array],
    batch: Batch,
    precision: str = "f64",
    *,
    recompute: bool = False,
    **settings: Any,
) -> tuple[Array, dict[str, Array]]:
    """(loss_rows, gradients) of sum(loss_rows) * scale."""
    graph = training_graph(cfg, *batch.ids.shape, recompute=recompute)
    executor = Executor(graph, precision)
    weights = {name: array.astype(executor.precision.wide) for name, array in weights.items()}
    gradients = {name: np.zeros_like(array) for name, array in weights.items()}
    run = executor.run(inputs_of(batch, graph, **settings), weights, gradients)
    return run.outputs["loss_rows"], gradients
