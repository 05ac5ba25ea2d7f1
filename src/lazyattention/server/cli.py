# SPDX-License-Identifier: Apache-2.0
"""`lazyattention serve` and `lazyattention documents ...`. Light to import: the web framework comes with the command."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from lazyattention import envs
from lazyattention.errors import ConfigError, UnsupportedError
from lazyattention.utils.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lazyattention.documents.client import DocumentClient
    from lazyattention.documents.document import Document
    from lazyattention.server.config import ServerConfig

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)
# Per request: a server refuses bodies beyond its scope's limit.
_BATCH_BYTES = 8 * 2**20
_BATCH_LEN = 200


def serve_command(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder, GGUF file or hub name; default: a small model from a package."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter folder to load onto the model.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only with API keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="its name")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="TOML file with scopes and API keys.", show_default="LAZYATTENTION_API_KEYS")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen beyond this machine without keys.")
    ] = False,
    max_running: Annotated[
        int | None,
        typer.Option(min=1, help="Requests inside the engine at the same time.", show_default="--max-num-seqs"),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 429.")] = 1024,
    max_deadline_s: Annotated[float, typer.Option(help="Longest time a request may take, in seconds.")] = 600.0,
    shutdown_grace_s: Annotated[float, typer.Option(min=0.0, help="How long streams may go on after SIGTERM.")] = 20.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the API; repeatable.")
    ] = None,
    tls_cert_file: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key_file: Annotated[Path | None, typer.Option(help="Private key (PEM).")] = None,
    playground: Annotated[bool, typer.Option(help="Serve the page at /.")] = True,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Send traces to this OTLP/HTTP address.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG also logs what was reused, per document.")] = "INFO",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    engine_options: dict[str, Any] | None = None,
) -> None:
    """Serve the model over HTTP, OpenAI-compatible, with documents. API description at /docs, playground at /."""
    _require_web_framework()
    from lazyattention.server.config import ServerConfig
    from lazyattention.server.logs import configure_server_logging

    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, got {log_format!r}")
    if log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {log_level!r}")
    options: dict[str, Any] = {
        "model_name": served_model_name,
        "host": host,
        "port": port,
        "allow_anonymous": allow_anonymous,
        "max_running": max_running,
        "max_waiting": max_waiting,
        "max_deadline_s": max_deadline_s,
        "shutdown_grace_s": shutdown_grace_s,
        "cors_origins": tuple(cors_origin or ()),
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
        "playground": playground,
    }
    config = ServerConfig(**options, **_scopes(key_file))
    configure_server_logging(log_level, as_json=log_format == "json")
    # Machines that read the log get nothing between its lines.
    say = get_logger(__name__).info if log_format == "json" else _say
    model_options = {"adapter": adapter, "dtype": dtype, "device": device}
    _serve(config, model_options, model, engine_options or {}, otlp_endpoint, say)


def _serve(
    config: "ServerConfig",
    model_options: dict[str, Any],
    model: str | None,
    engine_options: dict[str, Any],
    otlp_endpoint: str | None,
    say: "Callable[[str], None]",
) -> None:
    from lazyattention.config import EngineConfig
    from lazyattention.server.listening import listen

    # Wrong options are reported before the model is read, which takes seconds.
    engine_config = EngineConfig.of(None, **engine_options)
    listener = listen(config)
    from lazyattention.engine.async_engine import AsyncEngine
    from lazyattention.engine.engine import Engine
    from lazyattention.models.loader import load_model
    from lazyattention.server.serve import make_server
    from lazyattention.server.tracing import tracer_to

    tracer = tracer_to(otlp_endpoint) if otlp_endpoint else None
    with err.status("loading the model") if err.is_terminal else contextlib.nullcontext():
        engine = AsyncEngine(
            Engine(load_model(model, **model_options, progress=err.is_terminal and envs.PROGRESS), engine_config)
        )
    name = config.model_name or engine.engine.loaded.name
    engine.start()
    try:
        server = make_server(
            engine,
            config,
            listener=listener,
            tracer=tracer,
            on_started=lambda url: say(f"serving {name!r} at {url}  (API description: {url}/docs)"),
        )
        server.run()
    finally:
        engine.stop()


def _say(text: str) -> None:
    # A standard error that cannot be written (a full disk) is no reason not to serve.
    with contextlib.suppress(OSError):
        err.print(text)


def _scopes(key_file: Path | None) -> dict[str, Any]:
    from lazyattention.server.config import scopes_from_file, scopes_from_text

    if key_file is not None:
        return {"scopes": scopes_from_file(key_file)}
    return {"scopes": scopes_from_text(envs.API_KEYS)} if envs.API_KEYS else {}


def _require_web_framework() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"the server needs {error.name}; install lazyattention[server]") from None


# Documents -----------------------------------------------------------------------------------------------------------

documents_app = typer.Typer(
    help="Upload, warm, pin, list and delete documents on a running server.", no_args_is_help=True, add_completion=False
)
Url = Annotated[str, typer.Option("--url", help="The server's address; or LAZYATTENTION_SERVER_URL.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Document ids.", show_default=False)]


@documents_app.command("upload")
def upload_documents(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
    url: Url = envs.SERVER_URL,
    warm: Annotated[bool, typer.Option(help="Compute them now; otherwise the first question does.")] = True,
    pin: Annotated[bool, typer.Option("--pin", help="Keep what was computed until unpinned.")] = False,
    pin_ttl_s: Annotated[float | None, typer.Option(help="With --pin: for so many seconds.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversations to come.")] = None,
    text_encoding: Annotated[str, typer.Option(help="Encoding of text files.")] = "utf-8",
) -> None:
    """Upload files, or folders of them; each document's id is its path as given."""
    from lazyattention.documents.readers import read_documents

    client = _client(url)
    report = read_documents(paths, text_encoding=text_encoding)
    for skipped in report.skipped:
        err.print(f"left out {skipped.path}: {skipped.reason}", markup=False)
    columns = (TextColumn("uploading"), BarColumn(), MofNCompleteColumn())
    failures = 0
    with Progress(*columns, console=err, transient=True, disable=not (envs.PROGRESS and err.is_terminal)) as progress:
        task = progress.add_task("", total=len(report.documents))
        for batch in _batches(report.documents):
            for entry in client.upload(batch, warm=warm, pin=pin, pin_ttl_s=pin_ttl_s, system=system):
                progress.advance(task)
                tokens = "" if entry.get("num_tokens") is None else f"  {entry['num_tokens']} tokens"
                reason = f"  {entry['error']['message']}" if entry["status"] == "failed" else ""
                failures += entry["status"] == "failed"
                out.print(f"{entry['status']}  {entry['id']}{tokens}{reason}", markup=False)
    if failures:
        raise typer.Exit(1)


