# SPDX-License-Identifier: Apache-2.0
"""The commands of `lazyattention`, and how every error on purpose ends: one readable line and an exit code.

Exit codes: 0 done; 1 it failed; 2 used wrongly (a flag, a path, a request); 130 interrupted.
"""

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from lazyattention import __version__
from lazyattention.adapt.cli import adapt_command
from lazyattention.cli.ask import AskCommand, ask
from lazyattention.cli.console import err, out
from lazyattention.cli.options import with_engine_options
from lazyattention.errors import ConfigError, LazyAttentionError, NotFoundError, RequestError
from lazyattention.quality.cli import quality_command
from lazyattention.server.cli import documents_app, serve_command
from lazyattention.utils.logging import configure_logging

_INTERRUPTED = 130
_MOUNTED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class _Group(TyperGroup):
    """Runs a command; turns errors raised on purpose into a message. `--debug` may stand anywhere on the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  # typer's click context has no public name
        own = args[: args.index("--")] if "--" in args else args
        if "--debug" in own:
            args.remove("--debug")
            args.insert(0, "--debug")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  # typer's click context has no public name
        try:
            return super().invoke(ctx)
        except LazyAttentionError as error:
            if ctx.params.get("debug"):
                raise
            err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            is_usage = isinstance(error, (ConfigError, NotFoundError, RequestError))
            raise typer.Exit(2 if is_usage else 1) from error
        except OSError as error:
            # A file the user named; anything else is a fault of ours and shows where it is.
            if ctx.params.get("debug") or error.filename is None:
                raise
            err.print(f"[bold red]error:[/] {escape(f'{error.strerror}: {error.filename!r}')}", soft_wrap=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            if ctx.params.get("debug"):
                raise
            err.print("\n[dim]interrupted[/]")
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    help="Answer questions over documents without computing the same document twice.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        out.print(f"lazyattention {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""
    configure_logging("DEBUG" if debug else None)
    # It warns about every flaw of a file that it can read all the same.
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    # peft calls it by its old name; nobody who runs a command can change that.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


app.command("ask", cls=AskCommand)(with_engine_options(ask))
app.command("serve")(with_engine_options(serve_command))
app.add_typer(documents_app, name="documents")
app.command("quality")(with_engine_options(quality_command))
app.command("adapt")(with_engine_options(adapt_command))


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List which model families are served exactly, and which are refused and why."""
    from lazyattention.cli.matrix import matrix_rows, print_matrix

    if as_json:
        out.print_json(json.dumps(matrix_rows()))
    else:
        print_matrix(out)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Print versions, hardware and settings; please add it to bug reports."""
    from lazyattention.cli.environment import printable_environment

    facts = printable_environment()
    if as_json:
        out.print_json(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(f"{name:<{width}}  {value}", markup=False)


@app.command("unlearn", context_settings=_MOUNTED)
def unlearn(ctx: typer.Context) -> None:
    """Make a model forget what it was trained on (SIMU and baselines)."""
    # Imported here and not above: it needs torch, and `lazyattention --help` must not wait for that.
    from lazyattention.unlearn.cli import unlearn_app

    exit_code = unlearn_app(args=ctx.args, prog_name="lazyattention unlearn", standalone_mode=False)
    if exit_code:  # without standalone mode, an exit inside is handed back instead of being raised
        raise typer.Exit(exit_code)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the command `lazyattention`."""
    app(args=list(sys.argv[1:] if args is None else args), prog_name="lazyattention")
