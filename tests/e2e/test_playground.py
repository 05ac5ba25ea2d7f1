# SPDX-License-Identifier: Apache-2.0
"""The playground in a real headless Chromium: ask, reorder by drag and by keyboard, see hits, delete; and axe's rules."""

import os
import shutil
from pathlib import Path

import pytest
from tests.server.conftest import two_scopes

from fixtures.live_server import live_server

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra 'browser'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra 'browser'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)")
# Set to keep the pictures that docs/ shows.
PICTURES = os.environ.get("PLAYGROUND_PICTURES")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    yield from open_page(browser, server.url)


def open_page(browser, url, **options):
    context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **options})
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.set_default_timeout(15000)
    yield page
    context.close()
    # Chromium itself notes every refusal of the server as an error.
    assert not [fault for fault in faults if "Failed to load resource" not in fault], faults


def load_examples(page):
    page.get_by_role("button", name="load the examples").click()
    sync_api.expect(page.locator("#chosen li")).to_have_count(4)


def order(page):
    return [name.split("\n")[0].strip() for name in page.locator("#chosen .name").all_inner_texts()]


def ask(page):
    page.get_by_label("Most tokens of the answer").fill("12")
    page.get_by_role("button", name="Ask", exact=True).click()
    sync_api.expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    sync_api.expect(page.locator("#status")).to_contain_text("prompt tokens were reused")


def results(page):
    return [row.split("\t")[1] for row in page.locator("#report tr").all_inner_texts()]


def assert_accessible(page):
    violations = axe.Axe().run(page).response["violations"]
    assert not violations, [(v["id"], [node["html"][:120] for node in v["nodes"]]) for v in violations]


def picture(page, name):
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def test_documents_are_missed_once_and_hit_in_any_order(page):
    load_examples(page)
    ask(page)
    assert results(page) == ["○ miss"] * 4
    assert page.locator("#answer").inner_text()
    assert "Ask again" in page.locator("#verdict").inner_text()
    page.get_by_role("button", name="Move Coast trail up").click()
    ask(page)
    assert results(page) == ["✓ hit"] * 4
    assert "ms" in page.locator("#ttft-reuse").inner_text() or " s" in page.locator("#ttft-reuse").inner_text()
    assert page.locator("#ttft-full").inner_text() != "not measured"
    stored = page.locator("#store tr").all_inner_texts()
    assert len(stored) == 4
    assert all("✓ stored" in row for row in stored)
    picture(page, "playground")


def test_dragging_reorders(page):
    load_examples(page)
    assert order(page) == ["Lighthouse", "Harbour", "Museum", "Coast trail"]
    handles = page.locator("#chosen .handle")
    start, end = handles.nth(0).bounding_box(), handles.nth(2).bounding_box()
    page.mouse.move(start["x"] + 5, start["y"] + 5)
    page.mouse.down()
    page.mouse.move(end["x"] + 5, end["y"] + 10, steps=5)
    page.mouse.move(end["x"] + 5, end["y"] + end["height"], steps=5)
    page.mouse.up()
    assert order(page) == ["Harbour", "Museum", "Lighthouse", "Coast trail"]
    assert "number 3 of 4" in page.locator("#announcer").inner_text()


def test_everything_works_by_keyboard(page):
    load_examples(page)
    page.get_by_role("button", name="Move Lighthouse down").focus()
    page.keyboard.press("Enter")
    assert order(page) == ["Harbour", "Lighthouse", "Museum", "Coast trail"]
    page.keyboard.press("Enter")  # the focus moved along
    assert order(page) == ["Harbour", "Museum", "Lighthouse", "Coast trail"]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert order(page) == ["Harbour", "Museum", "Coast trail"]
    page.get_by_label("Question").fill("When does the ferry leave?")
    page.keyboard.press("Control+Enter")
    sync_api.expect(page.locator("#status")).to_contain_text("prompt tokens were reused")


