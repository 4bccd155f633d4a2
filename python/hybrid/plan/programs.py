"""The graphs of a run: training, evaluation and decoding of one model at one shape."""

from __future__ import annotations

from hybrid.errors import ConfigError
from hybrid.graph.autodiff import Emitter, backward
from hybrid.graph.ir import F32, U32, Graph, Value
from hybrid.graph.tracer import Tracer
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Inputs, decoder, last_token_logits, layer_labels
from hybrid.models.parameters import DecoderParameters, parameter_specs, parameter_tree
from hybrid.objectives.cross_entropy import cross_entropy


def training_graph(cfg: ModelConfig, batch_size: int, sequence_length: int, *, recompute: bool = False) -> Graph:
    """Forward and backward of one microbatch in one node list.

    Inputs: ids, targets, positions, segment_ids u32 [B, T]; z_loss, loss_seed f32 [1]; row_order, row_ids u32 [N],
    row_starts u32 [N + 1], row_count u32 [1] (and the same with `pos_` for learned positions); with dropout
    sample_ids u32 [B], data_step u32 [1] and dropout_keys u32 [S, 2], one row for each of `graph.dropout_sites`.
    Outputs: loss_rows and nll_rows f32 [N], 0 where the target is ignored. Every trainable parameter has at least one
    node that accumulates to its gradient, which is that of loss_seed * sum(loss_rows). recompute: run each layer's
    forward nodes again before its backward.
    """
    tracer = Tracer(training=True)
    loss = _losses(tracer, cfg, batch_size, sequence_length)
    seed = tracer.input("loss_seed", (1,), F32)
    drows = Emitter(tracer.graph, "head.backward").broadcast(seed, loss.type)
    labels = set(layer_labels(cfg)) if recompute else set()
    backward(tracer.graph, {loss: drows}, recompute=[region for region in tracer.regions if region.label in labels])
    return tracer.graph


def evaluation_graph(cfg: ModelConfig, batch_size: int, sequence_length: int) -> Graph:
    """Forward only, without dropout. Inputs and outputs as in `training_graph`, as far as the forward pass needs
    them."""
    tracer = Tracer(training=False)
    _losses(tracer, cfg, batch_size, sequence_length)
    return tracer.graph


def decode_graph(cfg: ModelConfig, tokens: int, cache_length: int) -> Graph:
    """`tokens` tokens of one sequence against key/value caches of `cache_length` rows, one pair for each executed
    layer.

    Inputs: ids, positions u32 [1, T]; start u32 [1], the cache row of the first token; last u32 [1], the row whose
    logits are wanted. Outputs: logits f32 [V]. One token is a decoding step, more are a prefill (which may be padded
    beyond `last`).
    """
    _check(cfg, 1, tokens)
    if not tokens <= cache_length <= cfg.context_length:
        raise ConfigError(
            f"decoding {tokens} tokens with a cache of {cache_length} rows: expected tokens <= cache rows <= "
            f"model.context_length = {cfg.context_length}"
        )
    tracer = Tracer(training=False, cache_length=cache_length)
    inputs = Inputs(
        ids=tracer.input("ids", (1, tokens), U32),
        positions=tracer.input("positions", (1, tokens), U32),
        last=tracer.input("last", (1,), U32),
    )
    tracer.graph.outputs["logits"] = decoder(tracer, _parameters(tracer, cfg), inputs, cfg, last_token_logits)
    return tracer.graph


def _losses(tracer: Tracer, cfg: ModelConfig, batch_size: int, sequence_length: int) -> Value:
    _check(cfg, batch_size, sequence_length)
    shape = (batch_size, sequence_length)
    inputs = Inputs(
        ids=tracer.input("ids", shape, U32),
        positions=tracer.input("positions", shape, U32),
        segment_ids=tracer.input("segment_ids", shape, U32),
        targets=tracer.input("targets", shape, U32),
        z_loss=tracer.input("z_loss", (1,), F32),
    )
    loss: Value
    nll: Value
    loss, nll = decoder(tracer, _parameters(tracer, cfg), inputs, cfg, cross_entropy)
    tracer.graph.outputs.update(loss_rows=loss, nll_rows=nll)
    return loss


def _parameters(tracer: Tracer, cfg: ModelConfig) -> DecoderParameters:
    shapes = {spec.name: spec.shape for spec in parameter_specs(cfg)}
    return parameter_tree(cfg, lambda name: tracer.parameter(name, shapes[name]))


def _check(cfg: ModelConfig, batch_size: int, sequence_length: int) -> None:
    cfg.validate()
    if batch_size < 1 or not 1 <= sequence_length <= cfg.context_length:
        raise ConfigError(
            f"batch {batch_size} x {sequence_length}: expected at least 1 x 1, and at most "
            f"model.context_length = {cfg.context_length} tokens a row"
        )
