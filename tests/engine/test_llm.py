# SPDX-License-Identifier: Apache-2.0
"""The offline facade: what it accepts, what it refuses by name, and that streams and calls live side by side."""

import gc
import io

import pytest
from transformers.utils import logging as transformers_logging

from fixtures.tiny_engine import loaded_tiny, named_tokens
from fixtures.tiny_models import save_tiny
from lazyattention import LLM, Document, SamplingParams
from lazyattention.errors import ConfigError, NotFoundError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What does the keeper write?"}]
DOCUMENTS = [
    Document("the lighthouse stands on the northern cape", title="Cape"),
    Document("its lamp was lit in the spring", id="lamp"),
]


@pytest.fixture
def llm():
    with LLM(loaded_tiny(num_hidden_layers=2, dtype="float32"), num_blocks=400, progress=False) as llm:
        yield llm
        llm.engine.check_idle()


# Results --------------------------------------------------------------------------------------------------------------


def test_one_prompt_several_prompts_and_token_ids_agree(llm):
    [alone] = llm.generate("the wind and the weather", GREEDY)
    ids = llm.tokenizer("the wind and the weather").input_ids
    again, by_ids = llm.generate(["the wind and the weather", "the log"], GREEDY)[0], llm.generate([ids], GREEDY)[0]
    assert alone.outputs[0].token_ids == again.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert alone.prompt_token_ids == ids
    assert alone.finished
    assert alone.text == llm.tokenizer.decode(alone.outputs[0].token_ids)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["a", "the lighthouse stands on the northern cape", "b"]
    lengths = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (6, 1, 3)]
    outputs = llm.generate(prompts, lengths)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 1, 3]
    assert [output.num_prompt_tokens for output in outputs] == [len(llm.tokenizer(p).input_ids) for p in prompts]


