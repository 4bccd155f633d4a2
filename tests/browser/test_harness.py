"""The harness itself: what is served, what is refused, how errors come back."""

import urllib.error
import urllib.request

import pytest

from browser.harness import StaticServer


@pytest.fixture
def files(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.js").write_text(
        "export const sum = (a, b) => a + b;\nexport const fail = () => missing();\n"
    )
    (tmp_path / "open" / "data.bin").write_bytes(bytes(range(100)))
    (tmp_path / "secret.txt").write_text("secret")
    with StaticServer({"/files/": tmp_path / "open"}) as server:
        yield server


def get(server, path, **headers):
    return urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers))


def test_modules_are_served_with_their_type_and_cross_origin_isolation(files):
    answer = get(files, "/files/a.js")
    assert answer.headers["Content-Type"] == "text/javascript"
    assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"


def test_a_byte_range_is_served_and_recorded(files):
    answer = get(files, "/files/data.bin", Range="bytes=10-19")
    assert answer.status == 206
    assert answer.read() == bytes(range(10, 20))
    assert answer.headers["Content-Range"] == "bytes 10-19/100"
    assert get(files, "/files/data.bin", Range="bytes=-5").read() == bytes(range(95, 100))
    assert "GET /files/data.bin bytes=10-19" in files.requests


@pytest.mark.parametrize("path", ["/files/../secret.txt", "/files/%2e%2e/secret.txt", "/files/none.js", "/other"])
def test_nothing_outside_the_folders_is_served(files, path):
    with pytest.raises(urllib.error.HTTPError) as error:
        get(files, path)
    assert error.value.code == 404


@pytest.mark.browser
@pytest.mark.parametrize("place", ["call", "call_in_worker"])
def test_functions_are_called_and_their_errors_come_back(chromium, files, place):
    page = chromium.open(files)
    call = getattr(page, place)
    assert call("/files/a.js", "sum", 2, 3) == 5
    with pytest.raises(AssertionError, match="missing is not defined"):
        call("/files/a.js", "fail")
    assert page.do(lambda it: it.evaluate("crossOriginIsolated")) is True
    page.close()
