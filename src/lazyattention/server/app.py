# SPDX-License-Identifier: Apache-2.0
"""The routes. They decide nothing: check, hand over, shape the answer. Start reading here."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from lazyattention import __version__
from lazyattention.errors import LazyAttentionError
from lazyattention.server.auth import Authenticator
from lazyattention.server.chat import ChatRenderer, prepare_chat
from lazyattention.server.completions import CompletionRenderer, prepare_completions, run_all
from lazyattention.server.config import ServerConfig
from lazyattention.server.context import ServerContext, context_of, tenant_of
from lazyattention.server.documents import DocumentRoutes
from lazyattention.server.errors import ForbiddenError, body_error, error_body, error_headers
from lazyattention.server.limits import RateLimiter
from lazyattention.server.metrics import CONTENT_TYPE
from lazyattention.server.middleware import RequestGate
from lazyattention.server.openapi import STREAM_RESPONSE, describe_api
from lazyattention.server.protocol import ChatBody, CompletionBody, ListQuery, PinBody, UploadBody
from lazyattention.server.schemas import (
    ChatCompletion,
    Completion,
    DeletedDocument,
    DocumentList,
    FullDocument,
    Health,
    ModelInfo,
    ModelList,
    PinnedDocument,
    UploadReport,
)
from lazyattention.server.streaming import ClientLeftError, EventResponse, while_connected

if TYPE_CHECKING:
    from lazyattention.engine.async_engine import AsyncEngine

T = TypeVar("T")
# What the framework makes of a body that it cannot decode.
_BAD_JSON = "the body is not valid JSON in UTF-8, or is nested too deeply; correct it"
_STATIC = Path(__file__).parent / "static"
_STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# The pages talk to this server only and run no inline script.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(engine: "AsyncEngine", config: ServerConfig | None = None, *, tracer: Any = None) -> FastAPI:  # noqa: ANN401  # optional package
    """Build the ASGI app around a running engine. The caller closes the engine after the app's shutdown.

    Args:
        engine: Started; used from the app's event loop.
        config: Options; None = defaults: this machine only, no keys.
        tracer: From `tracing.py`; None = no traces.
    """
    config = config or ServerConfig()
    context = ServerContext(engine, config, tracer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.close()

    app = FastAPI(
        title="lazyattention",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would go where the Host header points, in plain HTTP behind a proxy, and take the key along.
        redirect_slashes=False,
    )
    app.state.context = context
    _add_error_handlers(app)
    _add_generation_routes(app)
    _add_document_routes(app, DocumentRoutes(context))
    _add_operator_routes(app)
    _add_pages(app, has_playground=config.playground)
    describe_api(app, has_keys=config.has_keys)
    app.add_middleware(
        RequestGate,
        authenticator=Authenticator(config.scopes),
        rate_limiter=RateLimiter(),
        body_timeout_s=config.body_timeout_s,
        on_end=context.metrics.note_http,
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            # Clients in browsers send headers of their own, too; a key is one of them, so allowing all gives nothing away.
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _add_generation_routes(app: FastAPI) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM_RESPONSE, tags=["generation"])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, documents anywhere in it."""

        async def answer() -> Response:
            context = context_of(request)
            job = await prepare_chat(body, request, context)
            renderer = ChatRenderer(body, job, context)
            outputs = context.generator.run(job)
            if body.stream:
                return await _stream(renderer.chunks, outputs)
            async with aclosing(outputs):
                return JSONResponse(await renderer.whole(outputs))

        return await _answer(request, answer)

    @app.post("/v1/completions", response_model=Completion, responses=STREAM_RESPONSE, tags=["generation"])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one or several prompts, documents before them."""

        async def answer() -> Response:
            context = context_of(request)
            jobs = await prepare_completions(body, request, context)
            renderer = CompletionRenderer(body, jobs, context)
            outputs = run_all(jobs, context)
            if body.stream:
                return await _stream(renderer.chunks, outputs)
            async with aclosing(outputs):
                return JSONResponse(await renderer.whole(outputs))

        return await _answer(request, answer)

    @app.get("/v1/models", response_model=ModelList, tags=["models"])
    async def list_models(request: Request) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model_info(context_of(request))]}

    @app.get("/v1/models/{model_id:path}", response_model=ModelInfo, tags=["models"])
    async def retrieve_model(model_id: str, request: Request) -> dict[str, Any]:
        """Its description."""
        context_of(request).check_model(model_id)
        return _model_info(context_of(request))


def _model_info(context: ServerContext) -> dict[str, Any]:
    model = context.model
    gate = context.engine.engine.gate
    own = {"max_model_len": model.max_model_len, "reuse_method": gate.reuse_method, "reuse_reason": gate.reason or None}
    return {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "lazyattention", **own}


def _add_document_routes(app: FastAPI, routes: DocumentRoutes) -> None:
    @app.post("/v1/documents", response_model=UploadReport, responses=STREAM_RESPONSE, tags=["documents"])
    async def upload_documents(body: UploadBody, request: Request) -> Response:
        """Keep documents under their ids and compute them now, so that questions about them need not."""

        async def answer() -> Response:
            reports = routes.upload(body, request)
            if body.stream:
                return await _stream(lambda values: values, reports)
            return JSONResponse({"object": "list", "data": [report async for report in reports]})

        return await _answer(request, answer)

    @app.get("/v1/documents", response_model=DocumentList, tags=["documents"])
    async def list_documents(request: Request, query: Annotated[ListQuery, Query()]) -> dict[str, Any]:
        """Uploaded documents of your scope and of those it may read, with what is stored of each."""
        return await routes.list(request, limit=query.limit, after=query.after)

    # Ids may contain slashes, so the more specific routes come first.
    @app.post("/v1/documents/{document_id:path}/pin", response_model=PinnedDocument, tags=["documents"])
    async def pin_document(document_id: str, body: PinBody, request: Request) -> dict[str, Any]:
        """Keep its KV until unpinned, or for a time."""
        return await routes.pin(document_id, body, request)

    @app.post("/v1/documents/{document_id:path}/unpin", response_model=PinnedDocument, tags=["documents"])
    async def unpin_document(document_id: str, request: Request) -> dict[str, Any]:
        """Let its KV be evicted again when room is needed."""
        return await routes.unpin(document_id, request)

    @app.get("/v1/documents/{document_id:path}", response_model=FullDocument, tags=["documents"])
    async def retrieve_document(document_id: str, request: Request) -> dict[str, Any]:
        """One document with its text."""
        return await routes.retrieve(document_id, request)

    @app.delete("/v1/documents/{document_id:path}", response_model=DeletedDocument, tags=["documents"])
    async def delete_document(document_id: str, request: Request) -> dict[str, Any]:
        """Forget it: its text and everything computed from it."""
        return await routes.delete(document_id, request)


def _add_operator_routes(app: FastAPI) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=Health, tags=["operation"])
    async def health(request: Request) -> JSONResponse:
        """200 while requests are served, 503 when the engine is dead or the server shuts down."""
        status = context_of(request).status
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics of all scopes; for scopes with `is_operator` only."""
        if not tenant_of(request).is_operator:
            raise ForbiddenError("/metrics shows all scopes; this API key's scope is not an operator's")
        return Response(await context_of(request).metrics_text(), media_type=CONTENT_TYPE)


