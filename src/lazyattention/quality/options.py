# SPDX-License-Identifier: Apache-2.0
"""The ways of reuse that are compared with full attention: changes to the engine's options, by name or composed."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from lazyattention.config import ChunkOptions
from lazyattention.errors import ConfigError
from lazyattention.reuse.recompute import Recompute
from lazyattention.utils.registry import Registry

FULL_ATTENTION = "full"
"""Name of the column that all others are compared with: every document recomputed."""
REUSE_METHOD = "rotate_query"
"""All chunk methods give the same answers."""


@dataclass(frozen=True, slots=True)
class ReuseOption:
    """One column of the comparison.

    Attributes:
        name: As in options and reports.
        summary: One line for tables.
        changes: Fields of ChunkOptions that differ from the engine's.
        recompute: Which blocks of stored documents are computed anew; None = as the engine's option says.
    """

    name: str
    summary: str
    changes: Mapping[str, object] = field(default_factory=dict)
    recompute: str | None = None

    def chunk_options(self, base: ChunkOptions) -> ChunkOptions:
        """Return the options of its requests in an engine with these.

        Raises:
            ConfigError: A value is not allowed.
        """
        return dataclasses.replace(base, **self.changes)  # type: ignore[arg-type]  # checked there


REUSE_OPTIONS: Registry[ReuseOption] = Registry("reuse option")
for _option in (
    ReuseOption("after_preamble", "documents see the instructions and themselves", {"encoding": "after_preamble"}),
    ReuseOption("isolated", "documents see nothing but themselves", {"encoding": "isolated"}),
    ReuseOption("parallel", "documents all start at the same position", {"positions": "parallel"}),
    ReuseOption("hide_4", "each chunk's first 4 tokens are seen by that chunk only", {"num_hidden": 4}),
    ReuseOption("sink_bos", "a BOS token in front of each chunk, seen by that chunk only", {"sink": "bos"}),
    ReuseOption(
        "calibrated", "attention scores on documents with calibrated temperature and bias", {"calibrated": True}
    ),
    ReuseOption("recompute_first_16", "the first 16 tokens of each document computed anew", {}, "first:16"),
    ReuseOption("recompute_deviation_15", "the 15 % of blocks that deviate most computed anew", {}, "deviation:0.15"),
    ReuseOption(
        "recompute_attention_15", "the 15 % of blocks the question looks at most computed anew", {}, "attention:0.15"
    ),
):
    REUSE_OPTIONS.register(_option.name, _option)


def reuse_option(text: str) -> ReuseOption:
    """Read an option: a name, a field with its value, or several of both, such as "parallel+num_hidden=8".

    Fields are those of ChunkOptions, and `recompute`.

    Raises:
        ConfigError: A name or field is unknown, or two parts set the same field.
        RequestError: The value of `recompute` is malformed.
    """
    if text in REUSE_OPTIONS:
        return REUSE_OPTIONS[text]
    changes: dict[str, object] = {}
    summaries = []
    for part in text.split("+"):
        name, is_field, value = part.partition("=")
        found = {name: _value(name, value)} if is_field else _changes_of(REUSE_OPTIONS[name])
        twice = sorted(set(found) & set(changes))
        if twice:
            raise ConfigError(f"option {text!r} sets {', '.join(twice)} twice; leave one part out")
        changes |= found
        summaries.append(part if is_field else REUSE_OPTIONS[name].summary)
    recompute = changes.pop("recompute", None)
    assert recompute is None or isinstance(recompute, str)
    Recompute.of(recompute)
    option = ReuseOption(text, "; ".join(summaries), changes, recompute)
    option.chunk_options(ChunkOptions())  # values are checked now, not after the model is loaded
    return option


def _changes_of(option: ReuseOption) -> dict[str, object]:
    return {**option.changes, **({} if option.recompute is None else {"recompute": option.recompute})}


def _value(name: str, text: str) -> object:
    defaults = {**dataclasses.asdict(ChunkOptions()), "recompute": ""}
    if name not in defaults:
        raise ConfigError(f"there is no chunk option {name!r}; choose one of {', '.join(defaults)}")
    if isinstance(defaults[name], str):
        return text.encode().decode("unicode_escape")  # so that a line break can be given as \\n
    if isinstance(defaults[name], bool):
        if text not in ("true", "false"):
            raise ConfigError(f"chunk option {name} must be true or false, got {text!r}")
        return text == "true"
    try:
        return type(defaults[name])(text)
    except ValueError as error:
        raise ConfigError(f"chunk option {name} must be a number, got {text!r}") from error