def test_chat_answers_one_conversation_or_many(llm):
    [one] = llm.chat(QUESTION, GREEDY, documents=DOCUMENTS)
    many = llm.chat([QUESTION, QUESTION], GREEDY, documents=[DOCUMENTS, []])
    assert many[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert [reuse.status for reuse in one.documents] == ["miss", "miss"]
    assert [reuse.status for reuse in many[0].documents] == ["hit", "hit"]
    assert many[1].documents == []
    assert [reuse.title for reuse in one.documents] == ["Cape", None]


def test_documents_per_prompt_and_for_all(llm):
    for_all = llm.generate(["a?", "b?"], GREEDY, documents=DOCUMENTS)
    each = llm.generate(["a?", "b?"], GREEDY, documents=[DOCUMENTS[:1], DOCUMENTS])
    assert [len(output.documents) for output in for_all] == [2, 2]
    assert [len(output.documents) for output in each] == [1, 2]
    assert [len(output.documents) for output in llm.generate(["a?"], GREEDY, documents=["text", {"text": "b"}])] == [2]


def test_an_empty_list_of_documents_is_none(llm):
    [without] = llm.chat(QUESTION, GREEDY)
    [empty] = llm.chat(QUESTION, GREEDY, documents=[])
    assert empty.prompt_token_ids == without.prompt_token_ids
    assert empty.documents == []


def test_an_empty_document_changes_nobodys_position(llm):
    [without] = llm.generate("a?", GREEDY, documents=[DOCUMENTS[0]])
    [with_empty] = llm.generate("a?", GREEDY, documents=[Document("", id="nothing"), DOCUMENTS[0]])
    assert [reuse.num_tokens for reuse in with_empty.documents][1:] == [without.documents[0].num_tokens]
    assert with_empty.error is None


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_every_method_of_the_chunk_mask_gives_the_same_answer(llm):
    methods = ("rotate_query", "rotate_key", "copy_rotate", "chunk_recompute")
    answers = [
        llm.chat(QUESTION, GREEDY, documents=DOCUMENTS, reuse_method=method)[0].outputs[0].token_ids
        for method in methods
    ]
    assert answers.count(answers[0]) == len(methods)


def test_recomputed_blocks_can_be_asked_for_everywhere(llm):
    documents = ["the lighthouse stands on the northern cape " * 3, "its lamp was lit in the spring"]
    for [output] in (
        llm.chat(QUESTION, GREEDY, documents=documents, recompute="first:16"),
        llm.generate(["who?"], GREEDY, documents=documents, recompute="first:16"),
        [list(llm.stream(QUESTION, GREEDY, documents=documents, recompute="first:16"))[-1]],
    ):
        assert output.num_recomputed_tokens == sum(min(16, d.num_tokens) for d in output.documents) > 16
    [output] = llm.chat(QUESTION, GREEDY, documents=documents)
    assert output.num_recomputed_tokens == 0
    with pytest.raises(RequestError, match="copy_rotate"):
        llm.chat(QUESTION, GREEDY, documents=documents, recompute="first:16", reuse_method="copy_rotate")


def test_warming_stores_documents_that_requests_would_recompute_in_full():
    with LLM(
        loaded_tiny(num_hidden_layers=2, dtype="float32"), num_blocks=400, progress=False, recompute="first:1000"
    ) as llm:
        assert [info.num_chunks for info in llm.documents.warm(DOCUMENTS)] == [1, 1]
        [output] = llm.chat(QUESTION, GREEDY, documents=DOCUMENTS)
        assert [(d.status, d.reason) for d in output.documents] == [("computed", "recomputed")] * 2


def test_n_completions_with_a_seed_differ_and_repeat(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate("the wind", params)[0].outputs for _ in range(2))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert len({tuple(output.token_ids) for output in first}) == 3
    assert [output.index for output in first] == [0, 1, 2]


def test_stop_string_ends_and_is_left_out(llm):
    [free] = llm.generate("the wind", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    stop = free.text[3:5]
    [stopped] = llm.generate("the wind", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_are_reported_per_token(llm):
    [output] = llm.generate("the wind", SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True))
    logprobs = output.outputs[0].logprobs
    assert [entry.token_id for entry in logprobs] == output.outputs[0].token_ids
    assert all(entry.logprob == entry.top[0][1] <= 0 for entry in logprobs)


def test_timings_are_in_order(llm):
    [output] = llm.generate("the wind", GREEDY)
    timings = output.timings
    assert timings.arrival_s <= timings.first_scheduled_s <= timings.first_token_s <= timings.finished_s
    assert timings.num_output_tokens == 4
    assert 0 <= timings.ttft_s <= timings.e2e_s
    assert timings.itl_s >= 0


def test_stats_count_tokens(llm):
    [output] = llm.generate("the wind", GREEDY)
    stats = llm.stats()
    assert (stats["num_finished"], stats["num_output_tokens"], stats["num_failed"]) == (1, 4, 0)
    assert stats["num_prompt_tokens"] == output.num_prompt_tokens
    assert stats["num_computed_tokens"] == output.num_prompt_tokens + 3


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(""), "the prompt is empty"),
        (lambda llm: llm.generate(["a", ""]), "the prompt is empty"),
        (lambda llm: llm.generate([[]]), "the prompt is empty"),
        (lambda llm: llm.generate([1, 2, 3]), "a prompt is a string or a list of token ids, got int"),
        (lambda llm: llm.generate(None), "prompts must be a string or a list of prompts, got NoneType"),
        (lambda llm: llm.generate([[5, 1 << 20]]), r"1048576 is not a whole number in \[0, "),
        (lambda llm: llm.generate([["a"]]), "'a' is not a whole number"),
        (lambda llm: llm.generate([[True]]), "True is not a whole number"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "sampling_params must be SamplingParams, got dict"),
        (lambda llm: llm.generate("a", [GREEDY, GREEDY]), "got 2 sampling_params for 1 prompts"),
        (lambda llm: llm.generate("a", documents="text"), "documents must be a list"),
        (lambda llm: llm.generate("a", documents=5), "documents must be a list of documents, got int"),
        (lambda llm: llm.generate("a", documents=[5]), "a document is a string or an object"),
        (lambda llm: llm.generate("a", documents=[{"txt": "b"}]), "unknown document field"),
        (lambda llm: llm.generate(["a", "b"], documents=[["x"]]), "got 1 lists of documents for 2 prompts"),
        (lambda llm: llm.generate("a\udc80"), "not valid Unicode at character 1"),
        (lambda llm: llm.chat([]), "messages must be a non-empty list"),
        (lambda llm: llm.chat("hello"), "messages must be a non-empty list of messages, got 'hello'"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a non-empty list of messages"),
        (lambda llm: llm.chat([{"role": "robot", "content": "a"}]), "role must be one of system"),
        (lambda llm: llm.chat([{"role": "user", "content": 5}]), "content must be a string or a list of parts"),
        (lambda llm: llm.chat([[]]), "messages must be a non-empty list"),
        (lambda llm: llm.chat(QUESTION, reuse_method="rotate_querry"), "rotate_query"),
        (lambda llm: llm.chat(QUESTION, reuse="sometimes"), "reuse must be one of auto"),
        (lambda llm: llm.stream([]), "messages must be a non-empty list"),
    ],
)
def test_refused_by_name_before_anything_runs(llm, call, message):
    with pytest.raises((RequestError, ConfigError), match=message):
        call(llm)
    assert llm.stats()["num_steps"] == 0
    assert llm.engine.live_request_ids == []


