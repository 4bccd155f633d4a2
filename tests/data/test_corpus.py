"""Corpora: the same documents in the same order everywhere, and errors that name file and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpora import shared
from hybrid.data.corpus import Document, StandardLibrary, TextFiles, open_source
from hybrid.errors import ConfigError, DataContractError


def texts(source: TextFiles | StandardLibrary) -> list[str]:
    return [document.text for document in source.documents()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "b.txt": "second",
        "a.txt": "first\r\n",
        "sub/c.md": "third",
        "sub/.hidden": "no",
        ".git/x": "no",
        "Z.txt": "zero",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path


class TestTextFiles:
    def test_a_folder_is_read_in_code_point_order_without_hidden_files(self, folder: Path) -> None:
        assert texts(TextFiles((str(folder),))) == ["zero", "first\r\n", "second", "third"]

    def test_a_pattern_chooses_files(self, folder: Path) -> None:
        assert texts(TextFiles((str(folder / "*.txt"),))) == ["zero", "first\r\n", "second"]
        assert texts(TextFiles((str(folder / "**" / "*.md"),))) == ["third"]

    def test_paths_keep_their_order_and_no_file_is_read_twice(self, folder: Path) -> None:
        paths = (str(folder / "b.txt"), str(folder / "sub" / ".." / "b.txt"), str(folder / "*.txt"))
        assert texts(TextFiles(paths)) == ["second", "zero", "first\r\n"]

    def test_documents_are_named_by_their_file(self, folder: Path) -> None:
        assert next(TextFiles((str(folder / "a.txt"),)).documents()).name == str(folder / "a.txt")

    def test_a_byte_order_mark_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "bom.txt"
        path.write_bytes(b"\xef\xbb\xbfhi \xef\xbb\xbf")
        assert texts(TextFiles((str(path),))) == ["hi \ufeff"]

    def test_what_is_not_utf8_is_named_with_the_offset(self, folder: Path) -> None:
        (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
        with pytest.raises(DataContractError, match=r"latin\.txt: not UTF-8 at offset 2 \(byte 0xFC"):
            texts(TextFiles((str(folder),)))

    def test_a_character_that_the_file_ends_within_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "cut.txt").write_bytes("né".encode()[:-1])
        with pytest.raises(DataContractError, match=r"cut\.txt: not UTF-8 at offset 1"):
            texts(TextFiles((str(tmp_path),)))

    @pytest.mark.parametrize("name", ["absent.txt", "*.absent"])
    def test_a_path_without_files_is_named(self, folder: Path, name: str) -> None:
        with pytest.raises(DataContractError, match=name.replace("*", r"\*")):
            texts(TextFiles((str(folder / name),)))

    def test_an_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match="no file found"):
            texts(TextFiles((str(tmp_path),)))

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [
            (4, ["zero"]),
            (3, ["zer"]),
            (11, ["zero", "first\r\n"]),
            (13, ["zero", "first\r\n", "se"]),
            (10**6, ["zero", "first\r\n", "second"]),
        ],
    )
    def test_max_bytes_limits_the_text(self, folder: Path, limit: int, expected: list[str]) -> None:
        assert texts(TextFiles((str(folder / "*.txt"),), max_bytes=limit)) == expected

    @pytest.mark.parametrize("limit", range(1, 20))
    def test_max_bytes_never_cuts_a_character(self, tmp_path: Path, limit: int) -> None:
        path = tmp_path / "wide.txt"
        path.write_text("é🙂東" * 40, encoding="utf-8")
        (text,) = texts(TextFiles((str(path),), max_bytes=limit)) or [""]
        assert ("é🙂東" * 40).startswith(text)
        assert limit - 3 <= len(text.encode()) <= limit

    def test_the_digest_changes_with_the_files(self, folder: Path) -> None:
        source = TextFiles((str(folder),))
        before = source.digest()
        assert source.digest() == before
        (folder / "b.txt").write_text("changed", encoding="utf-8")
        assert source.digest() != before
        assert TextFiles((str(folder),), max_bytes=5).digest() != source.digest()


class TestJsonLines:
    def write(self, folder: Path, *lines: str) -> TextFiles:
        path = folder / "lines.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return TextFiles((str(path),))

    def test_each_line_is_a_document(self, tmp_path: Path) -> None:
        source = self.write(tmp_path, '{"text": "one\\n"}', "", '{"id": 2, "text": "zwei \u2028"}', "   ")
        assert texts(source) == ["one\n", "zwei \u2028"]
        assert [document.name.rsplit(":", 1)[1] for document in source.documents()] == ["1", "3"]

    def test_another_field_can_be_named(self, tmp_path: Path) -> None:
        self.write(tmp_path, '{"content": "c"}')
        assert texts(TextFiles((str(tmp_path / "lines.jsonl"),), field="content")) == ["c"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON"),
            ("[]", "a JSON list, expected an object with 'text'"),
            ('{"content": 1, "id": 2}', "no field 'text'; it has: content, id"),
            ("{}", "no field 'text'; it has: none"),
            ('{"text": null}', "field 'text' is null, expected a string"),
            ("[" * 100_000, "not JSON"),
        ],
    )
    def test_a_bad_line_is_named_with_its_number(self, tmp_path: Path, line: str, message: str) -> None:
        source = self.write(tmp_path, '{"text": "fine"}', "", line)
        with pytest.raises(DataContractError, match=rf"lines\.jsonl, line 3: {message}"):
            texts(source)

    def test_bytes_that_are_not_utf8_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
        with pytest.raises(DataContractError, match=r"x\.jsonl, line 2: not UTF-8 at byte 10"):
            texts(TextFiles((str(tmp_path),)))

    def test_the_web_text_sample_has_300_documents(self) -> None:
        path = shared("c4_demo.jsonl")
        expected = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        assert texts(TextFiles((str(path),))) == expected
        assert len(expected) == 300


class TestStandardLibrary:
    def test_it_is_there_large_enough_and_quick_to_list(self) -> None:
        found = list(StandardLibrary(max_bytes=500_000).documents())
        assert sum(len(document.text.encode()) for document in found) == 500_000
        assert all(document.text.isprintable() is False or document.text for document in found)

    def test_nothing_that_differs_between_machines_is_in_it(self) -> None:
        source = StandardLibrary()
        names = [file.relative_to(source.root).as_posix() for file in source.files()]
        assert names == sorted(names)
        assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
        parts = {part for name in names for part in name.split("/")}
        assert not parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
        assert not any(part.startswith(("_sysconfigdata", "config-")) for part in parts)

    def test_another_process_reads_the_same(self) -> None:
        script = (
            "from hybrid.data.corpus import StandardLibrary\n"
            "from hybrid.contracts.stable_json import stable_hash\n"
            "source = StandardLibrary(max_bytes=300_000)\n"
            "print(source.digest(), stable_hash([[d.name, d.text] for d in source.documents()]))"
        )
        runs = {
            subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)
        }
        assert len(runs) == 1

    def test_encodings_are_honoured_line_ends_unified_and_bad_files_counted(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\r\nx = 'é'\r".encode("latin-1"))
        (tmp_path / "b.py").write_bytes(b"x = '\xff'\n")
        (tmp_path / "c.py").write_bytes(b"# coding: no-such-codec\n")
        (tmp_path / "d.py").write_bytes(b"\xef\xbb\xbfok\n")
        (tmp_path / "test").mkdir()
        (tmp_path / "test" / "t.py").write_bytes(b"no\n")
        source = StandardLibrary(root=tmp_path)
        expected = [Document("a.py", "# -*- coding: latin-1 -*-\nx = 'é'\n"), Document("d.py", "ok\n")]
        assert list(source.documents()) == expected
        assert source.skipped == 2
        assert list(source.documents()) == expected
        assert source.skipped == 2

    def test_an_installation_without_sources_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match=r"no source files .* name a text file or folder as data\.source"):
            list(StandardLibrary(root=tmp_path).documents())


class TestOpenSource:
    def test_names_choose_the_source(self, tmp_path: Path) -> None:
        assert open_source("stdlib", max_bytes=5) == StandardLibrary(max_bytes=5)
        assert open_source("a.txt") == TextFiles(("a.txt",))
        assert open_source(["a.txt", "b"], max_bytes=7) == TextFiles(("a.txt", "b"), max_bytes=7)

    def test_stdlib_stands_alone(self) -> None:
        with pytest.raises(ConfigError, match="stdlib stands alone"):
            open_source(["stdlib", "a.txt"])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_pipe_is_there_but_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataContractError, match="pipe: neither a file nor a folder"):
        TextFiles((str(tmp_path / "pipe"),)).files()
