# SPDX-License-Identifier: Apache-2.0
"""`lazyattention documents ...` against a served engine, and what it says when things are wrong."""

import http.server
import json
import threading

import pytest
from tests.server.conftest import two_scopes
from typer.testing import CliRunner

from fixtures.fake_engine import FakeEngine
from fixtures.live_server import live_server
from lazyattention import envs
from lazyattention.cli.app import app
from lazyattention.documents.client import DocumentClient
from lazyattention.documents.document import Document
from lazyattention.errors import LazyAttentionError, RequestError


@pytest.fixture(scope="module")
def served():
    engine = FakeEngine()
    with live_server(engine) as server:
        engine.url = server.url
        yield engine


@pytest.fixture(autouse=True)
def empty(served):
    yield
    for entry in list(DocumentClient(served.url).list()):
        DocumentClient(served.url).delete(entry["id"])


def run(url, *words):
    result = CliRunner().invoke(app, ["documents", words[0], *map(str, words[1:]), "--url", url])
    return result.exit_code, result.output


def test_a_folder_is_uploaded_listed_pinned_and_deleted(served, tmp_path):
    (tmp_path / "lamp.md").write_text("# Lamp\nIt was lit in spring.")
    (tmp_path / "cape.txt").write_text("The cape is in the north.")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\x00")
    code, output = run(served.url, "upload", tmp_path)
    assert code == 0
    assert output.count("warmed") == 2
    assert "photo.png" in output  # left out, and said so
    lamp = str(tmp_path / "lamp.md")
    entries = {entry["id"]: entry for entry in DocumentClient(served.url).list()}
    assert entries[lamp]["is_stored"]
    code, output = run(served.url, "list", "--json")
    assert {json.loads(line)["id"] for line in output.splitlines()} == set(entries)
    assert "stored" in run(served.url, "list")[1]
    assert run(served.url, "pin", lamp, "--ttl-s", 60) == (0, f"pinned  {lamp}\n")
    assert run(served.url, "unpin", lamp)[0] == 0
    assert json.loads(run(served.url, "show", lamp)[1])["text"].startswith("# Lamp")
    code, output = run(served.url, "delete", lamp)
    assert code == 0
    assert "freed" in output
    assert run(served.url, "delete", lamp)[0] == 2


def test_many_documents_go_in_batches_and_long_lists_come_in_pages(served, tmp_path):
    for number in range(450):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    code, output = run(served.url, "upload", tmp_path, "--no-warm")
    assert code == 0
    assert output.count("kept") == 450
    assert sum(1 for _ in DocumentClient(served.url).list()) == 450


def test_documents_that_fail_make_the_command_fail(served, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    served.fail_with = RequestError("it does not fit")
    try:
        code, output = run(served.url, "upload", tmp_path)
    finally:
        served.fail_with = None
    assert code == 1
    assert "failed" in output
    assert "it does not fit" in output


def test_errors_are_one_readable_line(served):
    for url, said in (("ftp://x", "http://"), ("http://127.0.0.1:9", "lazyattention serve")):
        code, output = run(url, "list")
        assert code in (1, 2)
        assert said in output.replace("\n", " ")
        assert "Traceback" not in output


def test_the_key_comes_from_the_environment(monkeypatch):
    with live_server(FakeEngine(), scopes=two_scopes()) as server:
        assert "API key" in run(server.url, "list")[1]
        monkeypatch.setattr(envs, "API_KEY", "key-a")
        assert run(server.url, "list")[0] == 0


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {bad json}\n\n",
        b'data: {"error": {"message": "no room"}}\n\n',
        b'data: {"id": "x", "sta',
        b"garbage\n\n",
    ],
)
def test_a_server_that_talks_nonsense_is_an_error_or_nothing(stream):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(stream)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        client = DocumentClient(f"http://127.0.0.1:{server.server_port}")
        options = {"warm": True, "pin": False, "pin_ttl_s": None, "system": None}
        with pytest.raises(LazyAttentionError):
            list(client.upload([Document("x")], **options))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
