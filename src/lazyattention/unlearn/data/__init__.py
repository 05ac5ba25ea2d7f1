# SPDX-License-Identifier: Apache-2.0
"""Sets to forget, to keep and to test with: read them, make them up, turn them into token ids."""

from lazyattention.unlearn.data.encode import (
    IGNORE_INDEX,
    EncodedExample,
    Template,
    collate,
    encode_example,
    encode_examples,
    pad_id_of,
    render_prompt,
    resolve_template,
    split_long_texts,
)
from lazyattention.unlearn.data.example import QAExample, dataset_digest, find_overlap
from lazyattention.unlearn.data.load import load_examples
from lazyattention.unlearn.data.people import generate_people

__all__ = [
    "IGNORE_INDEX",
    "EncodedExample",
    "QAExample",
    "Template",
    "collate",
    "dataset_digest",
    "encode_example",
    "encode_examples",
    "find_overlap",
    "generate_people",
    "load_examples",
    "pad_id_of",
    "render_prompt",
    "resolve_template",
    "split_long_texts",
]
