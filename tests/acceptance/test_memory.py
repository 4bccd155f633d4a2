"""Device memory over a thousand steps: as flat as the list of buffers that was made before the first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.backends.protocol import TrainingSession
from hybrid.config.tree import RunConfig
from hybrid.training.sessions import make_session
from training.micro import entries, run

pytestmark = [pytest.mark.acceptance, pytest.mark.webgpu]

STEPS, SETTLED = 1000, 300  # by step 300 everything has happened once: evaluation, samples, checkpoints, log files
MOST_GROWTH = 4 * 1024 * 1024


def resident_bytes() -> int:
    """What the process holds in memory. A software adapter's device memory is part of it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_objects() -> dict[str, int]:
    import wgpu

    counts = wgpu.diagnostics.object_counts.get_dict()
    return {kind: facts["count"] for kind, facts in counts.items() if kind != "total"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("every", [100, 0], ids=["with evaluations", "steps alone"])
@pytest.mark.parametrize("precision", ["f32", "mixed-f16"], indirect=True)
def test_memory_is_flat_over_a_thousand_steps(
    tmp_path: Path, precision: str, every: int, record_property: Callable[[str, object], None]
) -> None:
    """Also without evaluations, where the loop lets Python collect its garbage: it makes none."""
    resident: dict[int, int] = {}
    counters: dict[int, dict[str, int]] = {}
    objects: dict[int, dict[str, int]] = {}
    device: dict[int, int] = {}

    def watched(config: RunConfig, *reporting: Any) -> TrainingSession:
        session: Any = make_session(config, *reporting)
        begin = session.begin

        def begin_and_look(info: Any) -> None:
            step = info.data_step
            if step % 50 == 0:
                resident[step], objects[step] = resident_bytes(), live_objects()
                counters[step], device[step] = session.counters(), session.memory()["total"]
            begin(info)

        session.begin = begin_and_look
        return session  # type: ignore[no-any-return]

    run(
        tmp_path, "backend.name=webgpu", f"precision.type={precision}", f"run.steps={STEPS}", "run.logEvery=10",
        f"evaluation.every={every}", f"sampling.every={every}", f"checkpoint.every={every}", "checkpoint.keepLast=2",
        session=watched,
    )  # fmt: skip
    assert len(entries(tmp_path)) == STEPS
    later = range(SETTLED, STEPS + 1, 50)
    growth = max(resident[step] for step in later) - resident[SETTLED]
    record_property("resident_bytes_at_step_300", resident[SETTLED])
    record_property("growth_bytes_to_step_1000", growth)
    record_property("device_bytes", device[SETTLED])
    assert growth <= MOST_GROWTH
    assert len({device[step] for step in later}) == 1
    for name in ("buffers_created", "pipelines_created"):
        assert {counters[step][name] for step in later} == {counters[SETTLED][name]}
    kinds = ("Buffer", "BindGroup", "ComputePipeline", "ShaderModule", "QuerySet", "Device")
    assert all(objects[step][kind] == objects[SETTLED][kind] for step in later for kind in kinds)
