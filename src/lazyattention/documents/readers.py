# SPDX-License-Identifier: Apache-2.0
"""Files and folders to documents. Nothing disappears in silence: what is not read is listed with the reason."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lazyattention.documents.document import Document
from lazyattention.documents.formats import (
    TEXT_SUFFIXES,
    UndecodableError,
    check_encoding,
    extract,
    looks_binary,
)
from lazyattention.errors import LazyAttentionError, NotFoundError, RequestError

MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file or folder that was found but not read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What reading some paths gave.

    Attributes:
        documents: In the order of the given paths; inside a folder sorted by path. `id` is the path as given.
        skipped: What was found and left out, in the same order.
    """

    documents: list[Document] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Candidate:
    path: Path
    is_named: bool  # by the caller, rather than found in a folder: then a failure is an error


def read_documents(
    paths: Sequence[str | os.PathLike[str]],
    *,
    text_encoding: str = "utf-8",
    max_file_bytes: int = MAX_FILE_BYTES,
    on_file: Callable[[int, int], None] | None = None,
) -> ReadReport:
    """Read text, Markdown, HTML and PDF files, and folders of them recursively.

    A file named by the caller must be readable. Inside a folder, hidden files, binary files, files of unknown kind that
    are not text, too large or broken files are skipped with a reason; only a file with a text suffix in another
    encoding stops the reading, since leaving it out would silently change answers.

    Args:
        paths: Files and folders.
        text_encoding: Of text files; an HTML page's own declaration wins over the default.
        max_file_bytes: Larger files are refused.
        on_file: Called with (files done, files in all) after each file.

    Raises:
        NotFoundError: A path does not exist.
        RequestError: No path, an unknown encoding, an unreadable named file, text in another encoding, or no document.
        UnsupportedError: A named file needs a library that is not installed.
    """
    if not paths:
        raise RequestError("no document paths given; name at least one file or folder")
    check_encoding(text_encoding)
    report = ReadReport()
    candidates = _list_candidates([Path(path) for path in paths], report.skipped)
    for index, candidate in enumerate(candidates):
        document = _read_one(candidate, text_encoding, max_file_bytes, report.skipped)
        if document is not None:
            report.documents.append(document)
        if on_file is not None:
            on_file(index + 1, len(candidates))
    if not report.documents:
        reasons = "; ".join(f"{item.path}: {item.reason}" for item in report.skipped[:5]) or "the folder is empty"
        raise RequestError(f"no document could be read from {', '.join(map(str, paths))} ({reasons})")
    return report


def _list_candidates(paths: Sequence[Path], skipped: list[SkippedFile]) -> list[_Candidate]:
    candidates: list[_Candidate] = []
    seen_files: set[tuple[int, int]] = set()
    seen_folders: set[tuple[int, int]] = set()
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise NotFoundError(f"{path} does not exist; check the path (documents are files or folders)") from error
        except (OSError, ValueError) as error:  # a loop of links, no permission, a NUL in the name
            raise RequestError(f"{path} cannot be read: {_reason(error)}") from error
        is_folder = stat.S_ISDIR(status.st_mode)
        found = _walk(path, seen_folders, skipped) if is_folder else iter([path])
        for file in found:
            status = file.stat()
            # Pipes have no identity worth comparing: two process substitutions may share a number.
            if stat.S_ISREG(status.st_mode):
                identity = (status.st_dev, status.st_ino)
                if identity in seen_files:
                    skipped.append(SkippedFile(file, "same file as one listed before"))
                    continue
                seen_files.add(identity)
            candidates.append(_Candidate(file, is_named=not is_folder))
    return candidates


def _walk(folder: Path, seen_folders: set[tuple[int, int]], skipped: list[SkippedFile]) -> Iterator[Path]:
    """Yield the regular, visible files under `folder`, sorted, following links but never in circles."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen_folders:
        skipped.append(SkippedFile(folder, "same folder as one read before"))
        return
    seen_folders.add((status.st_dev, status.st_ino))
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        skipped.append(SkippedFile(folder, _reason(error)))
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            skipped.append(SkippedFile(entry, "broken link" if entry.is_symlink() else _reason(error)))
            continue
        if entry.name.startswith("."):
            skipped.append(SkippedFile(entry, "hidden"))
        elif stat.S_ISDIR(mode):
            yield from _walk(entry, seen_folders, skipped)
        elif stat.S_ISREG(mode):
            yield entry
        else:
            skipped.append(SkippedFile(entry, "not a regular file"))


def _read_one(
    candidate: _Candidate, text_encoding: str, max_file_bytes: int, skipped: list[SkippedFile]
) -> Document | None:
    path = candidate.path
    try:
        extracted = extract(_read_bytes(path, text_encoding, max_file_bytes), path, text_encoding)
    except UndecodableError as error:
        if candidate.is_named or path.suffix.lower() in TEXT_SUFFIXES:
            raise
        skipped.append(SkippedFile(path, _without_path(error, path)))
        return None
    except LazyAttentionError as error:
        if candidate.is_named:
            raise
        skipped.append(SkippedFile(path, _without_path(error, path)))
        return None
    if not extracted.text.strip():
        is_pdf = path.suffix.lower() == ".pdf"
        skipped.append(SkippedFile(path, "no text (scanned pages need OCR first)" if is_pdf else "empty"))
        return None
    return Document(extracted.text, id=path.as_posix(), title=extracted.title, metadata={"path": str(path)})


def _read_bytes(path: Path, text_encoding: str, max_file_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(max_file_bytes + 1)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {_reason(error)}") from error
    if len(raw) > max_file_bytes:
        raise RequestError(
            f"{path} is larger than {max_file_bytes / 2**20:g} MiB; split it, or extract the part you need"
        )
    if path.suffix.lower() != ".pdf" and looks_binary(raw, text_encoding):
        raise RequestError(f"{path} is a binary file; documents are text, Markdown, HTML or PDF")
    return raw


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()


def _without_path(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path} ").removeprefix("is ").replace(f" ({path})", "")
