"""A session over several processes is filled from a checkpoint tensor by tensor; no impossible state gets through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.backends.protocol import SpreadSession
from hybrid.checkpoint import state
from hybrid.checkpoint.loading import load
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt
from hybrid.training.saved import restore
from training.micro import run

NORM = "model.norm.weight"


class Spread:
    """Implements the part of `SpreadSession` that is asked here."""

    def __init__(self) -> None:
        self.filled: dict[str, Any] = {}
        self.order: list[tuple[str, str]] = []
        self.names: list[tuple[str, str]] | None = None
        self.rest: tuple[Any, ...] = ()
        self.finished = False

    def export_pieces(self, folder: Path, what: str) -> Any:
        raise NotImplementedError

    @contextmanager
    def filling(self, names: list[tuple[str, str]], *rest: Any) -> Iterator[Callable[[str, str, Any], None]]:
        self.names, self.rest = names, rest

        def fill(group: str, name: str, values: Any) -> None:
            self.order.append((group, name))
            self.filled[name] = values

        yield fill
        self.finished = True


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    run(tmp_path, "run.steps=4")
    return CheckpointStore(tmp_path / "run")


def newest(store: CheckpointStore) -> CheckpointSnapshot:
    """What could be saved again."""
    found = store.latest()
    assert found is not None
    loaded = load(found.path)
    manifest = loaded.manifest
    return CheckpointSnapshot(
        model=loaded.model, optimizer=loaded.optimizer, model_config=loaded.model_config, runtime="reference",
        optimizer_step=manifest.optimizer_step, progress=manifest.progress, config=manifest.config,
        seed=manifest.seed, run_id=manifest.lineage.run_id, scaler=manifest.scaler, cursor=manifest.cursor,
        fingerprints=manifest.fingerprints, session=manifest.session, tokenizer_json=loaded.tokenizer_json,
    )  # fmt: skip


def forge(store: CheckpointStore, **changes: Any) -> CheckpointStore:
    """A run whose checkpoint has hashes that are all right, and other moments. None: without that tensor."""
    whole = newest(store)
    optimizer = {name: array for name, array in {**whole.optimizer, **changes}.items() if array is not None}
    forged = CheckpointStore(store.run_dir / "forged")
    forged.save(replace(whole, optimizer=optimizer))
    return forged


def pour(store: CheckpointStore, session: Any) -> Manifest:
    found = store.latest()
    assert found is not None
    return restore(session, store, found)


def test_a_spread_session_gets_the_whole_state(store: CheckpointStore) -> None:
    session = Spread()
    assert isinstance(session, SpreadSession)
    manifest = pour(store, session)
    whole = newest(store)
    assert session.names == session.order and session.finished
    assert session.rest == (manifest.optimizer_step, manifest.scaler)
    assert state.digests_of_arrays(session.filled) == state.digests_of_arrays({**whole.model, **whole.optimizer})


def test_the_next_save_descends_from_what_was_restored(store: CheckpointStore) -> None:
    elsewhere = CheckpointStore(store.run_dir / "branch")
    found = store.latest()
    assert found is not None
    restore(Spread(), elsewhere, found)  # type: ignore[arg-type]
    saved = elsewhere.load(elsewhere.save(newest(store))).manifest
    assert saved.lineage.previous_checkpoint_hash == found.checkpoint_hash


@pytest.mark.parametrize(
    ("slot", "value", "message"),
    [
        ("moment2", -1.0, "moment tensor 'moment2/model.norm.weight' holds negative value"),
        ("moment1", np.nan, "moment tensor 'moment1/model.norm.weight' holds 16 non-finite value"),
        ("moment1", None, "moment tensor 'moment1/model.norm.weight' is missing"),
    ],
)
def test_a_state_that_no_run_comes_to_is_refused(store: CheckpointStore, slot: str, value: Any, message: str) -> None:
    moment = f"{slot}/{NORM}"
    forged = forge(store, **{moment: None if value is None else np.full(16, value, np.float32)})
    session = Spread()
    with pytest.raises(CheckpointCorrupt, match=f"step-00000004: {message}"):
        pour(forged, session)
    assert not session.finished and moment not in session.filled
    assert (session.names is None) == (value is None)
