# SPDX-License-Identifier: Apache-2.0
"""Files become documents; whatever does not is named with the reason."""

import io
import os
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.documents.readers import read_documents
from lazyattention.errors import LazyAttentionError, NotFoundError, RequestError, UnsupportedError


def make_pdf(lines, title=None):
    """A one-page PDF with the given lines of text."""
    content = "BT /F1 12 Tf 72 720 Td 14 TL " + " ".join(f"({line}) Tj T*" for line in lines) + " ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        f"<< /Title ({title or ''}) >>",
    ]
    raw, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(raw))
        raw += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R /Info 5 0 R >>"
    raw += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{trailer}\nstartxref\n".encode()
    return raw + f"{raw.rindex(b'xref', 0, raw.rindex(b'startxref'))}\n%%EOF\n".encode()


def read(*paths, **options):
    report = read_documents(paths, **options)
    return report.documents, {item.path.name: item.reason for item in report.skipped}


def test_folder_is_read_recursively_and_sorted(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in [("z.txt", "last"), ("b/y.md", "# middle"), ("a.rst", "first"), ("notes", "no suffix")]:
        (tmp_path / name).write_text(text)
    documents, skipped = read(tmp_path)
    assert [document.text for document in documents] == ["first", "# middle", "no suffix", "last"]
    assert documents[1].id == (tmp_path / "b/y.md").as_posix()
    assert documents[1].metadata == {"path": str(tmp_path / "b/y.md")}
    assert documents[1].title is None
    assert skipped == {}


def test_paths_keep_the_order_given(tmp_path):
    paths = [tmp_path / name for name in ("c.txt", "a.txt", "b.txt")]
    for path in paths:
        path.write_text(path.name)
    assert [document.text for document in read(*paths)[0]] == ["c.txt", "a.txt", "b.txt"]


def test_what_is_not_read_is_listed_with_the_reason(tmp_path):
    (tmp_path / "ok.txt").write_text("text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden inside")
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (tmp_path / "nameless").write_bytes(b"\xfa no text, no NUL")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.md").write_text(" \n\t\n")
    (tmp_path / "big.txt").write_text("x" * 2000)
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 and no more")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    documents, skipped = read(tmp_path, max_file_bytes=1000)
    assert [document.text for document in documents] == ["text"]
    assert skipped.keys() == {p.name for p in tmp_path.iterdir()} - {"ok.txt"}
    assert skipped[".git"] == skipped[".env"] == "hidden"
    assert skipped["image.png"].startswith("a binary file")
    assert skipped["nameless"].startswith("not utf-8 text: byte 0 (0xfa)")
    assert skipped["empty.txt"] == skipped["blank.md"] == "empty"
    assert skipped["big.txt"].startswith("larger than")
    assert skipped["broken.pdf"].startswith("cannot be read as a PDF")
    assert skipped["gone.txt"] == "broken link"
    assert skipped["pipe"] == "not a regular file"


def test_links_in_circles_end(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file.txt").write_text("once")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "again.txt").symlink_to(tmp_path / "a" / "file.txt")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    documents, skipped = read(tmp_path)
    assert [document.text for document in documents] == ["once"]
    assert skipped["up"] == "same folder as one read before"
    assert "same file as one listed before" in skipped.values()
    assert skipped["self"] == "broken link"
    with pytest.raises(RequestError, match="self cannot be read: too many levels"):
        read(tmp_path / "self")


def test_file_named_twice_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    documents, skipped = read(tmp_path / "a.txt", tmp_path)
    assert len(documents) == 1
    assert skipped == {"a.txt": "same file as one listed before"}


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_pipe_named_by_the_caller_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("through a pipe",))
    writer.start()
    assert read(tmp_path / "pipe")[0][0].text == "through a pipe"
    writer.join()


@pytest.mark.parametrize("suffix", [".txt", ".md", ""])
def test_other_encoding_names_file_byte_and_remedy(tmp_path, suffix):
    path = tmp_path / f"latin{suffix}"
    path.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(RequestError, match=r"latin.* is not utf-8 text: byte 2 \(0xfc\).*--text-encoding.*latin-1"):
        read(path)
    assert read(path, text_encoding="latin-1")[0][0].text == "Grüße"


def test_text_file_in_other_encoding_stops_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xe9t\xe9")
    with pytest.raises(RequestError, match="b.txt is not utf-8 text: byte 0"):
        read(tmp_path)


def test_utf16_is_recognised_and_read_when_asked(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_bytes("wide".encode("utf-16"))
    with pytest.raises(RequestError, match="is UTF-16 text.*--text-encoding utf-16"):
        read(path)
    assert read(path, text_encoding="utf-16")[0][0].text == "wide"
    path.write_bytes(b"\xff\xfea\0b")
    with pytest.raises(RequestError, match="is not utf-16 text"):
        read(path, text_encoding="utf-16")


def test_byte_order_mark_and_line_ends_do_not_change_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read(tmp_path / "a.txt")[0][0].text == "one\ntwo\nthree\n"


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_name(raw, tmp_path_factory):
    for suffix in (".txt", ".html", ".pdf"):
        path = tmp_path_factory.mktemp("any") / f"file{suffix}"
        path.write_bytes(raw)
        try:
            texts = [document.text for document in read(path)[0]]
        except LazyAttentionError as error:
            texts = [str(error)] if str(path) in str(error) else []
        assert texts


def test_html_gives_readable_text(tmp_path):
    (tmp_path / "page.html").write_text(
        "<html><head><title>The  page</title><style>p {color: red}</style></head><body><script>alert(1)</script>"
        "<h1>Head</h1><p>One <b>bold</b>\nword.</p><ul><li>first<li>second</ul>"
        "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table>line<br>break &amp; <!-- comment -->end</body>"
    )
    document = read(tmp_path)[0][0]
    assert document.title == "The page"
    assert document.text == "Head\n\nOne bold word.\n\nfirst\nsecond\n\na b\nc\n\nline\nbreak & end"


def test_an_html_title_is_no_text_where_the_head_is_left_out(tmp_path):
    (tmp_path / "a.html").write_text("<!doctype html><title>T &amp; U</title><p>one")
    document = read(tmp_path)[0][0]
    assert (document.title, document.text) == ("T & U", "one")


def test_html_keeps_lines_of_preformatted_text_only(tmp_path):
    (tmp_path / "a.html").write_text("<p>one\ntwo</p><pre>three\nfour</pre>")
    assert read(tmp_path)[0][0].text == "one two\n\nthree\nfour"


def test_html_encoding_comes_from_the_page_unless_named(tmp_path):
    (tmp_path / "a.html").write_bytes('<meta charset="iso-8859-1"><p>caf\xe9'.encode("latin-1"))
    assert read(tmp_path / "a.html")[0][0].text == "café"
    assert read(tmp_path / "a.html", text_encoding="cp1251")[0][0].text == "cafй"
    (tmp_path / "b.html").write_bytes(b'<meta charset="no-such-charset"><p>plain')
    assert read(tmp_path / "b.html")[0][0].text == "plain"


def test_pdf_text_and_title(tmp_path):
    (tmp_path / "a.pdf").write_bytes(make_pdf(["The Nile flows north.", "It is long."], title="Rivers"))
    document = read(tmp_path / "a.pdf")[0][0]
    assert "The Nile flows north." in document.text
    assert "It is long." in document.text
    assert document.title == "Rivers"


def test_pdf_without_text_says_so(tmp_path):
    (tmp_path / "scan.pdf").write_bytes(make_pdf([]))
    with pytest.raises(RequestError, match="no text .scanned pages need OCR first"):
        read(tmp_path / "scan.pdf")


def test_encrypted_pdf_says_so(tmp_path):
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(make_pdf(["secret"]))))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    with pytest.raises(RequestError, match="locked.pdf is an encrypted PDF"):
        read(tmp_path / "locked.pdf")


