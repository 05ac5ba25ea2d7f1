# SPDX-License-Identifier: Apache-2.0
"""What is trained is what is served: the training-time attention gives the engine's own logits."""

import pytest
import torch

import lazyattention.adapt.attention as attention_module
from fixtures.tiny_engine import loaded_tiny, make_engine, prompt
from fixtures.tiny_models import tiny_model
from lazyattention.adapt.attention import TRAINING_ATTENTION_NAME
from lazyattention.adapt.rows import TrainingRow, make_batch
from lazyattention.config import ChunkOptions
from lazyattention.engine.scoring import score
from lazyattention.errors import UnsupportedError
from lazyattention.models.rope import layer_rotaries
from lazyattention.reuse import Chunking

ANSWER = (7, 90, 3, 200, 41)
PROMPTS = [
    "p11 d9 d16 d33 t5",
    "p11 t6 d9 t7 d33 d16 t8 d1 t5",  # text and history between documents
    "p11 d9 d9 t4 d16 d9 t5",  # the same document often
    "d16 d9 d33 t5",  # nothing before the documents
    "p0 d16 d0 d9 t5",  # an empty preamble, an empty document
    "p1 d9 t1 d16 t1-b",
    "p17 d8 t3",
    "t29",
]
ISOLATED = Chunking(ChunkOptions(encoding="isolated"))
WAYS = [("rotate_query", Chunking()), ("rotate_query", ISOLATED), ("full_recompute", Chunking())]
OPTIONS = [
    ChunkOptions(positions="parallel"),
    ChunkOptions(num_hidden=4),
    ChunkOptions(encoding="isolated", sink="bos"),
    ChunkOptions(positions="parallel", num_hidden=9, sink="the log\n"),
]
FAMILIES = [
    ("llama", "default"),
    ("qwen3", "default"),
    ("llama", "yarn"),
    ("glm", "partial rotary"),
    ("gemma3_text", "a table per layer type"),  # sliding layers, two tables
    ("gemma2", "default"),  # soft-capping
    ("gpt_oss", "yarn"),  # sinks
    ("cohere2", "full layers without RoPE"),
]


def training_logprobs(model, rows):
    """Log-probabilities at each answer token of each row, all rows packed in one batch."""
    model.set_attn_implementation(TRAINING_ATTENTION_NAME)
    batch = make_batch(rows, layer_rotaries(model))
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.visibility.positions[None],
        use_cache=False,
        chunk_visibility=batch.visibility,
        logits_to_keep=batch.kept,
    )
    logprobs = output.logits[0].log_softmax(dim=-1)
    return [logprobs[batch.answer_mask & (batch.kept_rows == index)] for index in range(len(rows))]


def error_against_engine(engine, model, prompts, way):
    layouts = [prompt(words) for words in prompts]
    rows = [TrainingRow.of(layout, ANSWER, *way) for layout in layouts]
    want = score(engine, layouts, [ANSWER] * len(layouts), reuse_method=way[0], chunk_options=way[1].options)
    got = training_logprobs(model, rows)
    return max((w.logprobs.double() - g.double()).abs().max().item() for w, g in zip(want, got, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_logits_equal_the_engines_in_float64(way):
    engine = make_engine(loaded_tiny(num_hidden_layers=2))
    model = tiny_model(num_hidden_layers=2).double()
    assert error_against_engine(engine, model, PROMPTS, way) < 1e-4  # the engine's sampler sees float32


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("model_type", "variant"), [("llama", "default"), ("gemma3_text", "a table per layer type")])
def test_every_chunk_option_is_trained_as_it_is_served(options, model_type, variant):
    engine = make_engine(loaded_tiny(model_type, variant))
    model = tiny_model(model_type, variant).double()
    way = ("rotate_query", engine.prompts.chunking(options))
    assert error_against_engine(engine, model, PROMPTS, way) < 2e-4


@pytest.mark.parametrize(("model_type", "variant"), FAMILIES)
def test_every_kind_of_attention_equals_the_engines(model_type, variant):
    engine = make_engine(loaded_tiny(model_type, variant))
    model = tiny_model(model_type, variant).double()
    for way in WAYS:
        assert error_against_engine(engine, model, PROMPTS[:3], way) < 2e-4, way


def test_float32_is_as_near():
    engine = make_engine(loaded_tiny(dtype="float32"))
    assert error_against_engine(engine, tiny_model(), PROMPTS[:2], WAYS[0]) < 1e-3


@pytest.mark.parametrize("broken", ["no extra keys", "wrong turn", "no turn", "chunks see each other"])
def test_breaking_it_is_noticed(broken, monkeypatch):
    visibility = attention_module.ChunkVisibility
    mask, table = visibility.mask, visibility._table
    if broken == "no extra keys":

        def only_tokens(self, index, window):
            num_tokens = self.prompts[index].token_end - self.prompts[index].token_start
            seen = mask(self, index, window)
            return seen & (torch.arange(seen.shape[1]) < num_tokens)

        monkeypatch.setattr(visibility, "mask", only_tokens)
    elif broken == "wrong turn":
        monkeypatch.setattr(visibility, "_table", lambda self, f, k: (table(self, f, k)[0], -table(self, f, k)[1]))
    elif broken == "no turn":
        monkeypatch.setattr(attention_module, "turn", lambda rows, *_: rows)
    else:
        monkeypatch.setattr(
            visibility, "mask", lambda self, i, w: mask(self, i, w) | mask(self, i, w).any(0, keepdim=True).tril()
        )
    engine = make_engine(loaded_tiny(num_hidden_layers=2))
    model = tiny_model(num_hidden_layers=2).double()
    assert error_against_engine(engine, model, PROMPTS[:2], WAYS[0]) > 1e-2


def flex_attention(query, key, value, visibility, scale, window, softcap, sinks):
    assert softcap is None
    return attention_module._flex_attention(query, key, value, visibility, scale, window, sinks)


@pytest.mark.parametrize(("model_type", "variant"), [family for family in FAMILIES if family[0] != "gemma2"])
def test_flex_attention_gives_the_same_outputs(model_type, variant, monkeypatch):
    rows = [TrainingRow.of(prompt(PROMPTS[index % 2]), ANSWER, *way) for index, way in enumerate(WAYS)]
    model = tiny_model(model_type, variant)
    with torch.no_grad():
        want = training_logprobs(model, rows)
        monkeypatch.setattr(attention_module, "_prompt_by_prompt", flex_attention)
        got = training_logprobs(model, rows)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 40])
