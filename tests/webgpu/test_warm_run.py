"""What a run that is under way asks of the device: nothing is made any more, and results are read once a log interval.

Counted twice: by the executor, and at wgpu itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.backends.protocol import TrainingSession
from hybrid.config.tree import RunConfig
from hybrid.training.sessions import make_session
from training.micro import entries, run

pytestmark = pytest.mark.webgpu

CREATORS = (
    "create_buffer",
    "create_compute_pipeline",
    "create_shader_module",
    "create_bind_group",
    "create_bind_group_layout",
    "create_pipeline_layout",
    "create_query_set",
)
WARM, LAST = 21, 121  # counted: from before step 21 to before step 121


class CountedRun:
    """A factory of sessions that notes the counts before each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.created: Counter[str] = Counter()
        self.before: dict[int, dict[str, int]] = {}

    def __call__(self, config: RunConfig, *reporting: Any) -> TrainingSession:
        session: Any = make_session(config, *reporting)
        native = type(session.device.device)
        for name in CREATORS:
            self.monkeypatch.setattr(native, name, self.counted(name, getattr(native, name)))
        begin = session.begin

        def counted_begin(info: Any) -> None:
            self.before[info.data_step] = {**session.counters(), "created": self.created.total()}
            begin(info)

        session.begin = counted_begin
        return session  # type: ignore[no-any-return]

    def counted(self, name: str, create: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.created[name] += 1
            return create(*arguments, **options)

        return call

    def grown(self, name: str) -> int:
        """By how much a count grew over the hundred warm steps."""
        return self.before[LAST][name] - self.before[WARM][name]


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"], indirect=True)
def test_a_hundred_warm_steps_make_nothing_and_read_back_once_a_log_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    counts = CountedRun(monkeypatch)
    settings = ("backend.name=webgpu", f"precision.type={precision}", f"run.steps={LAST}", "run.logEvery=10")
    run(tmp_path, *settings, "checkpoint.every=0", session=counts)
    assert counts.grown("created") == counts.grown("buffers_created") == counts.grown("pipelines_created") == 0
    assert counts.grown("readbacks") <= 10
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, LAST + 1))


def test_evaluation_samples_and_saving_make_nothing_either_after_their_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = CountedRun(monkeypatch)
    settings = ("backend.name=webgpu", f"run.steps={LAST}", "run.logEvery=10")
    run(tmp_path, *settings, "checkpoint.every=20", "evaluation.every=20", "sampling.every=20", session=counts)
    assert counts.grown("created") == counts.grown("buffers_created") == counts.grown("pipelines_created") == 0
