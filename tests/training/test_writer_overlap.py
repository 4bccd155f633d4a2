"""A disk of 1 MB/s: steps go on while it writes, and what it gets is the state of the step that was saved.

Runs alternate between stretches with a save under way and stretches without, so that what else the machine does meets
both alike, and compare the medians of their steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hybrid.backends.protocol import TrainingSession
from hybrid.checkpoint import finding
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.config.tree import RunConfig
from hybrid.training.sessions import make_session
from hybrid.training.view import Facts
from training.micro import Recorder, run

BYTES_PER_SECOND = 1e6
MOST_TIMES_SLOWER = 1.2
TENSORS = ("model.safetensors", "optimizer.safetensors")
WARM = 20  # steps
ATTEMPTS = 3  # another process that comes or goes in the middle of a run shifts the comparison either way

# Light steps and a heavy checkpoint: the table of learned positions alone, with its moments, is 1.2 MB.
SETTINGS = (
    "model.width=48", "model.heads=4", "model.kvHeads=2", "model.positions=learned", "model.contextLength=2048",
    "run.logEvery=10", "checkpoint.keepLast=0",
)  # fmt: skip
SAVE_SECONDS = 1.3


@dataclass
class Watch:
    """Notes when each step began, and when each checkpoint was whole."""

    began: dict[int, float] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)

    def session(self, config: RunConfig, *reporting: Any) -> TrainingSession:
        session: Any = make_session(config, *reporting)
        begin = session.begin

        def watched(info: Any) -> None:
            self.began[info.data_step] = time.perf_counter()
            begin(info)

        session.begin = watched
        return session  # type: ignore[no-any-return]

    def event(self, kind: str, facts: Facts) -> None:
        if kind == "checkpoint":
            self.saved[facts["step"]] = time.perf_counter()

    def seconds(self, every: int) -> tuple[list[float], list[float]]:
        """Of steps with a save under way all the time, and of those without. Steps that end with a save count for
        neither: there the loop waits for the device."""
        during, between = [], []
        for step, began in self.began.items():
            ended = self.began.get(step + 1)
            if ended is None or step < WARM or step % every == 0:
                continue
            newest = step // every * every
            if newest and (newest not in self.saved or ended < self.saved[newest]):
                during.append(ended - began)
            elif not newest or began > self.saved[newest]:
                between.append(ended - began)
        return during, between


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["reference", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def test_while_a_slow_disk_writes_steps_take_at_most_a_fifth_longer(tmp_path: Path, backend: str) -> None:
    settings = (*SETTINGS, f"backend.name={backend}")
    # How many steps take twice as long as a save: half of the time one is under way then.
    trial = Watch()
    run(tmp_path, *settings, "run.steps=60", "checkpoint.every=0", run="trial", session=trial.session)
    usual = statistics.median(trial.seconds(every=1000)[1])
    every = max(2 * WARM, round(2 * SAVE_SECONDS / usual))

    lengths = (f"run.steps={2 * every + every // 2}", f"checkpoint.every={every}")
    times_slower = []
    for attempt in range(ATTEMPTS):
        watch, slow = Watch(), OsFilesystem(bytes_per_second=BYTES_PER_SECOND)
        name = f"slow{attempt}"
        run(tmp_path, *settings, *lengths, run=name, session=watch.session, view=Recorder(watch.event), filesystem=slow)
        during, between = watch.seconds(every)
        assert min(len(during), len(between)) >= WARM
        assert watch.saved[every] - watch.began[every + 1] > 0.8 * SAVE_SECONDS, "the disk was not slow"
        times_slower.append(statistics.median(during) / statistics.median(between))
        if times_slower[-1] <= MOST_TIMES_SLOWER:
            break
    assert min(times_slower) <= MOST_TIMES_SLOWER

    # The same steps with an ordinary disk, in a run that ends there: it saves last of all, and waits.
    run(tmp_path, *settings, f"run.steps={every}", "checkpoint.every=0", run="synchronous")
    theirs = finding.resolve(tmp_path / "synchronous")
    folder = tmp_path / "slow0" / "checkpoints" / f"step-{every:08d}"
    assert finding.resolve(folder).state_hash == theirs.state_hash
    for name in TENSORS:
        assert (folder / name).read_bytes() == (theirs.path / name).read_bytes()