@documents_app.command("list")
def list_documents(
    url: Url = envs.SERVER_URL,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List documents with what is stored of each."""
    entries = _client(url).list()
    if as_json:
        for entry in entries:
            out.print(json.dumps(entry), markup=False)
        return
    table = Table("id", "title", "tokens", "stored", "KV MiB", "hits", "pinned", box=None)
    for entry in entries:
        table.add_row(
            entry["id"],
            entry["title"] or "",
            "?" if entry["num_tokens"] is None else str(entry["num_tokens"]),
            "yes" if entry["is_stored"] else "no",
            f"{entry['num_bytes'] / 2**20:.1f}",
            "" if entry["num_hits"] is None else str(entry["num_hits"]),
            "yes" if entry["is_pinned"] else "",
        )
    out.print(table)


@documents_app.command("show")
def show_document(
    document_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)], url: Url = envs.SERVER_URL
) -> None:
    """Print one document as JSON, with its text."""
    out.print(json.dumps(_client(url).show(document_id)), markup=False)


@documents_app.command("pin")
def pin_documents(
    ids: Ids,
    url: Url = envs.SERVER_URL,
    ttl_s: Annotated[float | None, typer.Option(help="Seconds.", show_default="until unpinned")] = None,
) -> None:
    """Keep what was computed of these documents."""
    for document_id in ids:
        _client(url).pin(document_id, ttl_s)
        out.print(f"pinned  {document_id}", markup=False)


@documents_app.command("unpin")
def unpin_documents(ids: Ids, url: Url = envs.SERVER_URL) -> None:
    """Let these documents be evicted again when room is needed."""
    for document_id in ids:
        _client(url).unpin(document_id)
        out.print(f"unpinned  {document_id}", markup=False)


@documents_app.command("delete")
def delete_documents(ids: Ids, url: Url = envs.SERVER_URL) -> None:
    """Forget these documents: their text and everything computed from them."""
    for document_id in ids:
        answer = _client(url).delete(document_id)
        held = f", still read by {len(answer['held_by'])} running request(s)" if answer["held_by"] else ""
        out.print(f"deleted  {document_id}  freed {answer['num_freed_bytes'] / 2**20:.1f} MiB{held}", markup=False)


def _client(url: str) -> "DocumentClient":
    from lazyattention.documents.client import DocumentClient

    return DocumentClient(url, envs.API_KEY)


def _batches(documents: "Sequence[Document]") -> "Iterator[list[Document]]":
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        size = len(document.text.encode("utf-8", "surrogatepass"))
        if batch and (num_bytes + size > _BATCH_BYTES or len(batch) == _BATCH_LEN):
            yield batch
            batch, num_bytes = [], 0
        batch.append(document)
        num_bytes += size
    if batch:
        yield batch
