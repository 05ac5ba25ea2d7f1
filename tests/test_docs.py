# SPDX-License-Identifier: Apache-2.0
"""The documentation is true where a machine can tell: generated parts, links, commands, the README's first screen."""

import importlib.util
import re
from pathlib import Path

import pytest
import typer
import yaml

from lazyattention.cli import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools/docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date(docs):
    stale = [page.name for page in docs.pages() if docs.refreshed(page.read_text()) != page.read_text()]
    assert stale == [], "run `make docs`"


def test_every_link_leads_somewhere(docs):
    assert list(docs.broken_links()) == []


def test_a_broken_link_and_a_stale_part_are_found(docs, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text("# A `b`: c\n[fine](#a-b-c) [gone](nowhere.md) [bad](#heading)\n```\n[not a link](x.md)\n```\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert [line.split(": ")[1] for line in docs.broken_links()] == [
        "nowhere.md does not exist",
        "#heading names a heading that does not exist",
    ]
    stale = "<!-- generated: reuse methods -->\nold\n<!-- end -->\n"
    assert "`rotate_query`" in docs.refreshed(stale)
    assert "old" not in docs.refreshed(stale)


def test_readme_shows_its_two_commands_on_the_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("```sh")
    assert first < 25
    assert [line.split("#")[0].strip() for line in lines[first + 1 : first + 3]] == ["make demo", "make test"]
    assert lines[first + 3] == "```"


def test_every_make_command_in_the_pages_exists(docs):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in docs.pages():
        for words in re.findall(r"(?:^|`)make((?: [a-z-]+)+)", page.read_text(), re.MULTILINE):
            assert set(words.split()) <= targets, page.name


def test_every_command_has_its_section_and_every_option_its_row():
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = typer.main.get_command(app).commands
    assert set(commands) == set(re.findall(r"^## lazyattention (\w+)$", page, re.MULTILINE))
    for name, command in commands.items():
        own = [param for param in command.params if param.param_type_name == "option"]
        if len(own) > 2:  # more than --json and --help
            assert f"<!-- generated: options {name} -->" in page
    assert "| `--calibrated` |" in page


def test_citation_names_the_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    values = [item["value"] for reference in citation["references"] for item in reference["identifiers"]]
    assert values == ["arXiv:2606.04302", "arXiv:2510.07822"]
    assert citation["authors"] == [{"name": "The LazyAttention developers"}]


def test_agents_page_is_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40
