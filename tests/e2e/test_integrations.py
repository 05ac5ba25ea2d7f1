# SPDX-License-Identifier: Apache-2.0
"""The clients people have: LangChain, LlamaIndex and Haystack, unchanged, against a served model."""

import importlib

import pytest

from fixtures.fake_engine import FakeEngine
from fixtures.live_server import live_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def no_network_but_ours(monkeypatch):
    for name, value in {
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGCHAIN_TRACING_V2": "false",
        "LANGSMITH_TRACING": "false",
        "OPENAI_API_KEY": "none",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def fake():
    engine = FakeEngine()
    with live_server(engine) as server:
        engine.url = server.url
        yield engine


def reuse_of(text):
    """The example's "reused X of Y tokens" lines as pairs."""
    lines = [line.split() for line in text.splitlines() if line.strip().startswith("reused")]
    return [(int(words[1]), int(words[3])) for words in lines]


@pytest.mark.parametrize(
    ("name", "package"),
    [("langchain", "langchain_openai"), ("llamaindex", "llama_index.llms"), ("haystack", "haystack")],
)
def test_examples_pass_retrieved_documents_and_see_them_reused(server, capsys, name, package):
    pytest.importorskip(package, reason="needs the extra 'integrations'")
    example = importlib.import_module(f"examples.integrations.{name}_documents")
    example.main(server.url, "tiny")
    (cold, _), (warm, num_tokens) = reuse_of(capsys.readouterr().out)
    assert cold == 0
    assert 0 < warm < num_tokens


# LangChain


@pytest.fixture
def chat_openai(fake):
    module = pytest.importorskip("langchain_openai", reason="needs the extra 'integrations'")
    return lambda **options: module.ChatOpenAI(base_url=f"{fake.url}/v1", api_key="none", model="fake", **options)


def test_langchain_invokes_streams_and_batches(fake, chat_openai):
    fake.script = "one two three"
    llm = chat_openai(temperature=0, stream_usage=True, stop=["four"], seed=3, logprobs=True, top_logprobs=2)
    answer = llm.invoke("count")
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("one two three", "stop")
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]
    chunks = list(llm.stream("count"))
    assert "".join(chunk.content for chunk in chunks) == "one two three"
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0
    assert [a.content for a in llm.batch(["a", "b", "c"])] == ["one two three"] * 3


def test_langchain_calls_tools_and_structures_output(fake, chat_openai):
    from pydantic import BaseModel

    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return city

    fake.script = WEATHER
    (call,) = chat_openai().bind_tools([weather]).invoke("Oslo?").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    fake.script = None

    class Person(BaseModel):
        is_tall: bool
        age: int

    person = chat_openai(seed=1).with_structured_output(Person, method="json_schema").invoke("Who?")
    assert isinstance(person.age, int)
    forced = chat_openai(seed=2).with_structured_output(Person, method="function_calling").invoke("Who?")
    assert isinstance(forced.is_tall, bool)


def test_langchain_shows_our_errors(chat_openai):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat_openai(temperature=9).invoke("x")


# LlamaIndex


def test_llamaindex_chats_streams_and_completes(fake):
    module = pytest.importorskip("llama_index.llms.openai_like", reason="needs the extra 'integrations'")
    from llama_index.core.base.llms.types import ChatMessage

    fake.script = "one two three"
    options = {"api_base": f"{fake.url}/v1", "api_key": "none", "model": "fake", "max_tokens": 30}
    chat = module.OpenAILike(is_chat_model=True, **options)
    messages = [ChatMessage(role="system", content="Count."), ChatMessage(role="user", content="Go.")]
    assert chat.chat(messages).message.content == "one two three"
    assert list(chat.stream_chat(messages))[-1].message.content == "one two three"
    assert chat.complete("Go.").text == "one two three"
    plain = module.OpenAILike(is_chat_model=False, **options)
    assert plain.complete("Go.").text == "one two three"
    assert list(plain.stream_complete("Go."))[-1].text == "one two three"


# Haystack


def test_haystack_generators_run_stream_and_call_tools(fake):
    chat = pytest.importorskip("haystack.components.generators.chat", reason="needs the extra 'integrations'")
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    options = {"api_base_url": f"{fake.url}/v1", "api_key": Secret.from_token("none"), "model": "fake"}
    fake.script = "one two three"
    seen = []
    streaming = chat.OpenAIChatGenerator(streaming_callback=lambda chunk: seen.append(chunk.content), **options)
    assert streaming.run([ChatMessage.from_user("Go.")])["replies"][0].text == "one two three"
    assert "".join(seen) == "one two three"
    fake.script = WEATHER
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = Tool(name="weather", description="Tell it.", parameters=schema, function=lambda city: city)
    reply = chat.OpenAIChatGenerator(tools=[tool], **options).run([ChatMessage.from_user("Oslo?")])["replies"][0]
    assert (reply.tool_call.tool_name, reply.tool_call.arguments) == ("weather", {"city": "Oslo"})
