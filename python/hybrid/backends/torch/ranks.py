"""Rank safety: processes that train together, fail together, and stop together.

Rank 0 leads: it runs the training loop, and the others do what it says (`leading`, `following`), so no decision is ever
taken twice. What can go wrong on one rank reaches all of them:

* `main` runs an action on rank 0 and gives its result, or its error, to every rank;
* `each` runs an action on every rank and gathers errors: all ranks raise the same message, which names each rank that
  failed;
* an error anywhere else is posted under one key of the store that started the ranks. A thread on each rank watches
  that key, and ends a process that does not come back from a collective that waits for the lost rank.

The store is there before anything else, so that what goes wrong on the way to the first collective (settings, devices,
connections) is told as well. A stop asked of any rank (a signal reaches one process) is posted likewise, and rank 0
stops for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hybrid.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, HybridError, StopRequested

ERROR, STOP = "hybrid/error", "hybrid/stop"  # what was posted
HERE, ALL_HERE = "hybrid/here", "hybrid/all-here"  # who has come (and how many), and that all have
SEEN, ENDED = "hybrid/seen", "hybrid/ended"  # how many ranks know of the error, and have come to their end
POLL_SECONDS = 0.2
# A rank that learns of another's error has this long to come back from whatever it is in.
GRACE_SECONDS = 12.0
# A collective that another rank's error has broken may fail before that error is posted.
BREAKS_FIRST_SECONDS = 1.5
# Collectives themselves never time out: rank 0 may read data for an hour while the others wait.
FOREVER = timedelta(days=30)
START = "HYBRID_START_SECONDS"  # for all processes to find each other: an environment variable
START_SECONDS = 300.0  # without it
# How gloo words a collective that the end of another process has broken. Its error has no type of its own.
BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
LOST = "another rank has ended without a word, as one that is killed does (perhaps for want of memory)"
STORE_GONE = "the process that holds the store of all ranks has ended without a word"
WAIT = timedelta(seconds=1)  # for a value, before looking whether anything has failed


class RankFailed(HybridError):
    """Something failed on one or more ranks; the message is the same on all of them."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _start_seconds() -> float:
    """ConfigError for a setting that is no time."""
    text = os.environ.get(START, str(START_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < FOREVER.total_seconds():
        raise ConfigError(f"{START} = {text!r}: expected a number of seconds above 0")
    return seconds


def _late(who: str, seconds: float, why: str = "") -> str:
    return (
        f"{who} did not come within {seconds:g} seconds{why}: see what the other nodes say; "
        f"if they only take longer to start, set {START}"
    )


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Ranks:
    """The processes of one run. Use it as a context manager around everything that this one does.

    device: where this process computes; collectives need one, and without it they come with `connect`.
    stop_requested: gives the reason why a stop was asked of this process, or None. on_stop: on rank 0, hears the
    reason when one was asked of another. on_lost: hears the error with which this process ends without coming back
    from what it is in; in another thread.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        stop_requested: Callable[[], str | None] = lambda: None,
        on_stop: Callable[[str], None] = lambda reason: None,
        on_lost: Callable[[RankFailed], None] = lambda error: None,
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = world_size()
        self.device = device
        self._stop_requested = stop_requested
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._finished = threading.Event()
        self._posted_stop = False
        self._saves = True  # whether a stop has something to save
        self._posted = False  # whether the posted error is this rank's
        self._failure: RankFailed | None = None  # the posted one, once this rank knows of it
        self._meetings = 0

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Ranks:
        with self._not_for_ever():
            self._meet(_start_seconds())
        # The watching thread has a connection of its own: a call that waits would hold up the others of a shared one.
        self._watched = self.store.clone()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()
        if self.device is not None:
            try:
                self.connect(self.device)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def _meet(self, seconds: float) -> None:
        """Find the store, and wait until every rank has. Who does not come cannot say why: it has no store."""
        limit = timedelta(seconds=seconds)
        until = time.monotonic() + seconds
        try:
            self.store: Any = next(rendezvous("env://", timeout=limit))[0]
        except dist.DistError as error:
            raise RankFailed(_late("some processes", seconds, f" ({_describe(error).splitlines()[0]})")) from error
        try:
            self.store.set_timeout(limit)
            self.store.set(f"{HERE}/{self.rank}", "")
            if self.store.add(HERE, 1) == self.size:
                self.store.set(ALL_HERE, "")
            while not self._all_here(min(WAIT, limit)):
                if time.monotonic() > until:
                    missing = [str(rank) for rank in range(self.size) if not self.store.check([f"{HERE}/{rank}"])]
                    raise self._first(RankFailed(_late(f"rank {', '.join(missing)}", seconds)))
        except RankFailed:
            with contextlib.suppress(Exception):
                self.store.add(SEEN, 1)
                self._wait_for(SEEN, self.store.add(HERE, 0))
            raise
        except dist.DistError as error:
            raise RankFailed(STORE_GONE) from error

    def _all_here(self, wait: timedelta) -> bool:
        try:
            self.store.wait([ALL_HERE], wait)
            return True
        except dist.DistStoreError:
            return False
        finally:
            self.check()

    def connect(self, device: torch.device) -> None:
        """Make collectives possible, once. Every rank must call this.

        Who connects waits for all others, for as long as it takes; the watching thread runs already, and ends it where
        one of them has failed instead.
        """
        if dist.is_initialized():
            return
        self.device = device
        cuda = device.type == "cuda"
        with self.together("connecting"):
            if cuda:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=self.store, rank=self.rank, world_size=self.size, timeout=FOREVER,
            )  # fmt: skip

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave together. An error here is posted for the others; the first one posted is raised everywhere."""
        first = None if error is None else self.post(error)
        if self._posted or (self.rank == 0 and self.failure() is not None):
            # What others wait for in a collective, they get when this process has ended: its connections close then.
            # The store may end with it, or with rank 0, so not before all of them have seen what it says.
            self._wait_for(SEEN)
        elif self.failure() is None:
            self._wait_for(ENDED)  # without an error, or with one that all ranks have raised
        self._finished.set()
        self._thread.join(timeout=5 * POLL_SECONDS)
        if first is None:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        if first is not None and first is not error:
            raise first from error

    @contextmanager
    def _not_for_ever(self) -> Iterator[None]:
        """A process that is asked to stop inside the block, where it waits for others, need not wait until they come:
        there is nothing to save yet."""
        here = threading.Event()

        def watch() -> None:
            while not here.wait(POLL_SECONDS):
                if (reason := self._stop_requested()) is not None and not here.wait(GRACE_SECONDS):
                    print(f"hybrid: stopped before all ranks had found each other ({reason})", file=sys.stderr)
                    os._exit(EXIT_STOPPED)

        threading.Thread(target=watch, name="rendezvous", daemon=True).start()
        try:
            yield
        finally:
            here.set()

    def _wait_for(self, counter: str, ranks: int = 0) -> None:
        """Until all ranks, or so many, have been counted there, or have had enough time to."""
        with contextlib.suppress(Exception):
            if counter == ENDED:
                self.store.add(counter, 1)
            until = time.monotonic() + GRACE_SECONDS
            while self.store.add(counter, 0) < (ranks or self.size) and time.monotonic() < until:
                time.sleep(0.05)

    # --- errors ------------------------------------------------------------------------------------------------------

    def post(self, error: BaseException, what: str = "") -> RankFailed:
        """Tell the other ranks; gives the error that was posted first, which may be another rank's. what: the phase."""
        if isinstance(error, RankFailed):
            return error
        known = self.failure(wait=0.0 if isinstance(error, HybridError) else BREAKS_FIRST_SECONDS)
        if known is not None:
            return known
        text = _describe(error)
        if not isinstance(error, StopRequested):
            text = f"rank {self.rank} failed{f' in {what}' if what else ''}: {text}"
        return self._first(RankFailed(text, getattr(error, "exit_code", EXIT_FAILED)))

    def post_together(self, what: str, errors: Mapping[int, BaseException]) -> RankFailed:
        """The same for something that failed on the given ranks: every rank that knows of it may post it, in any
        thread."""
        told = "; ".join(f"rank {rank}: {_describe(error)}" for rank, error in sorted(errors.items()))
        code = getattr(errors[min(errors)], "exit_code", EXIT_FAILED)
        return self._first(RankFailed(f"{what} failed on {told}", code))

    def _first(self, failed: RankFailed) -> RankFailed:
        """Post an error; gives the one that was posted first."""
        with contextlib.suppress(Exception):
            text = json.dumps({"message": str(failed), "exitCode": failed.exit_code})
            first = _failure(self.store.compare_set(ERROR, "", text))
            self._posted = str(first) == str(failed)
            return first
        return failed

    def failure(self, wait: float = 0.0) -> RankFailed | None:
        """The error that some rank has posted; waits that many seconds for one."""
        until = time.monotonic() + wait
        while True:
            if self._failure is not None:
                return self._failure
            with contextlib.suppress(Exception):
                if self.store.check([ERROR]):
                    return _failure(self.store.get(ERROR))
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def check(self) -> None:
        """Raise what another rank has posted."""
        error = self.failure()
        if error is not None:
            raise error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Work with collectives inside: where they break because another rank failed, raise that rank's error."""
        try:
            yield
        except Exception as error:
            raise self.post(error, what) from error

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """On rank 0: a stop that is asked for inside the block ends all ranks, whatever they are in. Compiling takes
        minutes, and whoever asks for a stop often kills after half of one."""
        self._saves = False
        try:
            yield
        finally:
            self._saves = True

    def _watch(self) -> None:
        while self._failure is None:
            if self._finished.wait(POLL_SECONDS):
                return
            try:
                self._pass_on_stops()
                if self._watched.check([ERROR]):
                    self._failure = _failure(self._watched.get(ERROR))
                    self._watched.add(SEEN, 1)
            except Exception:  # the store has gone, and with it the launcher, or rank 0
                self._failure = RankFailed(STORE_GONE)
        if not self._finished.wait(GRACE_SECONDS):
            with contextlib.suppress(Exception):
                self._on_lost(self._failure)
            print(f"hybrid: {self._failure}", file=sys.stderr, flush=True)
            os._exit(self._failure.exit_code)

    def _pass_on_stops(self) -> None:
        if self.rank == 0:
            if not self._posted_stop and self._watched.check([STOP]):
                self._posted_stop = True
                self._on_stop(self._watched.get(STOP).decode())
            if not self._saves and (reason := self._stop_requested()) is not None:
                facts = {"message": f"stopped before the first step: {reason}", "exitCode": EXIT_STOPPED}
                self._watched.compare_set(ERROR, "", json.dumps(facts))
        elif not self._posted_stop and (reason := self._stop_requested()) is not None:
            self._posted_stop = True
            self._watched.compare_set(STOP, "", f"{reason} on rank {self.rank}")

    # --- together ----------------------------------------------------------------------------------------------------

    def main(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; its result (JSON values), or its error, on every rank. Every rank must call this."""
        name = self._meeting()
        if self.rank == 0:
            self.tell(name, _attempt(action))
        succeeded, value = self.hear(name)
        if not succeeded:
            raise RankFailed(f"{what} failed on rank 0: {value[0]}", value[1])
        return value

    def each(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank; all results (JSON values), in order of ranks. If any failed, all ranks raise one
        message that names each of them. Every rank must call this, and `action` must not wait for other ranks."""
        answers = self.gather(_attempt(action))
        failed = [(rank, value) for rank, (succeeded, value) in enumerate(answers) if not succeeded]
        if failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed)
            raise RankFailed(f"{what} failed on {told}", failed[0][1][1])
        return [value for _, value in answers]

    def any(self, flag: bool) -> bool:
        """Whether it is set on any rank. Every rank must call this."""
        return any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave (JSON values), in order of ranks, on every rank."""
        name = self._meeting()
        self.tell(f"{name}/{self.rank}", value)
        return [self.hear(f"{name}/{rank}") for rank in range(self.size)]

    def _meeting(self) -> str:
        self._meetings += 1
        return f"hybrid/meeting/{self._meetings}"

    def tell(self, name: str, value: Any) -> None:
        """Post a JSON value for others to hear."""
        self.store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """Wait for a value; raises what another rank has posted in the meantime."""
        while True:
            try:
                self.store.wait([name], WAIT)
            except dist.DistStoreError:
                self.check()
                continue
            return json.loads(self.store.get(name))


def _attempt(action: Callable[[], Any]) -> tuple[bool, Any]:
    """(True, result), or (False, (text of the error, exit code))."""
    try:
        return True, action()
    except Exception as error:
        return False, (_describe(error), getattr(error, "exit_code", EXIT_FAILED))


def _describe(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, HybridError):
        return text
    lost = f"{LOST}: " if isinstance(error, RuntimeError) and any(words in text for words in BROKEN) else ""
    return f"{lost}{type(error).__name__}: {text}" if text else type(error).__name__


def _failure(posted: bytes) -> RankFailed:
    facts = json.loads(posted)
    return RankFailed(facts["message"], facts["exitCode"])
