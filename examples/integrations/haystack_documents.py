# SPDX-License-Identifier: Apache-2.0
"""Haystack: a pipeline of a retriever and OpenAIChatGenerator, retrieved documents sent as documents.

lazyattention serve &
pip install haystack-ai
python examples/integrations/haystack_documents.py
"""

import sys
from typing import Any

from haystack import Document, Pipeline, component
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

TEXTS = {
    "Lighthouse": "The lighthouse on the northern cape is 42 metres tall and was built in 1891.",
    "Harbour": "Ferries leave the harbour every day at 7:30 and at 16:00.",
    "Museum": "The museum is open from May to September, every day but Monday.",
}


@component
class DocumentPrompt:
    """Puts retrieved documents beside the question instead of into its text."""

    @component.output_types(messages=list[ChatMessage], generation_kwargs=dict[str, Any])
    def run(self, question: str, documents: list[Document]):
        given = [{"text": d.content, "id": d.id, "title": d.meta.get("title")} for d in documents]
        return {
            "messages": [ChatMessage.from_user(question)],
            "generation_kwargs": {"extra_body": {"documents": given}},
        }


def make_pipeline(url, model):
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=text, meta={"title": title}) for title, text in TEXTS.items()])
    generator = OpenAIChatGenerator(
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token("none"),
        model=model,
        generation_kwargs={"temperature": 0, "max_completion_tokens": 40},
    )
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    pipeline.add_component("prompt", DocumentPrompt())
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.messages", "generator.messages")
    pipeline.connect("prompt.generation_kwargs", "generator.generation_kwargs")
    return pipeline


def ask(pipeline, question):
    answer = pipeline.run({"retriever": {"query": question}, "prompt": {"question": question}})
    return answer["generator"]["replies"][0]


def main(url="http://127.0.0.1:8000", model="SmolLM2-135M-Instruct"):
    pipeline = make_pipeline(url, model)
    for question in ("How tall is the lighthouse?", "When do ferries leave, and how tall is the lighthouse?"):
        reply = ask(pipeline, question)
        usage = reply.meta["usage"]
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{question}\n  {reply.text.strip()}\n  reused {reused} of {usage['prompt_tokens']} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
