"""Which adapter is used, what is asked of it, and how a lost device is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.backends.webgpu import device as devices
from hybrid.backends.webgpu.device import AdapterInfo, NoAdapter, choose_adapter, list_adapters, open_device
from hybrid.errors import ConfigError


def _adapter(index, name, kind, backend="Vulkan", vendor="", description=""):
    return AdapterInfo(index, name, vendor, description, kind, backend, frozenset(), {}, None)


MACHINE = [
    _adapter(0, "GeForce RTX 4090", "DiscreteGPU", vendor="NVIDIA"),
    _adapter(1, "Arc Graphics", "IntegratedGPU", vendor="Intel"),
    _adapter(2, "llvmpipe", "CPU", description="Mesa 25"),
]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [(None, 0), ("0", 0), ("2", 2), ("intel", 1), ("ARC", 1), ("mesa", 2), ("geforce", 0)],
)
def test_an_adapter_is_chosen_by_index_or_by_part_of_its_name(wanted, index):
    assert choose_adapter(MACHINE, wanted).index == index


@pytest.mark.parametrize("wanted", ["radeon", "3", "", "-1"])
def test_an_unknown_adapter_is_an_error_that_lists_the_known_ones(wanted):
    with pytest.raises(ConfigError, match=r"0: GeForce RTX 4090 \(Vulkan, DiscreteGPU\); 1: Arc") as caught:
        choose_adapter(MACHINE, wanted)
    assert repr(wanted) in str(caught.value)


def test_adapters_are_ranked_real_ones_first():
    shuffled = [MACHINE[i] for i in (2, 1, 0)]
    assert sorted(shuffled, key=devices._rank) == MACHINE


def test_without_an_adapter_the_error_says_what_to_install():
    with pytest.raises(NoAdapter, match="mesa-vulkan-drivers"):
        choose_adapter([])


def test_a_machine_without_wgpu_gets_a_sentence_and_no_traceback_of_imports(monkeypatch):
    monkeypatch.setitem(sys.modules, "wgpu", None)  # what Python does for a module that cannot be imported
    devices.load_wgpu.cache_clear()
    try:
        with pytest.raises(NoAdapter, match=r"wgpu cannot be loaded.*pip install 'wgpu>="):
            list_adapters()
    finally:
        devices.load_wgpu.cache_clear()


def test_wgpu_is_not_imported_before_it_is_needed_and_finds_a_private_runtime_folder():
    code = (
        "import sys, os; import hybrid.backends.webgpu.device as d; assert 'wgpu' not in sys.modules;"
        "d.load_wgpu(); p = os.environ['XDG_RUNTIME_DIR']; assert os.stat(p).st_mode & 0o777 == 0o700, p"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without users")
def test_the_runtime_folder_is_one_for_all_processes_and_nobody_elses(monkeypatch, tmp_path):
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(devices.tempfile, "tempdir", str(tmp_path))
    folder = devices._runtime_folder()
    assert devices._runtime_folder() == folder and [str(path) for path in tmp_path.iterdir()] == [folder]
    Path(folder).chmod(0o755)  # others could look inside
    private = devices._runtime_folder()
    assert private != folder and Path(private).stat().st_mode & 0o777 == 0o700


@pytest.mark.webgpu
def test_a_device_is_given_the_limits_it_was_opened_with():
    with_defaults = open_device(features=(), default_limits=True)
    assert with_defaults.limits["maxStorageBufferBindingSize"] == 128 * 1024 * 1024
    assert with_defaults.limits["maxStorageBuffersPerShaderStage"] == 8
    assert not with_defaults.features
    granted = dict(with_defaults.device.limits)
    assert granted["max-storage-buffers-per-shader-stage"] == 8
    assert granted["max-compute-workgroup-storage-size"] == 16_384
    more = open_device()
    for name, value in with_defaults.limits.items():
        assert more.limits[name] == value or name in devices._RAISED_LIMITS
        assert more.limits[name] >= value
    assert set(more.features) == {f for f in devices.WANTED_FEATURES if f in more.info.features}
    for opened in (with_defaults, more):
        opened.close()


@pytest.mark.webgpu
def test_the_subgroup_size_is_measured_not_believed():
    opened = open_device()
    size = devices.probe_subgroup_size(opened)
    assert size is None or size in (1, 2, 4, 8, 16, 32, 64, 128)
    assert devices.probe_subgroup_size(open_device(features=())) is None
    opened.close()


@pytest.mark.webgpu
def test_a_destroyed_device_is_lost_and_a_sound_one_is_not():
    wgpu = devices.load_wgpu()
    opened = open_device()
    assert not devices.is_lost(opened)
    assert not devices.is_lost(opened, ValueError("something else"))
    opened.close()
    with pytest.raises(wgpu.GPUError) as caught:
        opened.device.create_buffer(size=4, usage=wgpu.BufferUsage.STORAGE)
    assert devices.is_lost(opened, caught.value)
    assert devices.is_lost(opened)
