"""When Python's cycle collector runs beside a training loop: never by itself, but at steps that are known before."""

from __future__ import annotations

import gc

EVERY = 1000  # steps


class Collection:
    """A context manager: inside it the collector is off, and does not look at what was there before.

    Left to itself it looks at everything at arbitrary moments, which takes longer than many a step; on one of several
    ranks all the others wait meanwhile. Here it runs every so many steps, on every rank at the same one, and where the
    loop waits anyway (evaluation, checkpoints).
    """

    def __enter__(self) -> Collection:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()

    def step(self, step: int) -> None:
        """A step is about to begin."""
        if step % EVERY == 0:
            gc.collect()

    def now(self) -> None:
        gc.collect()
