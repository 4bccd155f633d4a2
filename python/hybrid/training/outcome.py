"""How a run ended: for run.json, the view and the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import EXIT_ALERT, EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, HybridError


@dataclass(frozen=True)
class Outcome:
    """A run that ended well. status: `finished` or `stopped` (saved on request, to be started again). step: the last
    one done."""

    status: str
    step: int
    steps: int
    message: str
    run_dir: Path

    @property
    def exit_code(self) -> int:
        return EXIT_STOPPED if self.status == "stopped" else EXIT_DONE

    def facts(self) -> dict[str, Any]:
        """The `end` event."""
        return {
            "status": self.status,
            "exitCode": self.exit_code,
            "step": self.step,
            "steps": self.steps,
            "runDir": str(self.run_dir),
            "message": self.message,
        }


def ended(status: str, step: int, steps: int, run_dir: Path, reason: str | None) -> Outcome:
    """A run that has come to its end, or has saved because of `reason`."""
    if status == "finished":
        message = f"finished at step {step}: {run_dir}"
    else:
        saved = f"saved at step {step}" if step else "nothing to save at step 0"
        message = f"stopped ({reason}), {saved}; start it again with --run-dir {run_dir}"
    return Outcome(status, step, steps, message, run_dir)


def already_finished(run_dir: Path, step: int, steps: int) -> Outcome:
    """There was nothing left to do."""
    place = f"step {step} of {steps}" if step <= steps else f"step {step}, beyond the {steps} asked for"
    message = f"{run_dir} is finished: it is at {place}; --steps N with a larger N goes on"
    return Outcome("finished", step, steps, message, run_dir)


def status_of(error: BaseException) -> str:
    """What run.json says about a run that ended with this error: alert, stopped, refused or failed."""
    code = error.exit_code if isinstance(error, HybridError) else EXIT_FAILED
    return {EXIT_ALERT: "alert", EXIT_STOPPED: "stopped", EXIT_REFUSED: "refused"}.get(code, "failed")
