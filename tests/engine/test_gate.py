# SPDX-License-Identifier: Apache-2.0
"""The gate reuses only what was measured to be harmless enough, says what it decided, and requests can overrule it."""

import logging
import re

import pytest

from fixtures.tiny_engine import GREEDY, answer, loaded_tiny, make_engine, prompt
from lazyattention import envs
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.engine.gate import MeasuredLoss, decide, find_loss, remember_loss
from lazyattention.engine.llm import LLM
from lazyattention.errors import ConfigError, RequestError

SMALL = MeasuredLoss(0.02, 0.05, 200, "gold_nll", "own")
LARGE = MeasuredLoss(0.02, 0.5, 10, "gold_nll", "own")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path)
    return tmp_path


def config(**options):
    return EngineConfig.of(**{"max_loss": 0.1, **options})


def test_without_a_limit_nothing_is_asked_for():
    assert decide("weights", EngineConfig()).reuse_method == "rotate_query"
    assert decide("weights", EngineConfig()).reason == ""


def test_what_was_not_measured_is_not_trusted(caplog):
    with caplog.at_level(logging.WARNING, "lazyattention"):
        decision = decide("weights", config())
    assert decision.reuse_method == "full_recompute"
    assert "no loss was measured" in caplog.text
    assert "lazyattention quality" in decision.reason


def test_the_interval_decides_not_the_mean():
    remember_loss("weights", config(), LARGE)
    assert decide("weights", config()).reuse_method == "full_recompute"
    remember_loss("weights", config(), SMALL)
    assert decide("weights", config()).reuse_method == "rotate_query"
    assert decide("weights", config(max_loss=0.04)).reuse_method == "full_recompute"


@pytest.mark.parametrize(
    "other",
    [{"encoding": "isolated"}, {"max_chunk_len": 64}, {"documents_place": "system"}, {"chat_template": "plain"}],
)
def test_a_loss_belongs_to_weights_and_prompt_options(other):
    remember_loss("weights", config(), SMALL)
    assert find_loss("weights", config(**other)) is None
    assert find_loss("other weights", config()) is None
    # What does not change answers finds it: another chunk method, another cache size.
    assert find_loss("weights", config(reuse_method="copy_rotate", num_blocks=9)) == SMALL


def test_full_attention_has_no_loss_to_be_gated():
    assert decide("weights", config(reuse_method="prefix")).reuse_method == "prefix"


def test_a_broken_file_is_named(cache_dir):
    path = remember_loss("weights", config(), SMALL)
    path.write_text("{")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        decide("weights", config())


def test_a_loss_that_cannot_be_kept_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(envs, "CACHE_DIR", tmp_path / "file")
    with pytest.raises(ConfigError, match="LAZYATTENTION_CACHE_DIR"):
        remember_loss("weights", config(), SMALL)


def test_requests_follow_the_gate_or_overrule_it():
    engine = make_engine(loaded_tiny(num_hidden_layers=2), max_loss=0.1)
    layout = prompt("p11 d9 d16 t5")

    def reasons(name, **more):
        return {document.reason for document in answer(engine, layout, request_id=name, **more).documents}

    assert reasons("gated") == {"not reused by full_recompute"}
    assert reasons("always", reuse="always") == {"new"}
    assert reasons("again", reuse="always") == {"reused"}
    assert reasons("never", reuse="never") == {"not reused by full_recompute"}
    assert reasons("by name", reuse_method="rotate_query") == {"reused"}
    remember_loss(engine.loaded.weights_id, engine.config, SMALL)
    open_engine = make_engine(loaded_tiny(num_hidden_layers=2), max_loss=0.1)
    assert {d.reason for d in answer(open_engine, layout).documents} == {"new"}
    engine.check_idle()


