"""Scripts and what becomes of them, with a host that writes down what it is asked."""

import asyncio
import json
from typing import Any

import pytest
from hybrid_tab import byte_batches, report
from hybrid_tab.running import run as run_script
from hybrid_tab.running import stop

from hybrid.errors import DataContractError, HybridError
from hybrid.models import decoder
from tab_python.cases import F16, facts


class Handle:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    async def begin(self, *arguments: Any) -> None:
        self.calls.append(("begin", *arguments))

    async def accumulate(self, words: Any) -> None:
        self.calls.append(("accumulate", len(words)))

    async def apply(self) -> None:
        self.calls.append(("apply",))

    async def evaluate(self, words: Any) -> dict[str, float]:
        return {"lossSum": 6.0, "targetTokens": 4}


class Failure(Exception):
    """An error as JavaScript has it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name, self.message = name, message


class Host:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failure: Exception | None = None

    async def deviceProfile(self) -> str:
        if self.failure:
            raise self.failure
        return json.dumps(facts(F16))

    def file(self, name: str, content: bytes) -> None:
        self.calls.append(("file", name))

    async def openSession(self, seed: int, interval: int) -> Handle:
        return Handle(self.calls)

    def report(self, names: list[str], values: list[Any]) -> None:
        self.calls.append(("report", dict(zip(names, values, strict=True))))


def run(source: str, host: Host | None = None) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads(asyncio.run(run_script(source, host or Host())))
    return outcome


COMPILE = """
import hybrid_tab as tab
from hybrid.models.config import ModelConfig
from hybrid.plan.compiler import PlanSettings
plan = await tab.compile(PlanSettings(ModelConfig(256, 8, 1, 8, 2, 16, activation="silu"), 2, 8))
"""


def test_a_step_crosses_the_border_once_for_each_program() -> None:
    host = Host()
    source = COMPILE + (
        "session = await tab.open(plan)\n"
        "batches = list(tab.byte_batches('ab' * 40, batch_size=2, sequence_length=8, steps=2))\n"
        "await session.step(batches, z_loss=0.5)\n"
        "await session.step(batches[:1])\n"
        "tab.report(loss=await session.evaluate(batches[0]))\n"
    )
    assert run(source, host) == {}
    assert ("file", "plan.json") in host.calls
    words = 4 * 2 * 8 + 2
    assert [call for call in host.calls if call[0] != "file"] == [
        ("begin", 1, 32, 2, 0.5), ("accumulate", words), ("accumulate", words), ("apply",),
        ("begin", 2, 16, 1, 0.0), ("accumulate", words), ("apply",),
        ("report", {"loss": 1.5}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("LimitExceeded", "LimitExceeded"), ("TypeError", "HybridError"), ("AlertRaised", "HybridError")],
)
def test_an_error_of_javascript_is_the_same_error_here(name: str, kind: str) -> None:
    host = Host()
    host.failure = Failure(name, "too large")
    outcome = run(COMPILE, host)
    assert (outcome["kind"], outcome["message"], outcome["line"]) == (kind, "too large", 5)


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("1 / 0", "ZeroDivisionError", 1),
        ("x = 1\ny = (\n", "SyntaxError", 2),
        ("import nothing_of_this_name", "ModuleNotFoundError", 1),
        ("\nraise SystemExit(3)", "SystemExit", 2),
        ("def f():\n  return g()\ndef g():\n  return h\n\nf()", "NameError", 4),
        ("import json\njson.loads('{')", "JSONDecodeError", 2),
        ("\n\nraise KeyboardInterrupt", "Stopped", 3),
    ],
)
def test_what_goes_wrong_is_told_with_the_line_of_the_script(source: str, kind: str, line: int) -> None:
    outcome = run(source)
    assert (outcome["kind"], outcome["line"]) == (kind, line)
    assert outcome["text"] == source.splitlines()[line - 1].strip()
    assert "hybrid_tab" not in outcome["traceback"]


@pytest.mark.parametrize("source", ["", "raise SystemExit", "exit = 1", "await __import__('asyncio').sleep(0)"])
def test_a_script_may_end_in_peace(source: str) -> None:
    assert run(source) == {}


@pytest.mark.parametrize("wait", [0, 1], ids=["before its first line", "where it waits"])
def test_a_script_is_stopped(wait: int) -> None:
    async def both() -> dict[str, Any]:
        running = asyncio.ensure_future(run_script("import asyncio\nawait asyncio.sleep(100)", Host()))
        for _ in range(1 + 3 * wait):
            await asyncio.sleep(0)
        stop()
        outcome: dict[str, Any] = json.loads(await running)
        return outcome

    outcome = asyncio.run(both())
    assert outcome["kind"] == "Stopped"
    assert outcome["line"] in (None, 2)


def test_an_error_that_cannot_say_what_is_wrong_is_one_all_the_same() -> None:
    outcome = run("class E(Exception):\n    def __str__(self):\n        return 1 / 0\nraise E\n")
    assert (outcome["kind"], outcome["message"], outcome["line"]) == ("E", "", 4)


def test_the_decoder_is_its_own_again_after_a_script() -> None:
    own = dict(vars(decoder))
    assert run("from hybrid.models import decoder\ndecoder.layer = None\ndecoder.more = 1") == {}
    assert decoder.layer is own["layer"]


def test_batches_of_bytes_take_each_window_once_an_epoch() -> None:
    text = bytes(range(65))
    batches = list(byte_batches(text, batch_size=2, sequence_length=8, steps=8))
    starts = [batch.ids[row * 8] for batch in batches for row in (0, 1)]
    assert sorted(starts[:8]) == sorted(starts[8:]) == [*range(0, 64, 8)]
    assert starts[:8] != starts[8:]
    assert all(bytes(batch.targets[:7]) == bytes(batch.ids[1:8]) for batch in batches)
    assert batches[0].target_tokens == 16


def test_without_a_device_and_without_text_there_is_an_error_that_says_so() -> None:
    with pytest.raises(HybridError, match="there is no device here"):
        report(loss=1)
    with pytest.raises(DataContractError, match="a text of 3 bytes has no window of 8 tokens"):
        list(byte_batches("abc", batch_size=1, sequence_length=8, steps=1))
