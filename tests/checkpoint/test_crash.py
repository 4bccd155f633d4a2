"""Killed with SIGKILL anywhere in a save, a run leaves the last acknowledged checkpoint, or the next one, whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import crashing, examples
from hybrid.checkpoint.store import CheckpointStore

TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` of the numbers 1..total, evenly spread, first and last among them."""
    count = min(wanted, total)
    return sorted({1 + round(index * (total - 1) / max(count - 1, 1)) for index in range(count)})


def case(operation: str, count: int) -> str:
    return f"{operation}:{count}:{'torn' if count % 2 else 'before'}"


@pytest.fixture(scope="module")
def totals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many operations of each kind the whole scenario has."""
    counting = crashing.CountingFilesystem()
    crashing.run(tmp_path_factory.mktemp("whole"), counting)
    return dict(counting.counts)


def kill(folder: Path, cases: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, str(TESTS / "checkpoint" / "crashing.py"), str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def survives(folder: Path) -> None:
    """What must hold of whatever a killed run left in `folder`; then the run is continued to its end."""
    log = folder / "acknowledged"
    acknowledged = [tuple(map(int, line.split())) for line in log.read_text().splitlines()] if log.exists() else []
    done = len(acknowledged)
    assert tuple(acknowledged) == crashing.SCENARIO[:done]

    store = CheckpointStore(folder / "run", keep_last=2, filesystem=examples.Unsynced(), clock=examples.clock)
    assert not [status for status in store.list() if status.status == "damaged"]
    found = store.latest()
    assert found is not None or done == 0, "an acknowledged checkpoint is gone"
    if found is not None:
        states = {
            examples.snapshot(step, seed=seed).state_hash(): i for i, (step, seed) in enumerate(crashing.SCENARIO)
        }
        index = states[store.load(found).manifest.state_hash]
        assert index in (done - 1, done), f"found save {index}, acknowledged {done}"

    store.clean()
    again = store.latest()
    assert (again is None) == (found is None)
    if found is not None and again is not None:
        assert again.state_hash == found.state_hash
        store.continue_from(store.load(found))
    assert not [status for status in store.list() if status.status in ("temporary", "unfinished")]
    crashing.run(folder, examples.Unsynced(), crashing.SCENARIO[done:])
    last = store.latest()
    assert last is not None
    assert store.load(last).manifest.state_hash == examples.snapshot(4, seed=4).state_hash()
    assert [status.step for status in store.list()] == [3, 4]


def test_a_run_killed_anywhere_goes_on_from_a_whole_checkpoint(tmp_path: Path, totals: dict[str, int]) -> None:
    """Ten moments; the acceptance run has many more."""
    cases = [case("data", n) for n in spread(totals["data"], 3)]
    cases += [case("sync", n) for n in spread(totals["sync"], 2)] + [
        case("manifest", n) for n in spread(totals["manifest"], 2)
    ]
    cases += [case("rename", n) for n in spread(totals["rename"], 3)]
    assert len(cases) == 10
    kill(tmp_path, cases)
    for name in cases:
        survives(tmp_path / name)


def test_between_the_two_renames_of_a_replacement_nothing_is_lost(tmp_path: Path) -> None:
    """The fifth rename of the scenario moves the old save of step 3 aside, the sixth puts the new one in its place."""
    cases = ["rename:5:torn", "rename:6:torn"]
    kill(tmp_path, cases)
    for name in cases:
        folders = {path.name.split("-")[0] for path in (tmp_path / name / "run" / "checkpoints").iterdir()}
        assert ".replaced" in folders, "the scenario changed: count its renames again"
        survives(tmp_path / name)


@pytest.mark.acceptance
@pytest.mark.parametrize("operation", crashing.OPERATIONS)
def test_a_run_killed_at_many_points_of_each_operation_goes_on(
    tmp_path: Path, totals: dict[str, int], operation: str
) -> None:
    cases = [f"{operation}:{n}:{how}" for n in spread(totals[operation], 25) for how in ("before", "torn")]
    assert len(cases) >= (10 if operation != "remove" else 2)
    kill(tmp_path, cases)
    for name in cases:
        survives(tmp_path / name)
