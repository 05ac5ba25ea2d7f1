# SPDX-License-Identifier: Apache-2.0
"""The model writes its own questions: no labels, no other model, and they are about the user's documents."""

import random
import re
from collections.abc import Callable, Mapping, Sequence

from lazyattention.documents.document import Document
from lazyattention.documents.retrieval import BM25Retriever
from lazyattention.documents.splitter import split_document
from lazyattention.engine.engine import Engine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.engine.scoring import run_requests
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample

_INSTRUCTION = (
    "Write one short question about a fact stated in the document above, so that its answer is a name, a number or a few "
    "words of the document. Name what the question is about; do not write 'the document'. Write the question only."
)
DISTRACTORS = ("random", "similar")
_MAX_QUESTION_TOKENS = 48
_MIN_LETTERS = 12
_LEAD = re.compile(r"^\s*(?:[-*\d.)]+\s*)?(?:\*\*)?(?:question)?\s*:?\s*(?:\*\*)?\s*", re.IGNORECASE)


def passages_of(documents: Sequence[Document], engine: Engine) -> list[Document]:
    """Cut long documents where the engine would, into passages that can be told apart; empty ones are left out."""
    tokenizer = engine.loaded.tokenizer

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = []
    for document in documents:
        pieces = split_document(document, count_tokens, engine.config.cache.max_chunk_len)
        for number, piece in enumerate(pieces, 1):
            if piece.strip():
                name = document.document_id if len(pieces) == 1 else f"{document.document_id}#{number}"
                found.append(Document(piece, id=name, title=document.title))
    return found


def write_questions(
    engine: Engine,
    passages: Sequence[Document],
    *,
    num_questions: int,
    num_documents: "int | tuple[int, int]",
    distractors: str = "random",
    seed: int = 0,
    on_done: Callable[[], None] | None = None,
) -> list[QualityExample]:
    """Let the model ask about passages, each shown alone; then hide each passage among others.

    Args:
        engine: Its model writes; greedy first, with a temperature where a passage is asked about again.
        passages: What to ask about, in turn; from `passages_of`.
        num_questions: How many to try; those that are no question are left out.
        num_documents: Documents per question, or a range (low, high) to draw from.
        distractors: Which others: "random", or "similar": some of them, none to all, are those that share most words with
            the question (BM25), as a retriever would bring them, if there are any; the rest is random.
        seed: Of passages, distractors and order.
        on_done: Called as each try is done.

    Raises:
        ConfigError: There is no passage, or the model wrote no question at all.
    """
    if not passages:
        raise ConfigError("there is no text to ask about; give documents that are not empty")
    draw = random.Random(f"questions {seed}")
    order = draw.sample(range(len(passages)), len(passages))
    chosen = [order[index % len(order)] for index in range(num_questions)]
    layouts = [engine.prompts.chat([{"role": "user", "content": _INSTRUCTION}], [passages[place]]) for place in chosen]
    params = [
        SamplingParams(
            temperature=0.0 if index < len(order) else 0.8,
            top_p=0.95,
            max_tokens=_MAX_QUESTION_TOKENS,
            seed=seed + index,
        )
        for index in range(num_questions)
    ]
    outputs = run_requests(engine, layouts, params, reuse_method="full_recompute", on_done=on_done)
    examples = []
    retriever = BM25Retriever(passages) if distractors == "similar" else None
    place_of = {id(passage): place for place, passage in enumerate(passages)}
    asked: set[tuple[int, str]] = set()
    for index, (place, output) in enumerate(zip(chosen, outputs, strict=True)):
        question = read_question(output.text)
        if question is None or (place, question) in asked:
            continue
        asked.add((place, question))
        low, high = (num_documents, num_documents) if isinstance(num_documents, int) else num_documents
        wanted = min(draw.randint(low, high), len(passages)) - 1
        similar = [] if retriever is None else _similar(retriever, place_of, question, place, draw.randint(0, wanted))
        rest = [other for other in range(len(passages)) if other != place and other not in similar]
        others = similar + draw.sample(rest, wanted - len(similar))
        if similar:
            draw.shuffle(others)
        gold = draw.randrange(wanted + 1)
        shown = tuple(passages[other] for other in [*others[:gold], place, *others[gold:]])
        examples.append(QualityExample(f"own-{seed}-{index}", question, shown, (), (gold,)))
    if not examples:
        raise ConfigError(
            f"the model wrote no usable question in {num_questions} tries (the first: {outputs[0].text!r:.120}); give "
            "questions of your own as JSONL, or use a model that follows instructions"
        )
    return examples


def _similar(
    retriever: BM25Retriever, place_of: Mapping[int, int], question: str, place: int, wanted: int
) -> list[int]:
    """Return the places of the passages that match a question best, the one at `place` and those without a match left out."""
    found = [place_of[id(one.document)] for one in retriever.retrieve(question, wanted + 1) if one.score > 0]
    return [other for other in found if other != place][:wanted]


def read_question(text: str) -> str | None:
    """Return the first line that is a question, without numbering and quotes; None if there is none."""
    for line in text.splitlines():
        question = _LEAD.sub("", line, count=1).strip().strip("\"'*` ")
        end = question.find("?")
        if end >= 0:
            question = question[: end + 1]
            return question if len(question) >= _MIN_LETTERS else None
    return None
