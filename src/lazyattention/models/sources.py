# SPDX-License-Identifier: Apache-2.0
"""From what the user calls a model (nothing, a folder, a GGUF file, a hub name) to a local folder that holds it."""

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lazyattention.errors import ConfigError
from lazyattention.models.default_model import DEFAULT_MODEL_NAME, default_model_path
from lazyattention.models.gguf import prepare_gguf
from lazyattention.models.weights_id import WEIGHT_SUFFIXES

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
_ALLOWED = "allowed are a folder in transformers' format, a .gguf file, and a hub name such as org/name"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        name: What to call it towards users.
        folder: Has config.json, weights and tokenizer.
    """

    name: str
    folder: Path


def resolve_source(name_or_path: str | None, revision: str | None = None) -> ModelSource:
    """Find the model, converting a GGUF file or downloading from the hub when needed.

    Args:
        name_or_path: None = the default model.
        revision: Branch, tag or commit of a hub name; refused for anything else.

    Raises:
        ConfigError: There is no such model here, or it cannot be downloaded.
    """
    if name_or_path is None:
        _refuse_revision(revision, "the default model")
        return ModelSource(DEFAULT_MODEL_NAME, prepare_gguf(default_model_path()))
    path = Path(name_or_path).expanduser()
    if path.is_file():
        _refuse_revision(revision, str(path))
        if path.suffix != ".gguf":
            raise ConfigError(f"model {name_or_path!r} is a file that is not .gguf; {_ALLOWED}; give its folder")
        return ModelSource(path.stem, prepare_gguf(path))
    if path.is_dir():
        _refuse_revision(revision, str(path))
        return ModelSource(path.resolve().name, _checked_folder(path))
    is_pathlike = name_or_path.startswith((".", "/", "~")) or name_or_path.endswith(".gguf")
    if is_pathlike or not _HUB_NAME.fullmatch(name_or_path):
        raise ConfigError(f"model {name_or_path!r} does not exist; {_ALLOWED}; check the path")
    return ModelSource(name_or_path, _checked_folder(_download(name_or_path, revision)))


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"revision={revision!r} was given for {what}, which has no revisions; revisions are for hub names; drop it"
        )


def _checked_folder(folder: Path) -> Path:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file():
        if len(ggufs) == 1:
            return prepare_gguf(ggufs[0])
        hint = "name one of its GGUF files" if ggufs else "check the path"
        raise ConfigError(f"model folder {folder} has no config.json, so it is not a model; {_ALLOWED}; {hint}")
    if not any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()):
        raise ConfigError(
            f"model folder {folder} has no weights; expected *.safetensors (or *.bin); copy or download them again"
        )
    return folder


def _download(name: str, revision: str | None) -> Path:
    try:
        patterns = [*_SMALL_FILES, "*.safetensors"]
        ignored = ["original/*", "consolidated*", "onnx/*"]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*_SMALL_FILES, "*.bin"]))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {name!r} is no local path and the model hub cannot be reached ({_first_line(error)}); {_ALLOWED}; "
            "check the spelling and the network, or leave --model out to use the default model"
        ) from error
    except HFValidationError as error:
        raise ConfigError(
            f"model {name!r} is neither a path nor a hub name: {_first_line(error)}; {_ALLOWED}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model {name!r} cannot be downloaded: {_first_line(error)}; {_ALLOWED}; check name, revision and access "
            "token (huggingface-cli login)"
        ) from error
    return folder


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