def test_no_tile_that_is_seen_is_left_out(tile, window, monkeypatch):
    ways = [*WAYS, *(("rotate_query", Chunking(options)) for options in OPTIONS[:3])]
    rows = [TrainingRow.of(prompt(text), ANSWER, *way) for way in ways for text in PROMPTS]
    batch = make_batch(rows, loaded_tiny(num_hidden_layers=2).rotaries)
    visibility = batch.visibility
    queries, keys = torch.arange(visibility.num_tokens), torch.arange(len(visibility.key_positions))
    exact = visibility._seen_function(window)(None, None, queries[:, None], keys[None])
    padded = torch.nn.functional.pad(exact, (0, -len(keys) % tile, 0, -len(queries) % tile))
    wanted = padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).amax(dim=(1, 3))
    monkeypatch.setattr(attention_module, "TILE", tile)
    found = visibility.tiles_seen(window)
    assert found.shape == wanted.shape
    assert not bool((wanted & ~found).any())
    # And few that are not; some are, where a tile holds several documents or prompts.
    assert int(found.sum()) <= {1: 1, 4: 1.3, 16: 1.7}[tile] * int(wanted.sum())
    mask = visibility.block_mask(window)
    assert torch.equal(mask.kv_num_blocks[0, 0], found.sum(1).int())
    for row in range(len(found)):
        blocks = mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])]
        assert blocks.tolist() == found[row].nonzero()[:, 0].tolist()


def test_gradients_pass():
    model = tiny_model(num_hidden_layers=2)
    model.get_input_embeddings().requires_grad_(True)
    rows = [TrainingRow.of(prompt("p11 d9 d16 t5"), ANSWER, *WAYS[0]), TrainingRow.of(prompt("t2"), (5,), *WAYS[0])]
    got = training_logprobs(model, rows)
    sum(part.sum() for part in got).backward()
    gradient = model.get_input_embeddings().weight.grad
    assert bool(gradient.isfinite().all())
    used = {token for row in rows for token in row.layout.token_ids}
    assert gradient[sorted(used)].abs().sum(1).min() > 0


def test_rows_of_different_masks_share_a_batch():
    model = tiny_model(num_hidden_layers=2).double()
    rows = [TrainingRow.of(prompt(PROMPTS[0]), ANSWER, *way) for way in WAYS]
    together = training_logprobs(model, rows)
    for row, got in zip(rows, together, strict=True):
        torch.testing.assert_close(got, training_logprobs(model, [row])[0], rtol=0, atol=1e-6)


def test_targets_and_masks_point_at_question_and_answer():
    layout = prompt("p11 d9 t5")
    batch = make_batch([TrainingRow.of(layout, ANSWER, *WAYS[0]), TrainingRow.of(prompt("t9"), (5, 6), *WAYS[0])], [])
    tokens = batch.input_ids[0]
    for row, question, answer in (
        (0, layout.spans[-1].token_ids, ANSWER),
        (1, prompt("t9").spans[0].token_ids, (5, 6)),
    ):
        own = batch.kept_rows == row
        assert batch.targets[own & batch.answer_mask].tolist() == list(answer)
        assert batch.targets[own & batch.question_mask].tolist() == list(question[1:])
        assert tokens[batch.kept[own]].tolist() == [*question, *answer[:-1]]


def test_what_would_change_the_mathematics_is_refused():
    model = tiny_model(num_hidden_layers=1)
    model.set_attn_implementation(TRAINING_ATTENTION_NAME)
    batch = make_batch([TrainingRow.of(prompt("t9"), (5, 6), *WAYS[0])], layer_rotaries(model))
    with pytest.raises(UnsupportedError, match="position_bias"):
        model(
            input_ids=batch.input_ids,
            position_ids=batch.visibility.positions[None],
            use_cache=False,
            chunk_visibility=batch.visibility,
            position_bias=torch.zeros(1),
        )
