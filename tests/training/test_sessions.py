"""Which backend a configuration means."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.backends.webgpu import device
from hybrid.backends.webgpu.session import WebGPUSession
from hybrid.config.resolve import resolve
from hybrid.training.sessions import choose_backend, make_session
from training.micro import Recorder, micro_config, run


def no_adapter() -> list[device.AdapterInfo]:
    raise device.NoAdapter(f"no WebGPU adapter is found. {device.DRIVER_HINT}")


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_without_an_adapter_auto_is_torch_where_it_is_installed_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(device, "list_adapters", no_adapter)
    if backend == "reference":
        monkeypatch.setattr("hybrid.training.sessions.find_spec", lambda name: None)
    view = Recorder()
    run(tmp_path, "backend.name=auto", "run.steps=1", view=view)
    (note,) = view.of("note")
    assert note["text"].startswith(f"the {backend} backend computes, because there is no") and "\n" not in note["text"]
    assert view.of("run")[0]["backend"] == backend
    with pytest.raises(device.NoAdapter):
        run(tmp_path, "backend.name=webgpu", "run.steps=2")


def test_a_named_backend_is_taken_without_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "list_adapters", no_adapter)
    assert choose_backend(micro_config(tmp_path)) == "reference"
    assert choose_backend(micro_config(tmp_path, "backend.name=webgpu")) == "webgpu"


@pytest.mark.webgpu
def test_a_software_driver_that_nobody_chose_is_mentioned(tmp_path: Path) -> None:
    for name, training, mentioned in (("auto", True, True), ("auto", False, False), ("webgpu", True, False)):
        notes: list[str] = []
        config = micro_config(tmp_path, f"backend.name={name}")
        resolved = resolve(config, vocabulary_size=256, train_samples=1000)
        session = make_session(resolved, notes.append, training=training)
        assert isinstance(session, WebGPUSession)
        is_software = session.device.info.is_software
        session.close()
        assert [note.split(": ")[1] for note in notes] == (
            ["on a processor, --backend torch trains several times as fast"] if mentioned and is_software else []
        )


@pytest.mark.webgpu
@pytest.mark.parametrize("profile", ["adapter", "default"])
def test_a_webgpu_session_takes_the_whole_configuration(tmp_path: Path, profile: str) -> None:
    config = micro_config(tmp_path, "backend.name=webgpu", f"backend.deviceProfile={profile}", "run.logEvery=1000")
    session = make_session(resolve(config, vocabulary_size=256, train_samples=1000))
    try:
        assert session.describe()["backend"] == "webgpu" and session.memory()["total"] > 0
    finally:
        session.close()