def test_a_finger_can_drag(browser, server):
    for page in open_page(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True):
        load_examples(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        handle = page.locator("#chosen .handle").nth(3)
        handle.scroll_into_view_if_needed()
        start = handle.bounding_box()
        target = page.locator("#chosen .handle").nth(0).bounding_box()
        session = page.context.new_cdp_session(page)

        def touch(kind, y, session=session, x=start["x"] + 8):
            points = [] if kind == "touchEnd" else [{"x": x, "y": y}]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", start["y"] + 8)
        for step in range(1, 9):
            touch("touchMove", start["y"] + 8 + (target["y"] - 4 - start["y"] - 8) * step / 8)
        touch("touchEnd", 0)
        assert order(page) == ["Coast trail", "Lighthouse", "Harbour", "Museum"]
        ask(page)
        picture(page, "playground-phone")
        assert_accessible(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_either_colour_scheme(browser, server, scheme):
    for page in open_page(browser, server.url, color_scheme=scheme):
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert_accessible(page)
        load_examples(page)
        page.get_by_text("Add a document of your own").click()
        ask(page)
        assert_accessible(page)
        picture(page, f"playground-{scheme}")
        page.get_by_role("button", name="Switch to").click()
        assert page.evaluate("document.documentElement.dataset.theme") != scheme
        assert_accessible(page)


def test_own_documents_are_stored_pinned_and_deleted(page):
    page.get_by_text("Add a document of your own").click()
    page.get_by_label("Title").fill("Tides <b>")
    page.get_by_label("Text", exact=True).fill("High tide is at noon.")
    page.get_by_role("button", name="Store it").click()
    sync_api.expect(page.locator("#chosen li")).to_have_count(1)
    assert order(page) == ["Tides <b>"]  # text, not markup
    ask(page)
    page.get_by_role("button", name="Pin Tides <b>").click()
    sync_api.expect(page.get_by_role("button", name="Unpin Tides <b>")).to_be_visible()
    page.get_by_role("button", name="Delete Tides <b>").click()
    sync_api.expect(page.locator("#store tr")).to_have_count(0)
    sync_api.expect(page.locator("#chosen li")).to_have_count(0)


def test_files_are_uploaded(page):
    page.get_by_text("Add a document of your own").click()
    files = [{"name": f"{n}.md", "mimeType": "text/markdown", "buffer": f"# File {n}".encode()} for n in (1, 2)]
    page.locator("#files").set_input_files(files)
    sync_api.expect(page.locator("#chosen li")).to_have_count(2)


def test_stopping_ends_the_request(page, engine):
    page.get_by_label("Most tokens of the answer").fill("4096")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    sync_api.expect(page.locator("#status")).to_have_text("Stopped.")
    sync_api.expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_errors_are_shown(page):
    page.get_by_label("Question").fill("x " * 40000)
    page.get_by_role("button", name="Ask", exact=True).click()
    sync_api.expect(page.get_by_role("alert")).to_contain_text("tokens")


def test_a_key_is_asked_for_and_kept_for_the_session(browser, engine):
    with live_server(engine, scopes=two_scopes()) as server:
        for page in open_page(browser, server.url):
            page.get_by_label("API key").fill("key-a")
            page.get_by_role("button", name="Use this key").click()
            sync_api.expect(page.locator("#model")).to_contain_text("tiny")
            page.reload()
            sync_api.expect(page.locator("#model")).to_contain_text("tiny")


def test_the_api_page_shows_every_route(browser, server):
    for page in open_page(browser, f"{server.url}/docs"):
        for route in ("POST /v1/chat/completions", "DELETE /v1/documents/{document_id}", "GET /metrics"):
            sync_api.expect(page.get_by_role("heading", name=route, exact=True)).to_be_visible()
        sync_api.expect(page.locator("#ChatBody")).to_contain_text("documents")
        assert_accessible(page)


@pytest.mark.parametrize("width", [320, 360, 390])
def test_nothing_is_cut_off_on_a_narrow_phone(browser, server, width):
    for page in open_page(browser, server.url, viewport={"width": width, "height": 700}):
        load_examples(page)
        ask(page)
        sync_api.expect(page.locator("#report tr")).to_have_count(4)
        sync_api.expect(page.locator("#store tr")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for table in ("#store", "#report"):
            for cell in page.locator(f"{table} :is(button, td):visible").all():
                box = cell.bounding_box()
                assert box["x"] + box["width"] <= width, (table, cell.inner_text())


def test_the_focus_stays_in_the_table_and_ids_may_hold_anything(page, server):
    import httpx

    documents = [{"id": name, "text": f"about {name}"} for name in ("a?b#c", "50%/x", "é&+", "last")]
    httpx.post(f"{server.url}/v1/documents", json={"documents": documents}, timeout=30)
    page.reload()
    sync_api.expect(page.locator("#store tr")).to_have_count(4)

    def focused():
        return page.evaluate("document.activeElement.getAttribute('aria-label')")

    for name in ("a?b#c", "50%/x", "é&+", "last"):
        page.get_by_role("button", name=f"Pin {name}", exact=True).focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.get_by_role("button", name=f"Unpin {name}", exact=True)).to_be_focused()
    for number, name in enumerate(("a?b#c", "last", "50%/x", "é&+")):
        page.get_by_role("button", name=f"Delete {name}", exact=True).focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#store tr")).to_have_count(3 - number)
        assert focused() is not None
    assert focused() == "Table of stored documents"