def test_over_long_request_names_limit_and_lengths():
    loaded = loaded_tiny(num_hidden_layers=2, dtype="float32")
    with LLM(loaded, num_blocks=400, progress=False, max_model_len=60) as llm:
        document = Document("the wind and the weather " * 20)
        with pytest.raises(
            RequestError, match=r"the prompt has \d+ tokens \(\d+ of them in documents\).* 60 "
        ) as error:
            llm.chat(QUESTION, GREEDY, documents=[document])
        assert "fewer documents" in str(error.value)
        assert llm.generate("a", GREEDY)[0].error is None


def test_one_refused_prompt_keeps_all_from_running(llm):
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([[5] * 10, [5] * 10_000], GREEDY)
    assert llm.engine.live_request_ids == []
    assert llm.generate([[5] * 10], GREEDY)[0].request_id not in ("request-0", "request-1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 8}, "unknown option 'block_sise'. Did you mean 'block_size'"),
        ({"block_size": 12}, "block_size must be a power of two"),
        ({"num_blocks": 0}, "num_blocks must be a positive number"),
        ({"encoding": "alone"}, "encoding must be one of after_preamble, isolated"),
        ({"reuse_method": "rotate"}, "reuse method"),
        ({"kv_dtype": "int8"}, "kv_dtype must be auto"),
        ({"kv_memory_bytes": 10}, "one block of 16 tokens needs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be a positive number"),
    ],
)
def test_wrong_option_is_named_at_start(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(loaded_tiny(num_hidden_layers=2, dtype="float32"), progress=False, **options)


# Streams --------------------------------------------------------------------------------------------------------------


def test_stream_gives_the_text_of_a_call_piece_by_piece(llm):
    [whole] = llm.chat(QUESTION, GREEDY, documents=DOCUMENTS)
    outputs = list(llm.stream(QUESTION, GREEDY, documents=DOCUMENTS))
    assert [output.finished for output in outputs] == [False] * 3 + [True]
    assert "".join(output.outputs[0].delta_text for output in outputs) == whole.text == outputs[-1].text
    assert [token for output in outputs for token in output.outputs[0].delta_token_ids] == whole.outputs[0].token_ids


def test_two_streams_and_a_call_side_by_side(llm):
    """Whoever stepped the engine dropped the others' outputs, and a stream that had lost its last one never ended."""
    [want] = llm.chat(QUESTION, GREEDY)
    first, second = (llm.stream(QUESTION, GREEDY) for _ in range(2))
    seen = [next(first)]
    [called] = llm.chat(QUESTION, GREEDY)
    seen += list(first)
    for outputs in (seen, list(second)):
        assert outputs[-1].outputs[0].token_ids == want.outputs[0].token_ids
        assert "".join(output.outputs[0].delta_text for output in outputs) == want.text
    assert called.text == want.text


def test_leaving_a_stream_early_frees_what_it_held(llm):
    stream = llm.stream(QUESTION, SamplingParams(max_tokens=100, ignore_eos=True), documents=DOCUMENTS)
    next(stream)
    assert len(llm.engine.live_request_ids) == 1
    stream.close()
    assert llm.engine.live_request_ids == []
    llm.engine.check_idle()


def test_a_stream_nobody_reads_does_not_run_for_ever(llm):
    stream = llm.stream(QUESTION, SamplingParams(max_tokens=100, ignore_eos=True))
    del stream
    gc.collect()
    llm.generate("a", SamplingParams(max_tokens=1))
    assert llm.engine.live_request_ids == []
    assert llm._mailboxes == {}


def test_a_failed_stream_raises_its_error(llm):
    def broken(output_token_ids, logits):
        raise ValueError("no")

    with pytest.raises(RequestError, match="ValueError: no"):
        list(llm.stream(QUESTION, SamplingParams(logits_processors=[broken])))


def test_closing_ends_a_stream_as_aborted():
    llm = LLM(loaded_tiny(num_hidden_layers=2, dtype="float32"), num_blocks=100, progress=False)
    stream = llm.stream(QUESTION, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    llm.close()
    assert [output.outputs[0].finish_reason for output in stream] == ["abort"]


# Progress and documents -----------------------------------------------------------------------------------------------


def test_without_a_terminal_nothing_shows_progress_unless_asked_for(tmp_path, monkeypatch, capfd):
    transformers_logging.enable_progress_bar()  # commands switch it off for the whole process
    folder = str(save_tiny(tmp_path))
    capfd.readouterr()
    with LLM(folder, num_blocks=64) as llm:
        llm.generate(["a"], GREEDY)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with LLM(folder, num_blocks=64):
        pass
    assert "Loading" in capfd.readouterr().err


def test_progress_off_writes_nothing_and_on_writes_to_standard_error(llm, monkeypatch, capsys):
    llm.generate(["a", "b"], GREEDY, progress=False)
    assert capsys.readouterr() == ("", "")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    llm.generate(["a", "b"], GREEDY, progress=False)
    assert terminal.getvalue() == ""
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "Answering" in terminal.getvalue()


def test_life_of_documents(llm):
    infos = llm.documents.warm(DOCUMENTS, pin=True)
    assert [(info.is_pinned, info.is_uploaded) for info in infos] == [(True, True)] * 2
    by_id = [{"role": "user", "content": [{"type": "document", "id": "lamp"}, {"type": "text", "text": "When?"}]}]
    [output] = llm.chat(by_id, GREEDY)
    assert [(reuse.document_id, reuse.status) for reuse in output.documents] == [("lamp", "hit")]
    llm.documents.unpin("lamp")
    llm.documents.pin(["lamp"], ttl_s=100)
    [deleted] = llm.documents.delete("lamp")
    assert deleted.num_chunks == 1
    assert [info.title for info in llm.documents.list()] == ["Cape"]
    with pytest.raises(NotFoundError, match="'lamp' is not known"):
        llm.chat(by_id, GREEDY)
    with pytest.raises(NotFoundError):
        llm.documents.delete("lamp")


def test_warming_what_does_not_fit_raises():
    with (
        LLM(loaded_tiny(num_hidden_layers=2, dtype="float32"), num_blocks=4, progress=False) as llm,
        pytest.raises(RequestError, match="can never fit"),
    ):
        llm.documents.warm([Document("the wind and the weather " * 20)])


def test_token_ids_from_outside_the_tokeniser_are_kept_as_they_are(llm):
    ids = list(named_tokens("t9"))
    assert llm.generate([ids], GREEDY)[0].prompt_token_ids == ids
