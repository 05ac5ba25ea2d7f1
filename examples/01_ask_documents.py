# SPDX-License-Identifier: Apache-2.0
"""Ask over a folder of documents, twice, in different orders: the second time nothing but the question is computed.

Run: python examples/01_ask_documents.py [MODEL]
"""

import sys
from pathlib import Path

from lazyattention import LLM, SamplingParams
from lazyattention.documents.readers import read_documents

FOLDER = Path(__file__).parent / "documents"


def main(model=None):
    documents = read_documents([FOLDER]).documents[:4]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM(model) as llm:
        for order in (documents, documents[::-1]):
            question = [{"role": "user", "content": "Which country grows the most coffee?"}]
            output = llm.chat(question, params, documents=order)[0]
            print(f"\n{output.outputs[0].text.strip()}")
            print(f"first token after {output.timings.ttft_s:.2f} s")
            print(f"{output.num_computed_tokens} tokens computed, {output.num_reused_tokens} reused")
            for document in output.documents:
                print(f"  {Path(document.document_id).name}: {document.status} ({document.reason})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
