# SPDX-License-Identifier: Apache-2.0
"""Output folders: one run at a time, and what is in them is gone on with only by the run that it belongs to."""

import contextlib
import fcntl
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lazyattention.errors import ConfigError
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)


@contextlib.contextmanager
def hold_output(folder: Path) -> Iterator[None]:
    """Make a folder and keep other runs out of it until this one ends, however it does.

    File systems without locks do not keep anybody out.

    Raises:
        ConfigError: It cannot be written, or another run is in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"output {str(folder)!r} cannot be written: {error.strerror}; give a folder that can be with --output"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output {str(folder)!r} is in use by another run; wait until it ends, or give another --output"
            ) from error
        except OSError as error:
            logger.info("%s: its file system has no locks (%s); other runs are not kept out", folder, error.strerror)
        yield


def is_kept(path: Path, description: Path, run: Mapping[str, Any]) -> bool:
    """Whether a file of this very run is there; if not, `run` is written down as what it is going to be of.

    A file without a description is somebody's own and taken as it is.

    Raises:
        ConfigError: It is of another run.
    """
    if not path.exists():
        write_whole(description, [json.dumps(run, indent=2) + "\n"])
        return False
    if description.exists():
        refuse_other_run(description, run)
    return True


def refuse_other_run(path: Path, run: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a file describes this very run."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; choose another output folder") from error
    refuse_difference(path.parent, known, json.loads(json.dumps(run)))


def refuse_difference(path: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError unless what is known of the run at `path` is what is wanted; it names what is not."""
    differing = sorted(name for name in {*wanted, *known} if wanted.get(name) != known.get(name))
    if differing:
        names = (name if name in known else f"{name} (not known when it was made)" for name in differing)
        raise ConfigError(
            f"{path} holds another run (it differs in {', '.join(names)}); choose another output folder, or delete it"
        )


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write a text file that is either there as a whole or not at all, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(path)
