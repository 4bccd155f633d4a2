"""A device that is really lost, by `destroy()`: every method says so, a run goes on from its last checkpoint to the
same state, a bounded number of times, and nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.backends.protocol import GenerateOptions, StepInfo, TrainingSession
from hybrid.config.tree import RunConfig
from hybrid.data.batch import Batch
from hybrid.errors import DeviceLost
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.training.sessions import make_session
from training.micro import Recorder, entries, run, run_file, state_hash

pytestmark = pytest.mark.webgpu

MODEL = ModelConfig(vocabulary_size=32, context_length=16, layers=1, width=16, heads=2, feed_forward_width=32)


def open_session(**changes: Any) -> Any:
    from hybrid.backends.webgpu.session import WebGPUSession

    settings: dict[str, Any] = {"batch_size": 2, "sequence_length": 16, "optimizer": OptimizerSettings()}
    return WebGPUSession(MODEL, **{**settings, **changes})


def batch() -> Batch:
    ids = np.arange(32, dtype=np.uint32).reshape(2, 16)
    positions = np.tile(np.arange(16, dtype=np.uint32), (2, 1))
    return Batch(ids, ids[:, ::-1].copy(), positions, np.ones((2, 16), np.uint32), np.arange(2, dtype=np.uint32))


def take_step(session: Any, step: int) -> None:
    session.begin(StepInfo(step, 32, 1))
    session.accumulate(batch())
    session.apply()


CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what goes before the loss, and the call that meets it
    "begin": (lambda s: None, lambda s: s.begin(StepInfo(2, 32, 1))),
    "accumulate": (lambda s: s.begin(StepInfo(2, 32, 1)), lambda s: s.accumulate(batch())),
    "inspect": (lambda s: (s.begin(StepInfo(2, 32, 1)), s.accumulate(batch())), lambda s: s.inspect()),
    "apply": (lambda s: (s.begin(StepInfo(2, 32, 1)), s.accumulate(batch())), lambda s: s.apply()),
    "poll_metrics": (lambda s: take_step(s, 2), lambda s: s.poll_metrics(wait=True)),
    "evaluate": (lambda s: None, lambda s: s.evaluate(batch())),
    "generate": (lambda s: None, lambda s: list(s.generate([1, 2], GenerateOptions(tokens=2)))),
    "export_state": (lambda s: None, lambda s: s.export_state()),
}


@pytest.mark.parametrize("method", CALLS)
def test_the_call_that_meets_the_loss_tells_it_and_so_does_every_later_one(method: str) -> None:
    session = open_session(metrics_interval=4)
    take_step(session, 1)
    state = session.export_state()
    before, call = CALLS[method]
    before(session)
    session.device.device.destroy()
    with pytest.raises(DeviceLost, match="was lost"):
        call(session)
    for _, later in CALLS.values():
        with pytest.raises(DeviceLost, match="was lost"):
            later(session)
    with pytest.raises(DeviceLost):
        session.poll_metrics()
    with pytest.raises(DeviceLost):
        session.import_state(state)
    assert session.memory()["total"] > 0 and session.counters() and session.describe()["backend"] == "webgpu"
    session.close()


def test_a_sequence_that_is_being_sampled_ends_with_the_loss() -> None:
    session = open_session()
    tokens = session.generate([1, 2], GenerateOptions(tokens=10))
    next(tokens)
    session.device.device.destroy()
    with pytest.raises(DeviceLost):
        list(tokens)
    session.close()


def test_waiting_for_a_device_that_goes_away_meanwhile_ends() -> None:
    """wgpu-py never settles a promise that is pending when its device is destroyed."""
    from hybrid.backends.webgpu.device import open_device, wait_for

    device = open_device()
    buffer = device.device.create_buffer(size=8, usage="COPY_DST | MAP_READ")
    pending = type(buffer.map_async("READ"))("pending for ever", None)
    threading.Timer(0.2, device.close).start()
    begin = time.monotonic()
    with pytest.raises(DeviceLost, match="waited for"):
        wait_for(device, pending)
    assert time.monotonic() - begin < 10


def test_a_device_that_is_lost_while_a_session_is_made_is_told() -> None:
    from hybrid.backends.webgpu.device import open_device

    device = open_device()

    def destroy(what: str, done: int, total: int) -> None:
        device.device.destroy()

    with pytest.raises(DeviceLost):
        open_session(device=device, progress=destroy)


# Runs

SETTINGS = ("backend.name=webgpu", "run.steps=12", "checkpoint.every=3", "evaluation.every=4", "sampling.every=6")


class DestroyedSession:
    """Passes everything on, and destroys the device just before the calls that `due` says yes to."""

    def __init__(self, session: TrainingSession, due: Callable[[str, int], bool]) -> None:
        self._session, self._due, self._step = session, due, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)
        if not callable(method) or name in ("close", "memory", "describe", "counters"):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "begin":
                self._step = arguments[0].data_step
            if self._due(name, self._step):
                self._session.device.device.destroy()  # type: ignore[attr-defined]
            return method(*arguments, **options)

        return call


def destroying(moments: list[tuple[str, int]]) -> tuple[Callable[..., TrainingSession], list[tuple[str, int]]]:
    """A factory of sessions that lose their device at each of these (method, data step) once, in order; and what is
    left of them."""
    left = list(moments)

    def due(method: str, step: int) -> bool:
        if left and left[0] == (method, step):
            left.pop(0)
            return True
        return False

    def make(config: RunConfig, *reporting: Any) -> TrainingSession:
        return DestroyedSession(make_session(config, *reporting), due)  # type: ignore[return-value]

    return make, left


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, *SETTINGS)
    return folder


def same_run(folder: Path, undisturbed: Path) -> None:
    assert state_hash(folder) == state_hash(undisturbed)
    rows, expected = entries(folder), entries(undisturbed)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(1, 13))
    assert [row["total_loss"] for row in rows] == [row["total_loss"] for row in expected]
    validation = [(folder / "run" / "validation.jsonl").read_text() for folder in (folder, undisturbed)]
    assert validation[0] == validation[1]


def losses_told(view: Recorder) -> list[str]:
    return [note["text"] for note in view.of("note") if "the device was lost" in note["text"]]


@pytest.mark.parametrize(
    "moments",
    [
        [("begin", 1)],  # before there is any checkpoint
        [("accumulate", 5)],
        [("apply", 8), ("apply", 8), ("apply", 8)],  # three times at the same step
        [("poll_metrics", 7), ("evaluate", 8), ("generate", 12)],
        [("export_state", 3), ("export_state", 12)],
        [("import_state", 0)],
    ],
    ids=lambda moments: " ".join(f"{method}-{step}" for method, step in moments),
)
def test_a_run_that_loses_its_device_ends_at_the_state_of_one_that_does_not(
    tmp_path: Path, undisturbed: Path, moments: list[tuple[str, int]]
) -> None:
    view = Recorder()
    if moments[0][0] == "import_state":
        run(tmp_path, *SETTINGS, "run.steps=8")  # a run that is resumed imports the state of its checkpoint
    make, left = destroying(moments)
    run(tmp_path, *SETTINGS, session=make, view=view)
    assert not left, "the device was not destroyed as often as it should have been"
    assert len(losses_told(view)) == len(moments)
    assert f"({len(moments)} of at most 3 times)" in losses_told(view)[-1]
    same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_goes_in_the_middle_of_a_call_is_replaced(tmp_path: Path, undisturbed: Path, seed: int) -> None:
    """Before any of the things that a session asks of its executor: while it encodes, submits, maps, waits or reads."""
    choose = random.Random(seed)
    view = Recorder()
    sessions: list[Any] = []

    def make(config: RunConfig, *reporting: Any) -> TrainingSession:
        session: Any = make_session(config, *reporting)
        sessions.append(session)
        if len(sessions) <= 3:
            destroy_before(session, choose.randint(1, 60))
        return session  # type: ignore[no-any-return]

    run(tmp_path, *SETTINGS, session=make, view=view)
    assert len(losses_told(view)) == 3
    same_run(tmp_path, undisturbed)


def destroy_before(session: Any, last: int) -> None:
    """Destroy the device before the call of the executor with this number."""
    calls = itertools.count(1)

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == last:
                session.device.device.destroy()
            return method(*arguments, **options)

        return call

    for name in ("encoder", "encode", "submit", "fence", "write_tensor", "write_words", "read_bytes", "mapped"):
        setattr(session.executor, name, counted(getattr(session.executor, name)))


def test_a_device_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    make, left = destroying([("apply", 2)] * 9)
    view = Recorder()
    with pytest.raises(DeviceLost, match=r"lost 3 times, and backend\.maxRecoveries is 2"):
        run(tmp_path, *SETTINGS, "backend.maxRecoveries=2", session=make, view=view)
    assert len(left) == 6 and len(losses_told(view)) == 2
    assert run_file(tmp_path)["status"] == "failed" and "maxRecoveries" in run_file(tmp_path)["message"]


# What is left behind


def device_objects() -> dict[str, int]:
    """Living objects by kind, as the Python side of wgpu counts them."""
    import wgpu

    gc.collect()
    counts = wgpu.diagnostics.object_counts.get_dict()
    kinds = ("Device", "Buffer", "ComputePipeline", "ShaderModule", "BindGroup", "QuerySet", "CommandBuffer")
    return {kind: counts[kind]["count"] for kind in kinds}


@pytest.mark.parametrize("lost", [False, True], ids=["closed", "lost"])
def test_ten_sessions_one_after_the_other_leave_no_buffer_and_no_thread_behind(lost: bool) -> None:
    open_session().close()  # what stays for good, as the list of adapters does, is there from now on
    objects, threads = device_objects(), threading.active_count()
    for _ in range(10):
        session = open_session()
        take_step(session, 1)
        session.export_state()
        assert device_objects()["Buffer"] > objects["Buffer"]
        take_step(session, 2)  # under way when the session is closed
        if lost:
            session.poll_metrics(wait=True)
            session.device.device.destroy()
            with pytest.raises(DeviceLost):
                take_step(session, 3)
        session.close()
        session.close()  # a second time does no harm
        del session
    assert device_objects() == objects
    assert threading.active_count() == threads


def test_a_session_that_cannot_be_made_leaves_nothing_behind() -> None:
    open_session().close()
    objects, threads = device_objects(), threading.active_count()

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_session(progress=stop)
    assert device_objects() == objects
    assert threading.active_count() == threads


def test_a_run_that_lost_its_device_leaves_nothing_behind(tmp_path: Path) -> None:
    open_session().close()
    objects, threads = device_objects(), threading.active_count()
    make, _ = destroying([("apply", 4), ("apply", 7)])
    run(tmp_path, *SETTINGS, session=make)
    assert device_objects() == objects
    assert threading.active_count() == threads
