"""Files of JSON lines: appended, cut, and read after a crash."""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import HybridError
from hybrid.training import metrics_log
from hybrid.training.metrics_log import JsonLines, read_rows


def log(folder: Path) -> JsonLines:
    return JsonLines(folder / "rows.jsonl", folder / "discarded.jsonl")


def filled(folder: Path, steps: int) -> JsonLines:
    rows = log(folder)
    for step in range(1, steps + 1):
        rows.append({"step": step, "text": "ä\n"})
    return rows


def test_a_row_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    rows = filled(tmp_path, 3)
    assert (tmp_path / "rows.jsonl").read_text() == "".join(f'{{"step":{n},"text":"ä\\n"}}\n' for n in (1, 2, 3))
    rows.close()
    rows.append({"step": 4})
    assert [row["step"] for row in read_rows(rows.path)] == [1, 2, 3, 4]


def test_cutting_moves_later_rows_and_only_those(tmp_path: Path) -> None:
    rows = filled(tmp_path, 5)
    assert rows.cut(5) == 0 and not (tmp_path / "discarded.jsonl").exists()
    assert rows.cut(3) == 2
    rows.append({"step": 4, "again": True})
    assert rows.cut(2) == 2
    assert [row["step"] for row in read_rows(tmp_path / "rows.jsonl")] == [1, 2]
    assert [row["step"] for row in read_rows(tmp_path / "discarded.jsonl")] == [4, 5, 3, 4]
    assert log(tmp_path / "nowhere").cut(0) == 0


@pytest.mark.parametrize("rest", [b'{"step":4', b'{"step":4}', b"\x00\x00\n", b"[4]\n", b'{"step":"x"}\n'])
def test_what_a_crash_left_of_a_row_is_dropped(tmp_path: Path, rest: bytes) -> None:
    rows = filled(tmp_path, 3)
    rows.close()
    with rows.path.open("ab") as file:
        file.write(rest)
    assert [row["step"] for row in read_rows(rows.path)] == [1, 2, 3]
    assert rows.cut(3) == 0
    rows.append({"step": 4})
    assert [row["step"] for row in read_rows(rows.path)] == [1, 2, 3, 4]


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        log(tmp_path).append({"step": 1, "loss": float("nan")})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    rows = log(tmp_path)
    with pytest.raises(
        HybridError, match=r"rows\.jsonl: could not be written: No space left on device; checkpoints are"
    ):
        rows.append({"step": 1})
    rows.close()


def test_a_row_that_the_disk_takes_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reluctant(FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:3])

    monkeypatch.setattr(metrics_log, "FileIO", Reluctant)
    assert list(read_rows(filled(tmp_path, 2).path)) == [{"step": 1, "text": "ä\n"}, {"step": 2, "text": "ä\n"}]