def _add_pages(app: FastAPI, *, has_playground: bool) -> None:
    @app.get("/docs", include_in_schema=False)
    async def api_description() -> FileResponse:
        return FileResponse(_STATIC / "api.html", headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        if not has_playground:
            return RedirectResponse("/docs")
        return FileResponse(_STATIC / "index.html", headers=_PAGE_HEADERS)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> FileResponse:
        path = _STATIC / name
        if path.parent != _STATIC or path.suffix not in _STATIC_TYPES or not path.is_file():
            raise HTTPException(404)
        return FileResponse(path, headers=_PAGE_HEADERS, media_type=_STATIC_TYPES[path.suffix])


async def _answer(request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Run a route that may take long; stop at once when its client leaves."""
    try:
        return await while_connected(request, _as_coroutine(answer))
    except ClientLeftError:
        return Response(status_code=499)  # nobody reads it; the log and the metrics do


async def _as_coroutine(answer: Callable[[], Awaitable[Response]]) -> Response:
    return await answer()


async def _stream(
    render: Callable[[AsyncGenerator[T, None]], AsyncGenerator[dict[str, Any], None]], outputs: AsyncGenerator[T, None]
) -> EventResponse:
    """Answer with events. The first one is waited for here, so that a refusal is a status and not an event."""
    values = render(outputs)
    try:
        first = await anext(values)
    except BaseException:
        await outputs.aclose()
        raise

    async def all_values() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(outputs), aclosing(values):
            yield first
            async for value in values:
                yield value

    return EventResponse(all_values())


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(LazyAttentionError)
    async def on_own_error(_: Request, error: LazyAttentionError) -> JSONResponse:
        return JSONResponse(error_body(error), error.http_status, headers=error_headers(error))

    @app.exception_handler(RequestValidationError)
    async def on_wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(body_error(error.errors())), 400)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        own = LazyAttentionError(_BAD_JSON if error.status_code == 400 else str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # Starlette names the methods of the first route with this path only.
            routes = [route for route in app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
            headers["Allow"] = ", ".join(
                sorted({method for route in routes for method in getattr(route, "methods", ())})
            )
        return JSONResponse(error_body(own, error.status_code), error.status_code, headers=headers)
