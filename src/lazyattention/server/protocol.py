# SPDX-License-Identifier: Apache-2.0
"""Request bodies: OpenAI's fields, vLLM's sampling extensions under their names, and documents. Nothing is ignored.

A field that is not here is refused by name; so is an OpenAI field that cannot be served, unless it is null.
"""

from collections import Counter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from lazyattention.engine.sampling_params import MAX_LOGPROBS, MAX_N, MAX_TOP_K
from lazyattention.reuse.recompute import Recompute

# Clients that fill in every field send null for those they do not use.
_UNSUPPORTED_CHAT = frozenset(
    [
        "audio",
        "function_call",
        "functions",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "service_tier",
        "verbosity",
        "web_search_options",
        "moderation",
    ]
)
_UNSUPPORTED_COMPLETION = frozenset({"suffix"})
# No object of this API has nearly as many. Every unknown field becomes an error of its own, a million of them half a minute.
_MAX_FIELDS = 200

T = TypeVar("T")
# Ends at its first wrong entry, for the same reason.
List = Annotated[list[T], Field(fail_fast=True)]


def _short_dict(limit: int) -> BeforeValidator:
    def check(value: Any) -> Any:  # noqa: ANN401  # any JSON before validation
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries, at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def _check_id(value: str) -> str:
    if not all(char.isprintable() for char in value):
        raise ValueError("must not contain line breaks or other characters that cannot be printed")
    if value in (".", ".."):
        raise ValueError("must not be '.' or '..', which clients take out of paths")
    return value


# Ids stand in paths and in log lines.
DocumentId = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_check_id)]


class Body(BaseModel):
    """A JSON object without unknown fields and without type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, values: Any) -> Any:  # noqa: ANN401  # any JSON before validation
        if isinstance(values, dict) and len(values) > _MAX_FIELDS:
            unknown = next(name for name in values if name not in cls.model_fields)
            raise ValueError(f"an object with {len(values)} fields, among them the unknown {unknown!r:.100}")
        return values


def _drop_nulls(values: Any, names: frozenset[str]) -> Any:  # noqa: ANN401  # any JSON before validation
    if isinstance(values, dict):
        return {key: value for key, value in values.items() if not (key in names and value is None)}
    return values


# Documents -----------------------------------------------------------------------------------------------------------


class DocumentBody(Body):
    """A document by its text, or one uploaded before by its id."""

    text: str | None = Field(None, description="What the model reads. Leave it out to use an uploaded document.")
    id: DocumentId | None = Field(None, description="Your name for it, or an uploaded one's.")
    title: str | None = Field(None, max_length=4096)
    metadata: dict[str, JsonValue] | None = Field(None, description="Your own notes; never shown to the model.")

    @model_validator(mode="after")
    def _has_text_or_id(self) -> "DocumentBody":
        if self.text is None and self.id is None:
            raise ValueError("a document needs 'text', or the 'id' of an uploaded one")
        if self.text is None and (self.title is not None or self.metadata is not None):
            raise ValueError("'title' and 'metadata' go with 'text'; an uploaded document has its own")
        return self


class NewDocumentBody(Body):
    """A document to upload."""

    text: str
    id: DocumentId | None = None
    title: str | None = Field(None, max_length=4096)
    metadata: dict[str, JsonValue] | None = None


# Messages ------------------------------------------------------------------------------------------------------------


class TextPart(Body):
    """Text within a message."""

    type: Literal["text"]
    text: str


class DocumentPart(DocumentBody):
    """A document within a message; it stands in the prompt where it stands here."""

    type: Literal["document"]


ContentPart = Annotated[TextPart | DocumentPart, Field(discriminator="type")]


class FunctionCallBody(Body):
    """Name and arguments of a call that the model made."""

    name: str
    arguments: str = Field(description="A JSON object as text.")


class ToolCallBody(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody
    index: int | None = None


class SystemMessage(Body):
    """Instructions."""

    role: Literal["system", "developer"]
    content: str | List[ContentPart]
    name: str | None = None


class UserMessage(Body):
    """What the user says."""

    role: Literal["user"]
    content: str | List[ContentPart]
    name: str | None = None


class AssistantMessage(Body):
    """An earlier answer, as it came back from this API."""

    role: Literal["assistant"]
    content: str | List[ContentPart] | None = None
    name: str | None = None
    tool_calls: List[ToolCallBody] | None = None
    # Part of the client's own message objects; always null in our answers.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[JsonValue] | None = Field(None, max_length=0)


class ToolMessage(Body):
    """What a tool returned."""

    role: Literal["tool"]
    content: str | List[ContentPart]
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]

# Tools and formats ---------------------------------------------------------------------------------------------------


class FunctionBody(Body):
    """A function the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Calls follow the schema in any case, not only forced ones.")

    @model_validator(mode="after")
    def _check_parameters(self) -> "FunctionBody":
        if self.parameters and self.parameters.get("type", "object") != "object":
            raise ValueError("'parameters' must be a schema of type object: arguments have names")
        return self


