# SPDX-License-Identifier: Apache-2.0
"""Documents may stand anywhere in a conversation, as content parts between its texts; the answer arrives as a stream.

Run: python examples/02_stream_and_place.py [MODEL]
"""

import sys

from lazyattention import LLM, SamplingParams

CONTRACT = {
    "type": "document",
    "text": "The rent is 900 euros. It is due on the third of each month.",
    "id": "contract",
}
LETTER = {"type": "document", "text": "From May on the rent rises to 950 euros.", "id": "letter"}


def main(model=None):
    messages = [
        {"role": "system", "content": "You answer questions about tenancy in one sentence."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "This is my contract:"},
                CONTRACT,
                {"type": "text", "text": "And this letter came today:"},
                LETTER,
                {"type": "text", "text": "What do I pay in June?"},
            ],
        },
    ]
    with LLM(model) as llm:
        for output in llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=32)):
            print(output.outputs[0].delta_text, end="", flush=True)
        print()
        for document in output.documents:
            print(f"{document.document_id}: {document.num_tokens} tokens, {document.status} ({document.reason})")


if __name__ == "__main__":
    main(*sys.argv[1:2])
