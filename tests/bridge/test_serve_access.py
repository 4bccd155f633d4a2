"""Who may ask `hybrid serve`, and what every answer says to a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bridge.served import BASE, HOST, LOGIN, PORT, TOKEN, Served, copy_run, declaration, packed, running
from hybrid.bridge.server.login import is_own_host, make_token
from hybrid.bridge.server.pages import Site
from hybrid.errors import ConfigError, HybridError

COOKIE = f"hybrid-{PORT}"
PLACES = [
    ("GET", "/"),
    ("GET", "/runs/"),
    ("GET", "/api/runs"),
    ("GET", "/api/openapi.json"),
    ("POST", "/api/uploads"),
    ("GET", "/nothing"),
    ("DELETE", "/api/runs"),
]


def bare(asked: Served, method: str, path: str, **headers: str) -> Any:
    return asked.client.request(method, f"{BASE}{path}", headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "token another-token-of-the-same-kind"},
        {"authorization": f"token {TOKEN}x"},
        {"authorization": f"token {TOKEN[:-1]}"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": "token"},
        {"cookie": f"{COOKIE}=wrong"},
        {"cookie": f"hybrid-1={TOKEN}"},
        {"cookie": f"{COOKIE}"},
        {"cookie": f'{COOKIE}="\\377'},
        {"x-token": TOKEN},
    ],
    ids=lambda headers: str(headers),
)
@pytest.mark.parametrize(("method", "path"), PLACES)
def test_without_the_token_nothing_is_served(asked: Served, headers: dict[str, str], method: str, path: str) -> None:
    answer = bare(asked, method, path, **headers)
    assert answer.status_code == 401 and "token" in answer.json()["error"]["message"]
    assert TOKEN not in answer.text and "set-cookie" not in answer.headers


@pytest.mark.parametrize("headers", [LOGIN, {"authorization": f"Bearer {TOKEN}"}, {"cookie": f"a=b; {COOKIE}={TOKEN}"}])
def test_a_header_or_the_cookie_shows_the_token(asked: Served, headers: dict[str, str]) -> None:
    assert bare(asked, "GET", "/api/runs", **headers).json() == {"runs": []}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/?token={}", "/"),
        ("/runs/?a=1&token={}&b=%20", "/runs/?a=1&b=+"),
        ("/api/runs?token={}", "/api/runs"),
        ("//evil.example/?token={}", "/evil.example/"),
        ("/%5cevil.example/?token={}", "/%5cevil.example/"),
    ],
)
def test_the_address_with_the_token_gives_a_cookie_and_is_left(asked: Served, path: str, place: str) -> None:
    answer = asked.client.get(f"{BASE}{path.format(TOKEN)}")
    assert answer.status_code == 303 and answer.headers["location"] == place
    cookie = answer.headers["set-cookie"]
    assert cookie == f"{COOKIE}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert TOKEN not in answer.text
    asked.client.cookies.clear()
    assert bare(asked, "GET", "/", cookie=cookie.split(";")[0]).status_code == 200


def test_a_wrong_token_in_the_address_is_refused_and_only_reading_takes_one(asked: Served) -> None:
    assert bare(asked, "GET", "/?token=wrong").status_code == 401
    assert bare(asked, "GET", "/?token=%ff").status_code == 401
    assert bare(asked, "POST", f"/api/uploads?token={TOKEN}").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": f"evil.example:{PORT}"},
        {"host": "127.0.0.1"},
        {"host": "127.0.0.1:80"},
        {"host": f"127.0.0.1:{PORT}.evil.example"},
        {"host": f"10.0.0.1:{PORT}"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8888"},
        {"origin": f"https://{HOST}"},
        {"origin": f"http://localhost:{PORT}"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=lambda headers: "=".join(*headers.items()),
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/api/runs"), ("GET", f"/?token={TOKEN}"), ("POST", "/api/plans")]
)
def test_a_stranger_is_turned_away_even_with_the_token(
    asked: Served, headers: dict[str, str], method: str, path: str
) -> None:
    answer = bare(asked, method, path, **LOGIN, **headers)
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert "only this server's own page may ask" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", [HOST, f"localhost:{PORT}", f"LOCALHOST:{PORT}", f"[::1]:{PORT}"])
def test_the_page_itself_may_ask(asked: Served, host: str) -> None:
    headers = {**LOGIN, "host": host, "origin": f"http://{host.lower()}", "sec-fetch-site": "same-origin"}
    assert bare(asked, "GET", "/api/runs", **headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "address", "own"),
    [
        ("192.168.1.7:8321", "0.0.0.0", True),
        ("[fd00::7]:8321", "::", True),
        ("192.168.1.7:80", "0.0.0.0", False),
        ("evil.example:8321", "0.0.0.0", False),
        ("box.lan:8321", "box.lan", True),
        ("127.0.0.1:8321", "0.0.0.0", True),
        ("192.168.1.7:8321", "127.0.0.1", False),
        ("8321", "0.0.0.0", False),
    ],
)
def test_on_a_network_only_names_could_be_a_strangers(host: str, address: str, own: bool) -> None:
    assert is_own_host(host, address, 8321) is own


@pytest.mark.parametrize("token", ["short", "", "with spaces in it, and more", "x" * 201, "ümlaute-in-the-token"])
def test_a_token_that_would_not_do_is_refused_without_repeating_it(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_token(token)
    assert not token or token not in str(caught.value)
    assert len(make_token(None)) >= 32 and make_token(None) != make_token(None)


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/api/runs", 200), ("/nothing", 404), ("/api/runs/x", 404)])
def test_every_answer_isolates_the_page(asked: Served, path: str, status: int) -> None:
    for answer in (asked.ask("GET", path, status), bare(asked, "GET", path)):
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
        assert rules.pop("script-src") == "'self' 'wasm-unsafe-eval'"
        assert rules.pop("img-src") == "'self' data:"
        assert rules.pop("default-src") == "'self'"
        assert set(rules.values()) == {"'none'"}, "and nothing looser"


def test_the_pages_come_with_their_types(asked: Served) -> None:
    assert asked.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    assert asked.ask("GET", "/site.json").headers["content-type"] == "application/json"
    assert asked.ask("GET", "/runs", 308).headers["location"] == "/runs/"
    assert "<title>watch" in asked.ask("GET", "/runs/").text
    assert asked.ask("GET", "/runs/watch.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert asked.ask("HEAD", "/app.js").content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "/..%2fetc%2fpasswd", "/a/..%5c..%5cb", "/%00", "/.hidden",
        "/runs/../../x", "/runs/%2e%2e/app/index.html", "/api/../x", "/%ff", "/plans//x", "/" + "a" * 300, "/C:/x",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_pages(asked: Served, path: str) -> None:
    assert asked.error("GET", path, 404)["name"] == "HybridError"


def test_other_methods_are_typed_errors_that_say_what_is_allowed(asked: Served) -> None:
    answer = asked.ask("DELETE", "/api/runs", 405)
    assert answer.json()["error"]["name"] == "HybridError" and "GET" in answer.headers["allow"]


def test_a_fault_of_the_server_is_a_typed_error_and_not_its_end(
    asked: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("hybrid.bridge.server.runs.RunFolders.summaries", broken)
    assert asked.error("GET", "/api/runs", 500) == {"name": "Error", "message": "a bug"}
    assert "ZeroDivisionError" in caplog.text
    assert asked.json("/api/data") == {"stores": []}


def test_what_is_private_or_changes_is_kept_by_nobody(served: Served, recording: Path) -> None:
    copy_run(recording, served.runs, "micro")
    upload = served.ask("POST", "/api/uploads", json=declaration(packed(recording, served.runs))).json()["id"]
    for path in (
        "/api/server", "/api/runs", "/api/runs/micro", "/api/runs/micro/metrics", "/api/compare?run=micro",
        "/api/runs/micro/checkpoints", "/api/runs/micro/checkpoints/step-00000010/model.safetensors", "/api/data",
        f"/api/uploads/{upload}", "/api/openapi.json",
    ):  # fmt: skip
        for headers in ({}, {"if-none-match": "*"}):
            answer = served.ask("GET", path, headers=headers)
            assert answer.headers["cache-control"] == "no-store" and "etag" not in answer.headers, path
    for status, path in ((404, "/nothing"), (404, "/api/runs/x"), (404, f"/api/plans/{'0' * 64}/plan.json")):
        assert served.ask("GET", path, status).headers["cache-control"] == "no-store"
    for answer in (bare(served, "GET", "/"), served.client.get(f"{BASE}/?token={TOKEN}")):
        assert answer.status_code in (401, 303) and answer.headers["cache-control"] == "no-store"


def test_the_pages_are_kept_by_a_browser_that_asks_each_time_whether_they_are_the_same(served: Served) -> None:
    for path in ("/", "/app.js", "/site.json", "/runs/", "/runs/watch.js"):
        answer = served.ask("GET", path)
        tag = answer.headers["etag"]
        assert answer.headers["cache-control"] == "private, no-cache" and re.fullmatch('"[0-9a-f]{64}"', tag)
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = served.ask("GET", path, 304, headers={"if-none-match": known, "range": "bytes=0-0"})
            assert again.content == b"" and again.headers["etag"] == tag
            assert again.headers["cache-control"] == "private, no-cache"
            assert again.headers["cross-origin-embedder-policy"] == "require-corp"
        assert served.ask("GET", path, headers={"if-none-match": '"other"'}).content == answer.content
        assert served.ask("HEAD", path).headers["etag"] == tag
        assert served.ask("GET", path, 206, headers={"range": "bytes=0-0", "if-range": tag}).content
        assert served.ask("GET", path, headers={"range": "bytes=0-0", "if-range": '"other"'}).content == answer.content
        assert bare(served, "GET", path, **{"if-none-match": tag}).status_code == 401, "the token is asked for first"


def test_a_page_that_was_built_again_is_another_one(served: Served) -> None:
    watch = served.runs.parent / "built" / "web" / "dist" / "watch" / "watch.js"
    tag = served.ask("GET", "/runs/watch.js").headers["etag"]
    watch.write_text("// anew")
    assert served.ask("GET", "/runs/watch.js", headers={"if-none-match": tag}).text == "// anew"


def test_a_page_that_cannot_be_written_is_said_at_once_and_leaves_nothing(built: Path) -> None:
    places: list[Path] = []

    def broken(out: Path) -> None:
        places.append(out)
        raise HybridError("no page today")

    with pytest.raises(HybridError, match="no page today"):
        Site(broken)
    assert not places[0].parent.exists()


@pytest.mark.parametrize("page", ["app", "watch"])
def test_a_page_that_is_not_built_is_said_so(built: Path, tmp_path: Path, page: str) -> None:
    (built / page / "index.html").unlink()

    def there(name: str) -> Path:
        if not (tmp_path / "built" / name).exists():
            raise HybridError("lacks it")
        return tmp_path / "built" / name

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.bridge.server.pages.resource", there)
        with pytest.raises(HybridError, match=f"{page} is not built: run `make web`"), running(tmp_path):
            pass
