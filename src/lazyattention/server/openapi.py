# SPDX-License-Identifier: Apache-2.0
"""The served OpenAPI description: what each route answers, errors and streams included."""

from typing import Any

from fastapi import FastAPI

from lazyattention.server.schemas import Error

STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"description": "With `stream`: events."}}}}
}
# What any route under /v1 may answer besides its own body.
_ERRORS = {
    "400": "The request is wrong; the message names the field.",
    "401": "The API key is missing or unknown.",
    "403": "The API key's scope may not do this.",
    "404": "Something named in the request is not there.",
    "405": "The route has no such method.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large for this scope.",
    "429": "Too many requests; see Retry-After.",
    "500": "A fault of the server.",
    "501": "This model or server cannot do what is asked.",
    "503": "No room now, or the server shuts down; see Retry-After.",
    "504": "The request's deadline passed.",
}


def describe_api(app: FastAPI, *, has_keys: bool) -> None:
    """Make `app.openapi()` tell the truth about errors and keys: FastAPI promises 422, we answer 400 in OpenAI's shape."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = generate()
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        error = Error.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= error.pop("$defs")
        schemas["Error"] = error
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path != "/health":
                    for status, text in _ERRORS.items():
                        operation["responses"][status] = {"description": text, "content": content}
                    if has_keys:
                        operation["security"] = [{"key": []}]
        schema["paths"]["/health"]["get"]["responses"]["503"] = {
            "description": "Not served.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Health"}}},
        }
        if has_keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
