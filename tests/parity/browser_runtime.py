"""The session of a browser tab as one more runtime of the parity contract, driven through Playwright."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from browser.harness import BrowserPage
from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult, TrainingSession
from hybrid.data.batch import Batch
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.folder import write_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.training.parity.runtimes import SessionRuntime, session_arguments
from hybrid.training.parity.workload import Workload

MODULE = "/test/support/remote_session.js"
FIELDS = tuple(field.name for field in fields(StepResult))


def browser(page: BrowserPage, plans: Path, prefix: str) -> SessionRuntime:
    """The runtime of a page. plans: a folder that its server offers below `prefix`."""
    found = page.call(MODULE, "profile")
    profile = DeviceProfile(
        limits=found["limits"],
        features=frozenset(found["features"]),
        subgroup_size=found["subgroup_size"],
        cpu=found["cpu"],
    )
    numbers = count(1)

    def make(workload: Workload) -> TrainingSession:
        arguments = session_arguments(workload)
        seed = arguments.pop("seed")
        folder = f"plan-{next(numbers)}"
        write_plan(compile_plan(PlanSettings(workload.model, **arguments), profile), plans / folder)
        return RemoteSession(page, f"{prefix}{folder}", seed)

    precisions = ("f32", "mixed-f16") if "shader-f16" in profile.features else ("f32",)
    return SessionRuntime("browser", make, precisions, reuse=True)


class RemoteSession:
    """Implements `backends.protocol.TrainingSession` on a page: a step crosses the border once, when it is applied."""

    def __init__(self, page: BrowserPage, plan: str, seed: int) -> None:
        self._page = page
        self.id = page.call(MODULE, "open", plan, seed)
        self._info: StepInfo | None = None
        self._batches: list[dict[str, str]] = []

    def _call(self, name: str, *parameters: Any) -> Any:
        return self._page.call(MODULE, name, self.id, *parameters)

    def begin(self, info: StepInfo) -> None:
        self._info, self._batches = info, []

    def accumulate(self, batch: Batch) -> None:
        self._batches.append(arrays(batch))

    def inspect(self) -> StepResult:
        raise NotImplementedError("a step crosses the border once")

    def apply(self) -> None:
        assert self._info is not None
        self._call("step", {_camel(name): value for name, value in vars(self._info).items()}, self._batches)

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        return [StepResult(**{name: row[_camel(name)] for name in FIELDS}) for row in self._call("poll", wait)]

    def evaluate(self, batch: Batch) -> Evaluation:
        result = self._call("evaluate", arrays(batch))
        return Evaluation(result["lossSum"], result["targetTokens"])

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        raise NotImplementedError("the scenarios of the browser tests sample")

    def export_state(self) -> SessionState:
        state = self._call("exportState")
        return SessionState(
            _unpack(state["model"]), _unpack(state["optimizer"]), state["optimizerStep"], state["scaler"]
        )

    def import_state(self, state: SessionState) -> None:
        self._call(
            "importState",
            {
                "model": _pack(state.model),
                "optimizer": _pack(state.optimizer),
                "optimizerStep": state.optimizer_step,
                "scaler": state.scaler,
            },
        )

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = self._call("describe")
        return described

    def memory(self) -> dict[str, int]:
        return {}

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._call("close")


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def arrays(batch: Batch) -> dict[str, str]:
    return {_camel(name): _base64(array.astype("<u4")) for name, array in vars(batch).items()}


def _pack(tensors: dict[str, NDArray[np.float32]]) -> dict[str, Any]:
    data = b"".join(np.ascontiguousarray(tensor).astype("<f4").tobytes() for tensor in tensors.values())
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return {"shapes": shapes, "data": base64.b64encode(data).decode("ascii")}


def _unpack(packed: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    values = np.frombuffer(base64.b64decode(packed["data"]), "<f4")
    tensors, at = {}, 0
    for name, shape in packed["shapes"].items():
        size = int(np.prod(shape, dtype=np.int64))
        tensors[name] = values[at : at + size].reshape(shape).copy()
        at += size
    assert at == values.size
    return tensors
