# SPDX-License-Identifier: Apache-2.0
"""Compute documents before anyone asks, keep the important ones, and forget one for good.

Run: python examples/03_keep_documents.py [MODEL]
"""

import sys

from lazyattention import LLM, Document, SamplingParams

HANDBOOK = Document("Holidays are requested with form H7, at least two weeks ahead.", id="handbook")
MENU = Document("On Monday there is lentil soup, on Tuesday pasta.", id="menu")
QUESTION = [{"role": "user", "content": "Which form do I need for a holiday?"}]


def main(model=None):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(model) as llm:
        llm.documents.warm([HANDBOOK, MENU])
        llm.documents.pin(["handbook"])  # stays when memory gets short
        print("stored:", llm.documents.list())

        output = llm.chat(QUESTION, params, documents=[MENU, HANDBOOK])[0]
        print({document.document_id: document.status for document in output.documents})

        llm.documents.delete(["menu"])  # its KV is gone; asking with it again computes it anew
        output = llm.chat(QUESTION, params, documents=[MENU, HANDBOOK])[0]
        print({document.document_id: f"{document.status}: {document.reason}" for document in output.documents})


if __name__ == "__main__":
    main(*sys.argv[1:2])
