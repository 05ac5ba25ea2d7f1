# SPDX-License-Identifier: Apache-2.0
"""Bytes of one file to plain text: text and Markdown as they are, HTML and PDF through their libraries."""

import codecs
import io
import re
from dataclasses import dataclass
from pathlib import Path

from lazyattention.errors import RequestError, UnsupportedError

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".csv", ".tsv", ".log"}
)
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
PDF_SUFFIXES = frozenset({".pdf"})

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HTML_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)
_HTML_BLOCKS = [
    "address",
    "article",
    "aside",
    "blockquote",
    "dd",
    "div",
    "dl",
    "dt",
    "fieldset",
    "figcaption",
    "figure",
    "footer",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "header",
    "hr",
    "li",
    "main",
    "nav",
    "ol",
    "p",
    "pre",
    "section",
    "table",
    "td",
    "th",
    "tr",
    "ul",
]
_HTML_UNREAD = ["script", "style", "noscript", "template", "head", "title"]  # a head may be left out around a title


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a file, and its title where the format carries one."""

    text: str
    title: str | None = None


class UndecodableError(RequestError):
    """A file is not text in the encoding it was read with."""


def check_encoding(encoding: str) -> None:
    """Raise RequestError unless Python knows `encoding` as a text encoding."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise RequestError(
            f"encoding {encoding!r} is not known; use a name such as utf-8, latin-1 or utf-16"
        ) from error


def looks_binary(raw: bytes, encoding: str) -> bool:
    """Whether `raw` holds a NUL byte near its start, which no text in a one-byte-per-letter encoding has."""
    is_wide = len("a".encode(encoding)) > 1
    return not is_wide and not raw.startswith(_UTF16_MARKS) and b"\0" in raw[:8192]


def extract(raw: bytes, path: Path, encoding: str) -> Extracted:
    """Turn the bytes of `path` into text; the suffix decides how.

    Raises:
        UndecodableError: Text that is not in `encoding`; names the file, the byte and the remedy.
        RequestError: A broken or encrypted PDF.
        UnsupportedError: The library that reads this format is not installed.
    """
    suffix = path.suffix.lower()
    if suffix in HTML_SUFFIXES:
        return _read_html(raw, path, encoding)
    if suffix in PDF_SUFFIXES:
        return _read_pdf(raw, path)
    return Extracted(_decode(raw, path, encoding))


def _decode(raw: bytes, path: Path, encoding: str) -> str:
    codec = codecs.lookup(encoding).name
    if codec == "utf-8":
        if raw.startswith(_UTF16_MARKS):
            raise UndecodableError(f"{path} is UTF-16 text, not {encoding}; read it with --text-encoding utf-16")
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise UndecodableError(
            f"{path} is not {encoding} text: byte {error.start} (0x{raw[error.start]:02x}) cannot be decoded; "
            "name its encoding with --text-encoding (for example latin-1 or cp1252), or convert the file to UTF-8"
        ) from error
    except UnicodeError as error:  # utf-16 without a mark, idna and the like: no position is known
        raise UndecodableError(
            f"{path} is not {encoding} text: {error}; name its encoding with --text-encoding"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_html(raw: bytes, path: Path, encoding: str) -> Extracted:
    try:
        from bs4 import BeautifulSoup
        from bs4.element import NavigableString
    except ImportError as error:
        raise UnsupportedError(_missing("HTML", "beautifulsoup4", path)) from error
    declared = _HTML_CHARSET.search(raw[:4096])
    if declared and codecs.lookup(encoding).name == "utf-8":
        name = declared.group(1).decode("ascii")
        try:
            check_encoding(name)
            encoding = name
        except RequestError:
            pass  # a page that names an encoding nobody knows is read with the default
    soup = BeautifulSoup(_decode(raw, path, encoding), "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    for tag in soup(_HTML_UNREAD):
        tag.decompose()
    for string in soup.find_all(string=True):
        if type(string) is NavigableString and not string.find_parent("pre"):
            string.replace_with(re.sub(r"\s+", " ", string))  # a line end in the source is a space on the page
    for tag in soup("br"):
        tag.replace_with("\n")
    for tag in soup(_HTML_BLOCKS):
        # Table cells share a line, items and rows have one each, every other block is a paragraph of its own.
        is_line = tag.name in {"li", "tr"}
        border = " " if tag.name in {"td", "th"} else "\n\n"
        tag.insert_before("\n" if is_line else border)
        tag.insert_after("" if is_line else border)
    lines = (re.sub(r"[ \t\f\v\xa0]+", " ", line).strip() for line in soup.get_text().split("\n"))
    return Extracted(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip(), title or None)


def _read_pdf(raw: bytes, path: Path) -> Extracted:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise UnsupportedError(_missing("PDF", "pypdf", path)) from error
    try:
        reader = PdfReader(io.BytesIO(raw))
        if reader.is_encrypted and not reader.decrypt(""):
            raise RequestError(f"{path} is an encrypted PDF; save a copy without a password and read that")
        text = "\n\n".join(page.extract_text().strip() for page in reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except (PyPdfError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        # pypdf leaks plain Python errors for some broken files.
        raise RequestError(f"{path} cannot be read as a PDF ({error}); repair it or convert it to text") from error
    return Extracted(text.strip(), (title or "").strip() or None)


def _missing(kind: str, package: str, path: Path) -> str:
    return f"reading {kind} ({path}) needs {package}, which is not installed: pip install 'lazyattention[readers]'"
