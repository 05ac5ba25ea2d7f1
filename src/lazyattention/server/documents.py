# SPDX-License-Identifier: Apache-2.0
"""/v1/documents: upload and warm, pin, list, delete. A scope sees its own documents and those it may read."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from lazyattention.documents.document import Document
from lazyattention.engine.documents import DocumentInfo
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import LazyAttentionError, NotFoundError, RequestError
from lazyattention.server.config import ScopeConfig
from lazyattention.server.context import ServerContext, tenant_of, unique_id_of
from lazyattention.server.errors import error_body
from lazyattention.server.generation import Job
from lazyattention.server.inputs import DocumentResolver, to_messages
from lazyattention.server.library import StoredDocument
from lazyattention.server.protocol import PinBody, UploadBody

if TYPE_CHECKING:
    from lazyattention.engine.outputs import DocumentReuse

# A prompt whose instructions are none: what a conversation without a system message begins with.
_BARE_MESSAGES = [{"role": "user", "content": "?"}]


class DocumentRoutes:
    """What the routes do; `app.py` says which."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def accept(self, body: UploadBody, tenant: ScopeConfig) -> list[Document]:
        """Check an upload's documents.

        Raises:
            RequestError: Too many, an id twice, or a text twice without ids.
        """
        if len(body.documents) > tenant.max_documents:
            raise RequestError(
                f"{len(body.documents)} documents in one upload, this scope's limit is {tenant.max_documents}; send batches"
            )
        documents = [
            Document(entry)
            if isinstance(entry, str)
            else Document(entry.text, id=entry.id, title=entry.title, metadata=entry.metadata)
            for entry in body.documents
        ]
        counts = Counter(document.document_id for document in documents)
        name, count = counts.most_common(1)[0]
        if count > 1:
            raise RequestError(f"the upload has the document id {name!r:.200} more than once; send each once")
        return documents

    async def upload(self, body: UploadBody, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        """Keep the documents and, if asked, compute them; yield one report per document as it is done.

        Raises:
            LazyAttentionError: Nothing was kept. A document that cannot be computed is reported, not raised.
        """
        tenant = tenant_of(request)
        documents = self.accept(body, tenant)
        messages = _BARE_MESSAGES
        if body.messages is not None:
            messages = to_messages(body.messages, DocumentResolver(self._context.library, tenant))
            if messages[-1]["role"] in ("system", "developer"):
                messages = [*messages, *_BARE_MESSAGES]
        for old in self._context.library.add(tenant, documents):
            await self._forget_kv(old.document.document_id, tenant)
        for number, document in enumerate(documents):
            report: dict[str, Any] = {"id": document.document_id, "object": "document", "title": document.title}
            if body.warm:
                try:
                    report |= await self._warm(document, messages, f"warm-{unique_id_of(request)}-{number}", tenant)
                    if body.pin:
                        await self._pin(document.document_id, body.pin_ttl_s, tenant)
                except LazyAttentionError as error:
                    report |= {"status": "failed", **error_body(error)}
            else:
                report |= {"status": "kept"}
            yield report | {"num_done": number + 1, "num_documents": len(documents)}

    async def _warm(
        self, document: Document, messages: Sequence[Mapping[str, Any]], request_id: str, tenant: ScopeConfig
    ) -> dict[str, Any]:
        """Compute a document along the very path of a request, so that a request will find it."""
        deadline_s = self._context.deadline_s(None)
        layout = await self._context.chat_layout(messages, [document], None, tenant, deadline_s)
        job = Job(
            request_id=request_id,
            layout=layout,
            params=SamplingParams(max_tokens=1, temperature=0.0),
            tenant=tenant,
            deadline_s=deadline_s,
            reuse="always",
            recompute="none",
            check=lambda: self._context.library.own(tenant, document.document_id),
        )
        entries: list[DocumentReuse] = []
        async with aclosing(self._context.generator.run(job)) as outputs:
            async for output in outputs:
                entries = output.documents
        own = [entry for entry in entries if entry.document_id == document.document_id]
        num_tokens = sum(entry.num_tokens for entry in own)
        self._context.library.own(tenant, document.document_id).num_tokens = num_tokens
        was_stored = sum(entry.num_reused_tokens for entry in own) == num_tokens > 0
        return {
            "status": "already warm" if was_stored else "warmed",
            "num_tokens": num_tokens,
            "num_bytes": sum(entry.num_bytes for entry in own),
            "num_chunks": len(own),
        }

    async def list(self, request: Request, *, limit: int, after: str | None) -> dict[str, Any]:
        """A part of the list of documents, with what is stored of each."""
        tenant = tenant_of(request)
        visible = self._context.library.visible(tenant)
        stored = await self._stored(tenant)
        start = 0
        if after is not None:
            places = [place for place, entry in enumerate(visible) if entry.document.document_id == after]
            if not places:
                raise NotFoundError(f"'after' names the document {after!r:.200}, which is not in the list")
            start = places[0] + 1
        shown = visible[start : start + limit]
        return {
            "object": "list",
            "data": [
                self._describe(entry, stored.get((entry.scope, entry.document.document_id)), tenant) for entry in shown
            ],
            "has_more": start + limit < len(visible),
            "num_documents": len(visible),
            "num_stored_bytes": sum(info.num_bytes for (scope, _), info in stored.items() if scope == tenant.name),
        }

    async def retrieve(self, document_id: str, request: Request) -> dict[str, Any]:
        """One document, its text included."""
        tenant = tenant_of(request)
        entry = self._context.library.get(tenant, document_id)
        stored = await self._stored(tenant)
        described = self._describe(entry, stored.get((entry.scope, document_id)), tenant)
        return described | {"text": entry.document.text}

    async def pin(self, document_id: str, body: PinBody, request: Request) -> dict[str, Any]:
        """Keep a document's KV until unpinned, or for a time."""
        tenant = tenant_of(request)
        self._context.library.own(tenant, document_id)
        await self._pin(document_id, body.ttl_s, tenant)
        return {"id": document_id, "object": "document", "is_pinned": True, "pin_ttl_s": body.ttl_s}

    async def unpin(self, document_id: str, request: Request) -> dict[str, Any]:
        """Let a document's KV be evicted again."""
        tenant = tenant_of(request)
        self._context.library.own(tenant, document_id)
        await self._context.engine.unpin_documents([document_id], scope=tenant.name)
        return {"id": document_id, "object": "document", "is_pinned": False, "pin_ttl_s": None}

    async def delete(self, document_id: str, request: Request) -> dict[str, Any]:
        """Forget a document: its text, its KV and the text KV computed behind it."""
        tenant = tenant_of(request)
        is_kept = self._context.library.remove(tenant, document_id)
        # Else its text may have come with a request; but a document of a scope that is only read stays as it is.
        is_foreign = not is_kept and any(
            stored.document.document_id == document_id for stored in self._context.library.visible(tenant)
        )
        freed = None if is_foreign else await self._forget_kv(document_id, tenant)
        if freed is None and not is_kept:
            raise NotFoundError(f"no document {document_id!r} of your own; see GET /v1/documents")
        freed = freed or {"num_chunks": 0, "num_freed_bytes": 0, "held_by": []}
        return {"id": document_id, "object": "document.deleted", "deleted": True, **freed}

    async def _forget_kv(self, document_id: str, tenant: ScopeConfig) -> dict[str, Any] | None:
        """None: nothing is stored of it; its text was never computed, or is evicted."""
        self._context.forget_documents(tenant.name)
        try:
            deleted = await self._context.engine.delete_document(document_id, scope=tenant.name)
        except NotFoundError:
            return None
        return {
            "num_chunks": deleted.num_chunks,
            "num_freed_bytes": deleted.num_freed_bytes,
            "held_by": list(deleted.request_ids),
        }

    async def _pin(self, document_id: str, ttl_s: float | None, tenant: ScopeConfig) -> None:
        limit = await self._max_pinned_bytes(tenant)
        await self._context.engine.pin_documents([document_id], ttl_s=ttl_s, scope=tenant.name, max_bytes=limit)

    async def _max_pinned_bytes(self, tenant: ScopeConfig) -> int | None:
        num_scopes = len(self._context.config.scopes)
        if tenant.max_pinned_bytes is not None or num_scopes == 1:
            return tenant.max_pinned_bytes
        stats = await self._context.engine.stats()
        return int(stats["num_blocks"] * stats["block_size"] * stats["kv_bytes_per_token"] // (num_scopes + 1))

    async def _stored(self, tenant: ScopeConfig) -> dict[tuple[str, str], DocumentInfo]:
        """What the engine holds, by scope and id, of the scopes this one may see."""
        stored = {}
        for scope in (tenant.name, *tenant.reads):
            for info in await self._context.engine.list_documents(scope=scope):
                stored[scope, info.document_id] = info
        return stored

    @staticmethod
    def _describe(entry: StoredDocument, info: DocumentInfo | None, tenant: ScopeConfig) -> dict[str, Any]:
        document = entry.document
        now = time.time()
        is_own = entry.scope == tenant.name
        num_hits = info.num_hits if info is not None else 0
        idle_s = None if entry.last_used_s is None else round(max(0.0, now - entry.last_used_s), 3)
        return {
            "id": document.document_id,
            "object": "document",
            "title": document.title,
            "metadata": None if document.metadata is None else dict(document.metadata),
            "created": int(entry.created_s),
            "num_text_bytes": entry.num_bytes,
            "num_tokens": info.num_tokens if info is not None and info.num_tokens else entry.num_tokens,
            "is_stored": info is not None and info.num_chunks > 0,
            "is_pinned": info is not None and info.is_pinned,
            "is_read_only": not is_own,
            "num_bytes": info.num_bytes if info is not None else 0,
            # How others use a shared document is theirs to know.
            "num_hits": num_hits if is_own else None,
            "num_uses": entry.num_uses if is_own else None,
            "idle_s": idle_s if is_own else None,
        }
