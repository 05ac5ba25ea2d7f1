# SPDX-License-Identifier: Apache-2.0
"""The example in docs/models.md runs as printed and reads the document at its new position."""

import re
from pathlib import Path

import torch

from fixtures.chunk_oracle import oracle_logits, random_tokens
from fixtures.tiny_models import save_tiny
from lazyattention.models.rope import layer_rotaries


def test_attention_function_alone(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    document_ids, question_ids = random_tokens(100, seed=1), random_tokens(9, seed=2)
    names = {"FOLDER": save_tiny(tmp_path / "model"), "document_ids": document_ids, "question_ids": question_ids}
    exec(code, names)
    model = names["model"]
    assert layer_rotaries(model)[0].inv_freq is not None
    # A uniform shift leaves attention unchanged, so the document before the question at 0 must give the same.
    want = oracle_logits(model, [document_ids], question_ids)
    assert torch.allclose(names["logits"], want, atol=1e-3)
