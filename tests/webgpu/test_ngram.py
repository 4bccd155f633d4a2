"""A model with an n-gram table trains on the device as in the reference: the device's hash and the host's row index
agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.reference.session import ReferenceSession
from hybrid.models import decoder
from webgpu.test_session import LLAMA, SETTINGS, batches, take

pytestmark = pytest.mark.webgpu
MODEL = replace(LLAMA, layers=1, schedule=(), dropout=0.0)


def embed_with_ngrams(ops, p, inputs, cfg):
    """The token table serves as the n-grams' too: two look-ups add to one gradient."""
    grams = ops.hashed_ngram_embedding(inputs.ids, inputs.segment_ids, p.tokens, order=3, seed=5)
    return ops.add(ops.embedding(inputs.ids, p.tokens), grams)


def test_steps_and_evaluations_with_an_ngram_table_are_those_of_the_reference(device, monkeypatch):
    from hybrid.backends.webgpu.session import WebGPUSession

    plain = ReferenceSession(MODEL, **SETTINGS).evaluate(batches(MODEL, 9)[0])
    monkeypatch.setattr(decoder, "embed", embed_with_ngrams)
    theirs, mine = ReferenceSession(MODEL, **SETTINGS), WebGPUSession(MODEL, **SETTINGS, device=device)
    before = theirs.export_state()
    reference, results = (take(session, MODEL, 1, 5) for session in (theirs, mine))
    for a, b in zip(results, reference, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    evaluated, expected = (session.evaluate(batches(MODEL, 9)[0]) for session in (mine, theirs))
    assert evaluated.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert abs(plain.loss_sum - expected.loss_sum) > 0.1
    name = "model.embed_tokens.weight"
    update, other = (session.export_state().model[name] - before.model[name] for session in (mine, theirs))
    assert 1 - np.vdot(update, other) / (np.linalg.norm(update) * np.linalg.norm(other)) <= 1e-6
    mine.close()
