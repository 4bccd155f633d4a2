"""A small run, prepared and trained: what the tests of the JavaScript runner start from, and what they must get.

`python -m browser.runner_fixtures FOLDER` (in tests/) writes `job.json`, the token store in `data/`, the plan in
`plan/`, and `reference.json`: the entries, validation rows and the sample of the same run on the reference backend.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from hybrid.bridge.job import build_job, plan_settings
from hybrid.plan.compiler import compile_plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.training.metrics_log import read_rows
from hybrid.training.start import Request, Services, prepare_run
from training.micro import Recorder, micro_config, run

SETTINGS = (
    "run.steps=20",
    "run.logEvery=4",
    "evaluation.every=10",
    "sampling.every=20",
    "sampling.temperature=0",
    "objective.zLoss=0.0001",
)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        view = Recorder()
        run(scratch, *SETTINGS, view=view)
        request = Request(micro_config(scratch, *SETTINGS), scratch / "tab", command="train")
        prepared, _ = prepare_run(request, Services())
        job = build_job(prepared, request.run_dir, "fixture", prepared.start, 0)
        (folder / "job.json").write_text(json.dumps({**job, "runDir": "runs/tab"}), encoding="utf-8")
        shutil.copytree(prepared.data.store.path, folder / "data", dirs_exist_ok=True)
        write_plan(compile_plan(plan_settings(prepared.config), DeviceProfile()), folder / "plan")
        reference = {
            "entries": list(read_rows(scratch / "run" / "metrics.jsonl")),
            "validation": list(read_rows(scratch / "run" / "validation.jsonl")),
            "samples": view.of("sample"),
        }
        (folder / "reference.json").write_text(json.dumps(reference), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the run that the JavaScript runner is tested with.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
