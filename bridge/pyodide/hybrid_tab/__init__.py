"""What a script in the tab works with: `compile` a plan for this device, `open` a session, and drive it step by step.

    plan = await compile(PlanSettings(model, batch_size=4, sequence_length=32), blocks={"feed_forward": mine})
    session = await open(plan, seed=1337)
    await session.step([batch])

Everything that touches the device is awaited, and is one call across the border to JavaScript. May import the layers of
`hybrid` up to `plan`, and nothing of Pyodide: what is on the other side comes in as `host`.
"""

from hybrid_tab.batches import IGNORE, Batch, byte_batches
from hybrid_tab.compiling import CompiledPlan, estimate, parse_profile, parse_settings
from hybrid_tab.session import Session, StepResult, compile, open, report

__all__ = [
    "IGNORE",
    "Batch",
    "CompiledPlan",
    "Session",
    "StepResult",
    "byte_batches",
    "compile",
    "estimate",
    "open",
    "parse_profile",
    "parse_settings",
    "report",
]