class ToolBody(Body):
    """A tool; functions only."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedToolChoice(Body):
    """A choice that names its function."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaBody(Body):
    """A named schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    strict: bool | None = Field(None, description="The answer follows the schema in any case.")


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaBody


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]

# Requests ------------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(None, description="One more event before the end, with the usage.")
    include_obfuscation: Literal[False] | None = None


# Looked for in the text after every token.
StopString = Annotated[str, Field(max_length=1024)]


def _check_recompute(value: str) -> str:
    Recompute.of(value)
    return value


class GenerationBody(Body):
    """Fields of both generation routes."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[List[StopString], Field(max_length=16)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], _short_dict(1024)] | None = Field(None, max_length=1024)
    user: str | None = Field(None, max_length=512, description="Your end user; appears in our log.")
    # vLLM's names.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: List[int] | None = Field(None, max_length=128)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # Ours.
    documents: List[str | DocumentBody] | None = Field(None, description="Texts, documents, or uploaded ones' ids.")
    include_document_report: bool | None = Field(None, description="Say per document what was reused, and why not.")
    deadline_s: float | None = Field(None, gt=0, description="Give up after so many seconds.")
    reuse: Literal["auto", "always", "never"] | None = Field(
        None, description="never: compute documents anew, with full attention; always: reuse whatever the gate says."
    )
    recompute: Annotated[str, AfterValidator(_check_recompute)] | None = Field(
        None,
        max_length=64,
        description="Parts of stored documents to compute anew: first:TOKENS, deviation:SHARE, attention:SHARE or none.",
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is allowed with 'stream': true only")
        return self


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: List[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="Deprecated name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[List[ToolBody], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: List[Literal["text"]] | None = None
    metadata: Annotated[dict[str, str], _short_dict(16)] | None = Field(
        None, max_length=16, description="Appears in our log."
    )
    store: Literal[False] | None = None
    safety_identifier: str | None = Field(None, max_length=512, description="Appears in our log.")

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, values: Any) -> Any:  # noqa: ANN401  # any JSON before validation
        return _drop_nulls(values, _UNSUPPORTED_CHAT)

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("'tool_choice' needs 'tools'")
        names = Counter(tool.function.name for tool in self.tools or ())
        if any(count > 1 for count in names.values()):
            raise ValueError(f"'tools' has the function {names.most_common(1)[0][0]!r} more than once")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give 'max_completion_tokens' or 'max_tokens', not both")
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                raise ValueError(f"'tool_choice' names the function {name!r}, which is not in 'tools'")
        return self


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: str | List[str] | List[int] | List[List[int]]
    max_tokens: int | None = Field(None, ge=1, description="16 by default, as OpenAI has it.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    best_of: int | None = Field(None, ge=1, description="Must equal n.")

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, values: Any) -> Any:  # noqa: ANN401  # any JSON before validation
        return _drop_nulls(values, _UNSUPPORTED_COMPLETION)

    @model_validator(mode="after")
    def _check_combinations(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' other than 'n' is not supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("'echo' together with 'logprobs' is not supported")
        if isinstance(self.prompt, list) and not self.prompt:
            raise ValueError("'prompt' is an empty list")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """`prompt` as a list of prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [entry for entry in self.prompt if isinstance(entry, int)]
        return [token_ids] if token_ids else [entry for entry in self.prompt if not isinstance(entry, int)]


class UploadBody(Body):
    """Body of POST /v1/documents."""

    documents: List[str | NewDocumentBody] = Field(min_length=1)
    warm: bool = Field(True, description="Compute their KV now, so that the first question need not.")
    pin: bool = Field(False, description="Keep that KV until unpinned, or for pin_ttl_s.")
    pin_ttl_s: float | None = Field(None, gt=0)
    messages: Annotated[List[Message], Field(min_length=1)] | None = Field(
        None, description="Warm for conversations that begin like this (the system message counts)."
    )
    stream: bool = Field(False, description="Report progress as server-sent events.")

    @model_validator(mode="after")
    def _check_combinations(self) -> "UploadBody":
        if self.pin_ttl_s is not None and not self.pin:
            raise ValueError("'pin_ttl_s' needs 'pin': true")
        if (self.pin or self.messages is not None) and not self.warm:
            raise ValueError("'pin' and 'messages' need 'warm': true")
        return self


class PinBody(Body):
    """Body of POST /v1/documents/{id}/pin."""

    ttl_s: float | None = Field(None, gt=0, description="Seconds; null = until unpinned.")


class ListQuery(BaseModel):
    """Query of GET /v1/documents."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=1000)
    after: str | None = Field(None, max_length=512, description="Id of the last document of the page before.")
