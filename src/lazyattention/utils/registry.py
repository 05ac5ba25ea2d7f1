# SPDX-License-Identifier: Apache-2.0
"""Name to value tables that suggest the nearest name when one is misspelt."""

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from lazyattention.errors import ConfigError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A read-mostly table of named things, such as reuse methods or objectives.

    Looking up an unknown name raises ConfigError that lists the known names and the nearest one.
    """

    def __init__(self, kind: str) -> None:
        """`kind` is the noun used in error messages, for example "reuse method"."""
        self._kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Add `value` under `name`; a second registration under the same name raises ConfigError."""
        if name in self._items:
            raise ConfigError(f"{self._kind} {name!r} is registered already")
        self._items[name] = value
        return value

    def __getitem__(self, name: str) -> T:
        if name in self._items:
            return self._items[name]
        near = difflib.get_close_matches(name, self._items, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown {self._kind} {name!r}{hint} Known: {', '.join(sorted(self._items))}")

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
