"""A trace of some steps, as torch's profiler records it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepTrace:
    """Records `count` steps from step `first` on, and writes them into `folder` in the format of Chrome's tracing.

    told: hears the file's path when it is written.
    """

    def __init__(self, folder: Path, first: int, count: int, told: Callable[[Path], None]) -> None:
        self.first, self.last = first, first + count - 1
        self._file = folder / f"trace-{first}-{self.last}.json"
        self._told = told
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """A step is about to begin."""
        if step == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif step == self.last + 1:
            self.close()

    def close(self) -> None:
        """Write what has been recorded, once; nothing before the first step."""
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._file))
            self._told(self._file)
