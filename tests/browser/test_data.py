"""Token stores in a real Chromium: read from a server in ranges, and built from a dropped file in the private file
system."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser.harness import PAGE, BrowserPage, Chromium, StaticServer
from hybrid.config.tree import DataSection
from hybrid.data.bpe import train_bpe
from hybrid.data.corpus import TextFiles
from hybrid.data.loader import BatchPlan, DataLoader
from hybrid.data.prepare import prepare
from hybrid.data.store import TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer
from hybrid.resources import resource

pytestmark = pytest.mark.browser

MODULE = "/test/support/data_page.js"
TEXT = "Grüße aus Köln: the quick brown fox, 東京 and a smile 🙂. <|endoftext|>\r\n" * 50
TOKENIZERS = {
    "bytes": ByteTokenizer(),
    "characters": CharacterTokenizer.from_texts([TEXT]),
    "bpe": train_bpe([TEXT], 300),
}
# A bundler finds packages where a browser needs to be told.
IMPORTS = b"""<script type=importmap>{"imports": {"@huggingface/tokenizers": "/packages/tokenizers.mjs"}}</script>"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dropped.txt").write_bytes(TEXT.encode())
    return tmp_path


@pytest.fixture
def serving(folder: Path) -> Iterator[StaticServer]:
    web = resource("web")
    packages = web / "node_modules" / "@huggingface" / "tokenizers" / "dist"
    folders = {"/runtime/": web / "runtime", "/test/": web / "test", "/stores/": folder, "/packages/": packages}
    with StaticServer(folders, {"/": PAGE + IMPORTS}) as running:
        yield running


@pytest.fixture
def opened(chromium: Chromium, serving: StaticServer) -> Iterator[BrowserPage]:
    page = chromium.open(serving)
    yield page
    page.close()


def store_of(folder: Path, kind: str) -> TokenStore:
    source = TextFiles((str(folder / "dropped.txt"),))
    described = {**source.describe(), "paths": ["dropped.txt"]}
    return build_store(source.documents(), TOKENIZERS[kind], folder / kind, source=described).store


def test_a_store_on_a_server_is_read_in_ranges(folder: Path, serving: StaticServer, opened: BrowserPage) -> None:
    store_of(folder, "bytes")
    settings = {
        "sequenceLength": 16,
        "split": {"by": "document", "validationShare": 0.1},
        "samples": {"mode": "windows", "stride": None, "isolateDocuments": True},
    }
    theirs = opened.call_in_worker(MODULE, "readStore", "/stores/bytes/", settings, 3)
    data = prepare(DataSection.model_validate({"store": str(folder / "bytes"), **settings}))
    with DataLoader(data.train, BatchPlan(len(data.train), 4, 3), 2) as loader:
        ids = [batch.ids.ravel().tolist() for step in (1, 2, 3) for batch in loader.step(step)]
    assert theirs == {"fingerprint": data.fingerprint, "kind": "bytes", "ids": ids}
    asked = [line for line in serving.requests if "tokens.bin" in line]
    assert asked and all("bytes=" in line for line in asked)
    assert len(asked) == 2  # its size, and the one chunk that holds everything


@pytest.mark.parametrize(("kind", "place"), [("bytes", "worker"), ("characters", "worker"), ("bpe", "page")])
def test_a_dropped_file_becomes_the_store_that_python_makes(
    folder: Path, opened: BrowserPage, kind: str, place: str
) -> None:
    store = store_of(folder, kind)
    tokenizer = store.tokenizer.to_json() if kind == "bpe" else kind
    call = opened.call_in_worker if place == "worker" else opened.call
    theirs = call(MODULE, "buildPrivately", TEXT, tokenizer)
    assert theirs["text"] == TEXT
    assert theirs["manifest"] == (store.path / "manifest.json").read_text(encoding="utf-8")