def test_options_that_requests_bring_are_decided_for_by_their_own_loss(caplog):
    loaded = loaded_tiny(num_hidden_layers=2)
    remember_loss(loaded.weights_id, make_engine(loaded).config, SMALL)
    engine = make_engine(loaded, max_loss=0.1)
    layout = prompt("p11 d9 d16 t5")

    def is_reused(name, **more):
        reasons = {document.reason for document in answer(engine, layout, request_id=name, **more).documents}
        return reasons != {"not reused by full_recompute"}

    isolated = ChunkOptions(encoding="isolated")
    with caplog.at_level(logging.INFO, "lazyattention"):
        assert is_reused("own")
        assert not is_reused("not measured", chunk_options=isolated)
        assert not is_reused("again", chunk_options=isolated)
        assert is_reused("overruled", chunk_options=isolated, reuse="always")
        assert is_reused("by name", chunk_options=isolated, reuse_method="rotate_key")
        assert is_reused("the engine's own", chunk_options=ChunkOptions(), recompute="none")
        assert not is_reused("recompute", recompute="first:8")  # and no error: everything is computed anew
    assert caplog.text.count("no loss was measured for this model with a request's encoding=isolated;") == 1
    assert caplog.text.count("a request's recompute=first:8;") == 1
    remember_loss(loaded.weights_id, engine.config.of(engine.config, chunk=isolated), SMALL)
    remember_loss(loaded.weights_id, engine.config.of(engine.config, recompute="first:8"), SMALL)
    remember_loss(loaded.weights_id, engine.config.of(engine.config, chunk=isolated, recompute="first:8"), LARGE)
    assert not is_reused("decided already", chunk_options=isolated)
    engine = make_engine(loaded, max_loss=0.1)
    assert is_reused("measured", chunk_options=isolated)
    assert is_reused("recompute measured", recompute="first:8")
    assert not is_reused("too much", chunk_options=isolated, recompute="first:8")
    engine.check_idle()


def test_a_closed_gate_opens_for_requests_whose_options_were_measured():
    loaded = loaded_tiny(num_hidden_layers=2)
    first = make_engine(loaded)
    remember_loss(loaded.weights_id, first.config, LARGE)
    remember_loss(loaded.weights_id, first.config.of(first.config, recompute="deviation:0.5"), SMALL)
    engine = make_engine(loaded, max_loss=0.1)
    layout = prompt("p11 d9 d16 t5")
    assert engine.gate.reuse_method == "full_recompute"
    assert {d.reason for d in answer(engine, layout, request_id="a").documents} == {"not reused by full_recompute"}
    found = answer(engine, layout, request_id="b", recompute="deviation:.50")
    assert {d.reason for d in found.documents} == {"new"}
    with pytest.raises(RequestError, match="needs a reuse method that reads stored documents in place"):
        engine.add_request("c", layout, GREEDY, reuse="never", recompute="deviation:0.5")


def test_without_a_limit_requests_bring_what_they_like():
    engine = make_engine(loaded_tiny(num_hidden_layers=2))
    found = answer(engine, prompt("p11 d9 d16 t5"), chunk_options=ChunkOptions(encoding="isolated"))
    assert {document.reason for document in found.documents} == {"new"}


@pytest.mark.parametrize(("one", "other"), [("deviation:0.15", "deviation:.150"), (None, "none")])
def test_a_loss_is_found_however_its_options_are_written(one, other):
    remember_loss("weights", config(recompute=one), SMALL)
    assert find_loss("weights", config(recompute=other)) == SMALL
    assert find_loss("weights", config(recompute="first:16")) is None


def test_wrong_choices_are_named():
    engine = make_engine(loaded_tiny(num_hidden_layers=2))
    with pytest.raises(RequestError, match="reuse must be one of auto, always, never"):
        engine.add_request("a", prompt("t5"), GREEDY, reuse="sometimes")
    with pytest.raises(RequestError, match="exclude each other"):
        engine.add_request("a", prompt("t5"), GREEDY, reuse="never", reuse_method="prefix")
    with pytest.raises(ConfigError, match="max_loss"):
        EngineConfig.of(max_loss=-1)


def test_the_facade_passes_the_choice_on():
    with LLM(loaded_tiny(num_hidden_layers=2), num_blocks=100, block_size=8, max_loss=0.1, progress=False) as llm:
        messages = [{"role": "user", "content": "who?"}]
        llm.documents.warm(["a text about the cape"])
        statuses = {
            reuse: llm.chat(messages, GREEDY, documents=["a text about the cape"], reuse=reuse)[0].documents[0].status
            for reuse in ("auto", "always", "never")
        }
        assert statuses == {"auto": "computed", "always": "hit", "never": "computed"}
        streamed = list(llm.stream(messages, GREEDY, documents=["a text about the cape"], reuse="always"))
        assert streamed[-1].documents[0].status == "hit"
        outputs = llm.generate("who?", GREEDY, documents=["a text about the cape"], reuse="never")
        assert outputs[0].documents[0].status == "computed"
