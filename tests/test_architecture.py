"""The reading path in docs/architecture.md names things that exist."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
NAMES = re.findall(r"`(lazyattention\.[\w.]+)`", PAGE.read_text())


def test_the_page_names_the_ten_stations():
    assert len(NAMES) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_named_function_exists(name):
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        assert callable(found)
        return
    pytest.fail(f"{name} cannot be imported")
