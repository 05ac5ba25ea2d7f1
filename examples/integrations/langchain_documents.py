# SPDX-License-Identifier: Apache-2.0
"""LangChain: a retriever and ChatOpenAI, retrieved documents sent as documents, so that the server can reuse their KV.

lazyattention serve &
pip install langchain-openai
python examples/integrations/langchain_documents.py
"""

import sys

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from lazyattention import Document as Text
from lazyattention.documents.retrieval import BM25Retriever

TEXTS = {
    "Lighthouse": "The lighthouse on the northern cape is 42 metres tall and was built in 1891.",
    "Harbour": "Ferries leave the harbour every day at 7:30 and at 16:00.",
    "Museum": "The museum is open from May to September, every day but Monday.",
}


class BM25(BaseRetriever):
    """Any LangChain retriever will do; this one needs nothing else."""

    top_k: int = 2

    def _get_relevant_documents(self, query, *, run_manager):
        found = BM25Retriever([Text(text, title=title) for title, text in TEXTS.items()]).retrieve(query, self.top_k)
        return [Document(entry.document.text, metadata={"title": entry.document.title}) for entry in found]


def as_documents(documents):
    """LangChain documents as the API takes them."""
    return [{"text": document.page_content, "title": document.metadata["title"]} for document in documents]


def make_chain(url, model):
    """Question in, message out: retrieve, then ask with the documents beside the messages."""
    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_completion_tokens=40)
    retriever = BM25()

    def ask(question):
        extra = {"documents": as_documents(retriever.invoke(question))}
        return llm.invoke([("user", question)], extra_body=extra)

    return RunnableLambda(ask)


def main(url="http://127.0.0.1:8000", model="SmolLM2-135M-Instruct"):
    chain = make_chain(url, model)
    for question in ("How tall is the lighthouse?", "When do ferries leave, and how tall is the lighthouse?"):
        answer = chain.invoke(question)
        reused = answer.usage_metadata["input_token_details"].get("cache_read", 0)
        print(
            f"{question}\n  {answer.content.strip()}\n  reused {reused} of {answer.usage_metadata['input_tokens']} tokens"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