@pytest.mark.parametrize(
    ("suffix", "module", "package"), [(".pdf", "pypdf", "pypdf"), (".html", "bs4", "beautifulsoup4")]
)
def test_missing_library_is_named_with_the_install_command(tmp_path, monkeypatch, suffix, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / f"a{suffix}").write_bytes(make_pdf(["x"]))
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UnsupportedError, match=rf"needs {package}.*pip install 'lazyattention\[readers\]'"):
        read(tmp_path / f"a{suffix}")
    documents, skipped = read(tmp_path)
    assert [document.text for document in documents] == ["text"]
    assert "pip install" in skipped[f"a{suffix}"]


def test_progress_is_told(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    calls = []
    read(tmp_path, on_file=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(NotFoundError, match="missing.txt does not exist"):
        read(tmp_path / "missing.txt")
    with pytest.raises(RequestError, match="no document paths given"):
        read()
    with pytest.raises(RequestError, match="encoding 'utf-9' is not known"):
        read(tmp_path, text_encoding="utf-9")
    with pytest.raises(RequestError, match="encoding 'base64' is not known"):
        read(tmp_path, text_encoding="base64")
    with pytest.raises(RequestError, match="no document could be read from .*the folder is empty"):
        read(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(RequestError, match="no document could be read from .*empty.txt: empty"):
        read(tmp_path / "empty.txt")
    (tmp_path / "zero.bin").write_bytes(b"\0" * 10)
    with pytest.raises(RequestError, match="zero.bin is a binary file"):
        read(tmp_path / "zero.bin")
    (tmp_path / "big.txt").write_text("x" * 3000)
    with pytest.raises(RequestError, match="big.txt is larger than"):
        read(tmp_path / "big.txt", max_file_bytes=2048)
