"""Python's cycle collector beside a loop: off, but at steps that are known, and as it was afterwards."""

from __future__ import annotations

import gc

from hybrid.backends.collection import EVERY, Collection


def test_it_runs_at_known_steps_only_and_is_on_again_afterwards() -> None:
    ran: list[str] = []
    gc.callbacks.append(lambda phase, info: ran.append(phase))
    try:
        with Collection() as collection:
            assert not gc.isenabled() and gc.get_freeze_count() > 0
            ran.clear()
            for step in range(1, 2 * EVERY):
                _ = [[] for _ in range(3)]
                collection.step(step)
            assert ran == ["start", "stop"], f"once, at step {EVERY}"
            collection.now()
            assert len(ran) == 4
    finally:
        gc.callbacks.pop()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with Collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
