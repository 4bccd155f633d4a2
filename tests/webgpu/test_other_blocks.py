"""Models with blocks that none of ours has train on the device as in the reference: n-gram tables, squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.protocol import GenerateOptions
from hybrid.backends.reference.session import ReferenceSession
from hybrid.models import decoder
from webgpu.test_session import LLAMA, SETTINGS, batches, take

pytestmark = pytest.mark.webgpu
MODEL = replace(LLAMA, layers=1, schedule=(), dropout=0.0)


def embed_with_ngrams(ops, p, inputs, cfg):
    """The token table serves as the n-grams' too: two look-ups add to one gradient."""
    grams = ops.hashed_ngram_embedding(inputs.ids, inputs.segment_ids, p.tokens, order=3, seed=5)
    return ops.add(ops.embedding(inputs.ids, p.tokens), grams)


def squared_feed_forward(ops, p, h, cfg):
    """An op that reads one value twice, beside others of its kind that read two."""
    gate, up = ops.linear(h, p.gate), ops.linear(h, p.up)
    square = ops.mul(gate, gate)
    return ops.linear(ops.mul(ops.add(square, square), up), p.down)


@pytest.mark.parametrize(
    ("block", "other", "tensor"),
    [
        ("embed", embed_with_ngrams, "model.embed_tokens.weight"),
        ("feed_forward", squared_feed_forward, "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_steps_and_evaluations_with_another_block_are_those_of_the_reference(device, monkeypatch, block, other, tensor):
    from hybrid.backends.webgpu.session import WebGPUSession

    plain = ReferenceSession(MODEL, **SETTINGS).evaluate(batches(MODEL, 9)[0])
    monkeypatch.setattr(decoder, block, other)
    theirs, mine = ReferenceSession(MODEL, **SETTINGS), WebGPUSession(MODEL, **SETTINGS, device=device)
    before = theirs.export_state()
    reference, results = (take(session, MODEL, 1, 5) for session in (theirs, mine))
    for a, b in zip(results, reference, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    evaluated, expected = (session.evaluate(batches(MODEL, 9)[0]) for session in (mine, theirs))
    assert evaluated.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert plain.loss_sum != pytest.approx(expected.loss_sum, rel=1e-6)
    update, expected_update = (
        session.export_state().model[tensor] - before.model[tensor] for session in (mine, theirs)
    )
    norms = np.linalg.norm(update) * np.linalg.norm(expected_update)
    assert 1 - np.vdot(update, expected_update) / norms <= 1e-6
    mine.close()


def test_n_grams_are_written_with_as_they_are_read_with_one_token_after_the_other(device, monkeypatch):
    from hybrid.backends.webgpu.session import WebGPUSession

    monkeypatch.setattr(decoder, "embed", embed_with_ngrams)
    theirs, mine = ReferenceSession(MODEL, **SETTINGS), WebGPUSession(MODEL, **SETTINGS, device=device)
    prompt = [3, 1, 2]
    for session in (theirs, mine):
        take(session, MODEL, 1, 5)
        written = list(session.generate(prompt, GenerateOptions(tokens=6, temperature=0.0)))
        ids = list(prompt)
        for _ in written:  # each of them after a prefill of all before it
            ids += session.generate(ids, GenerateOptions(tokens=1, temperature=0.0))
        assert ids == prompt + written
        assert len(set(written)) > 1
    mine.close()
