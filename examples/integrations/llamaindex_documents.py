# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex: OpenAILike and retrieved nodes, sent as documents, so that the server can reuse their KV.

lazyattention serve &
pip install llama-index-llms-openai-like
python examples/integrations/llamaindex_documents.py
"""

import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

NODES = [
    TextNode(
        text="The lighthouse on the northern cape is 42 metres tall.", id_="lighthouse", metadata={"title": "Light"}
    ),
    TextNode(text="Ferries leave the harbour every day at 7:30.", id_="harbour", metadata={"title": "Harbour"}),
    TextNode(text="The museum is closed on Mondays.", id_="museum", metadata={"title": "Museum"}),
]


class WordRetriever(BaseRetriever):
    """Any LlamaIndex retriever will do; this one counts common words and needs nothing else."""

    def _retrieve(self, query):
        words = set(query.query_str.lower().strip("?").split())
        scored = [NodeWithScore(node=node, score=len(words & set(node.text.lower().split()))) for node in NODES]
        return sorted(scored, key=lambda found: -found.score)[:2]


class DocumentQueryEngine(CustomQueryEngine):
    """Retrieves nodes and asks with them as documents, under their node ids."""

    retriever: BaseRetriever
    llm: OpenAILike

    def custom_query(self, query_str):
        nodes = self.retriever.retrieve(query_str)
        documents = [{"text": n.node.text, "id": n.node.node_id, "title": n.node.metadata["title"]} for n in nodes]
        answer = self.llm.chat([ChatMessage(role="user", content=query_str)], extra_body={"documents": documents})
        usage = answer.raw.usage
        print(f"  reused {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} tokens")
        return answer.message.content


def make_engine(url, model):
    llm = OpenAILike(
        api_base=f"{url}/v1", api_key="none", model=model, is_chat_model=True, temperature=0, max_tokens=40
    )
    return DocumentQueryEngine(retriever=WordRetriever(), llm=llm)


def main(url="http://127.0.0.1:8000", model="SmolLM2-135M-Instruct"):
    engine = make_engine(url, model)
    for question in ("How tall is the lighthouse?", "Is the lighthouse near the harbour?"):
        print(question)
        print(f"  {engine.query(question)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
