"""How much memory a process may have, by the limits of the control groups that it is in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid.config.machine import group_memory, machine_memory

GIB = 2**30
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"
NO_LIMIT = "9223372036854771712\n"  # of version 1

# What lies there, and what may be used.
CASES = {
    "no control groups": ({}, None),
    "2: no limit": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"}, None),
    "2: a container": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
    "2: without /proc": ({f"{V2}/memory.max": f"{4 * GIB}\n"}, 4 * GIB),
    "2: the root of a machine has no such file": ({"proc/self/cgroup": "0::/\n"}, None),
    "2: a service": (
        {
            "proc/self/cgroup": "0::/system.slice/train.service\n",
            f"{V2}/system.slice/memory.max": "max\n",
            f"{V2}/system.slice/train.service/memory.max": f"{3 * GIB}\n",
        },
        3 * GIB,
    ),
    "2: a job of Slurm limits its steps": (
        {
            "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            f"{V2}/system.slice/slurmstepd.scope/job_7/memory.max": f"{2 * GIB}\n",
            f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/memory.max": f"{5 * GIB}\n",
            f"{V2}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max\n",
            f"{V2}/system.slice/slurmstepd.scope/job_8/memory.max": f"{GIB}\n",
        },
        2 * GIB,
    ),
    "2: a path from outside of the container": (
        {"proc/self/cgroup": "0::/../../pod/other\n", f"{V2}/memory.max": f"{6 * GIB}\n"},
        6 * GIB,
    ),
    "1: no limit": (
        {"proc/self/cgroup": "4:memory:/a\n", f"{V1}/memory.limit_in_bytes": NO_LIMIT},
        int(NO_LIMIT),
    ),
    "1: a group": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/b\n4:memory:/a/b\n1:name=systemd:/c\n",
            f"{V1}/memory.limit_in_bytes": NO_LIMIT,
            f"{V1}/a/memory.limit_in_bytes": f"{7 * GIB}\n",
            f"{V1}/a/b/memory.limit_in_bytes": NO_LIMIT,
            f"{V1}/b/memory.limit_in_bytes": f"{GIB}\n",  # of another tree
        },
        7 * GIB,
    ),
    "1: a container sees its own group as the outermost, and the path of the machine": (
        {"proc/self/cgroup": "4:memory:/docker/0123\n", f"{V1}/memory.limit_in_bytes": f"{GIB}\n"},
        GIB,
    ),
    "1 and 2 at once": (
        {
            "proc/self/cgroup": "4:memory:/a\n0::/a\n",
            f"{V1}/a/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{V2}/unified/a/cgroup.procs": "1\n",
        },
        2 * GIB,
    ),
    "nonsense": ({"proc/self/cgroup": "\nabc\n0::\n:::\n", f"{V2}/memory.max": "lots\n"}, None),
    "a limit of nothing": ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "0\n"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_least_limit_on_the_way_to_the_outermost_group_counts(tmp_path: Path, case: str) -> None:
    files, expected = CASES[case]
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert group_memory(tmp_path) == expected


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="the system does not tell")
def test_a_limit_beyond_what_is_built_in_is_none(tmp_path: Path) -> None:
    built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_memory(tmp_path) == built_in
    limit = tmp_path / V2 / "memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(str(2 * built_in))
    assert machine_memory(tmp_path) == built_in
    limit.write_text(str(built_in // 2))
    assert machine_memory(tmp_path) == built_in // 2
