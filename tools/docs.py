# SPDX-License-Identifier: Apache-2.0
"""Keeps generated parts of the documentation true, and its links alive. `make docs` writes; a test only checks.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->` in any Markdown page. Names:
`options COMMAND`, `options engine`, `configuration`, `models`, `reuse methods`, `recompute policies`, `environment variables`, `unlearning benchmark`.
"""

import argparse
import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def pages() -> list[Path]:
    """All Markdown pages of the project that are documentation."""
    folders = (ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "src").rglob("*.md"))
    others = ((ROOT / name).glob("*.md") for name in ("benchmarks", "evaluation", "examples"))
    return sorted({path for found in (*folders, *others) for path in found})


def generate(name: str) -> str:
    """Return the text of one generated part."""
    kind, _, argument = name.partition(" ")
    if kind == "options":
        return _options(argument)
    if name == "configuration":
        return _configuration()
    if name == "models":
        from lazyattention.models import matrix

        return matrix.to_markdown()
    if name == "unlearning benchmark":
        return _unlearning_benchmark()
    if name == "reuse methods":
        from lazyattention.reuse.registry import REUSE_METHODS

        return _table(
            ("method", "what it does"), [(f"`{key}`", method.summary) for key, method in REUSE_METHODS.items()]
        )
    if name == "recompute policies":
        from lazyattention.reuse.recompute import RECOMPUTE_POLICIES

        return _table(
            ("`--recompute`", "N is", "what is computed anew"),
            [(f"`{key}:N`", policy.amount_help, policy.summary) for key, policy in RECOMPUTE_POLICIES.items()],
        )
    if name == "environment variables":
        return _environment()
    raise SystemExit(f"unknown generated part {name!r}")


def refreshed(text: str) -> str:
    """Return a page's text with every generated part renewed."""
    return _PART.sub(lambda match: f"{match[1]}{generate(match[2]).strip()}\n{match[3]}", text)


def broken_links() -> Iterator[str]:
    """Yield every relative link that leads nowhere, with its page."""
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for match in _LINK.finditer(text):
            target = match[1] or match[2]
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page.relative_to(ROOT)}: {target} does not exist"
            elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
                yield f"{page.relative_to(ROOT)}: {target} names a heading that does not exist"


def _anchors(page: Path) -> set[str]:
    headings = (match[1] for match in _HEADING.finditer(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _options(command_name: str) -> str:
    """Options of a command without those of the engine, which several commands share; of "engine", only those."""
    import typer

    from lazyattention.cli import app
    from lazyattention.cli.options import ENGINE_PANEL

    command: Any = typer.main.get_command(app)
    for word in ["ask"] if command_name == "engine" else command_name.split():
        command = command.commands[word]
    rows = []
    for param in command.params:
        if param.param_type_name != "option" or param.name == "help":
            continue
        if (param.rich_help_panel == ENGINE_PANEL) != (command_name == "engine"):
            continue
        default = param.show_default if isinstance(param.show_default, str) else param.default
        is_shown = param.show_default is not False and default is not None and default is not False
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        meaning = f"{param.help} Required." if param.required else param.help
        rows.append((names, meaning, f"`{default}`" if is_shown and not param.required else ""))
    return _table(("option", "meaning", "default"), rows)


def _configuration() -> str:
    from lazyattention.cli.options import engine_fields

    rows = []
    for name, (field, kind) in engine_fields().items():
        type_name = kind.__name__ if isinstance(kind, type) else str(kind)
        rows.append(
            (
                f"`{name}`",
                type_name.replace("|", "or"),
                field.metadata["help"],
                f"`{field.default!r}`".replace("'", '"'),
            )
        )
    return _table(("field", "type", "meaning", "default"), rows)


def _environment() -> str:
    """Read the comments above the variables in envs.py: they are the documentation."""
    source = (ROOT / "src/lazyattention/envs.py").read_text(encoding="utf-8")
    lines = source.split("\n")
    rows = []
    for node in ast.parse(source).body:
        names = re.findall(r"LAZYATTENTION_\w+", ast.get_source_segment(source, node) or "")
        if not isinstance(node, ast.Assign) or not names:
            continue
        first = node.lineno - 1
        comments: list[str] = []
        while first > 0 and lines[first - 1].startswith("# "):
            comments.insert(0, lines[first - 1][2:])
            first -= 1
        # Neighbours without a comment of their own share the one above.
        rows.append((f"`{names[0]}`", " ".join(comments) or rows[-1][1]))
    return _table(("variable", "meaning"), rows)


def _unlearning_benchmark() -> str:
    """Tables of the last results file; without one, how to make it."""
    path = ROOT / "benchmarks" / "results" / "unlearn_h200.json"
    if not path.exists():
        return f"Not measured yet: `{path.relative_to(ROOT)}` does not exist."
    spec = importlib.util.spec_from_file_location("unlearn_table", ROOT / "benchmarks" / "unlearn_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.section(json.loads(path.read_text(encoding="utf-8"))))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main() -> None:
    """Write or check; exit 1 when a page is out of date or a link is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew generated parts instead of only checking them")
    args = parser.parse_args()
    problems = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text and args.write:
            page.write_text(new, encoding="utf-8")
            print(f"renewed {page.relative_to(ROOT)}")
        elif new != text:
            problems.append(f"{page.relative_to(ROOT)}: a generated part is out of date; run `make docs`")
    problems += broken_links()
    print("\n".join(problems) or f"{len(pages())} pages are up to date and every link leads somewhere")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
