# SPDX-License-Identifier: Apache-2.0
"""What an optional package is needed for is said before work begins."""

import importlib
import sys

import pytest
from typer.testing import CliRunner

from lazyattention.cli import app
from lazyattention.errors import ConfigError
from lazyattention.utils.packages import require_package


def test_the_message_says_who_needs_it_and_what_to_run():
    require_package("json", "nobody", "server")
    with pytest.raises(ConfigError, match=r"drawing needs the package no_such_package.*lazyattention\[quality\]"):
        require_package("no_such_package", "drawing", "quality")


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("matplotlib", ["quality", "--data", "needle"]),
        ("scipy", ["unlearn", "run", "--forget", "f.jsonl", "--retain", "r.jsonl", "--output", "out"]),
    ],
)
def test_commands_say_so_before_a_model_is_loaded(package, command, monkeypatch, tmp_path):
    loader = importlib.import_module("lazyattention.models.loader")
    monkeypatch.setattr(loader, "load_model", lambda *_, **__: pytest.fail("a model was loaded first"))
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 2
    assert f"needs the package {package}; run: pip install" in found.output
