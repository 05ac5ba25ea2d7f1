# SPDX-License-Identifier: Apache-2.0
"""Who runs when: nobody blocks those behind him, nobody waits for ever, budgets hold."""

from dataclasses import replace

import pytest

from fixtures.symbolic_model import SymbolicRunner
from fixtures.tiny_engine import drain, make_engine, named_tokens, prompt
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.reuse import PromptLayout

ONE = SamplingParams(temperature=0.0, max_tokens=1)


def tokens(number, **more):
    return SamplingParams(temperature=0.0, max_tokens=number, **more)


def symbolic(**options):
    """An engine without tensors, and a list that receives the number of tokens of each step."""
    engine = make_engine(block_size=4, **options)
    engine._checksums = None
    runner = SymbolicRunner(engine)
    sizes = []

    def run(batch):
        sizes.append(batch.num_tokens)
        return runner.run(batch)

    engine.model_runner.run = run
    return engine, sizes


def finished_order(engine):
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finished]
    return order


def test_a_request_that_must_wait_for_room_does_not_block_those_behind_it():
    engine, _ = symbolic(num_blocks=16)
    engine.add_request("runs", prompt("t30"), tokens(16))
    engine.step()
    engine.add_request("large", prompt("t40-b"), tokens(4))
    engine.add_request("small", prompt("t9-c"), tokens(2))
    assert finished_order(engine) == ["small", "runs", "large"]
    engine.check_idle()


@pytest.mark.parametrize("max_skipped", [1, 2, 5])
def test_nobody_is_overtaken_more_often_than_allowed(max_skipped):
    """The bound was looked at once per step, and any number of small requests slipped by within one step."""
    engine, _ = symbolic(num_blocks=16, max_skipped=max_skipped)
    engine.add_request("runs", prompt("t30"), tokens(25))
    engine.step()
    engine.add_request("large", prompt("t40-b"), tokens(4))
    for number in range(20):
        engine.add_request(f"small {number}", prompt(f"t2-{number}"), tokens(2))
    started_s = {name: output.timings.first_scheduled_s for name, output in drain(engine).items()}
    overtook = [name for name in started_s if name != "runs" and started_s[name] < started_s["large"]]
    assert len(overtook) == max_skipped
    engine.check_idle()


def test_every_running_request_decodes_in_every_step_while_a_long_prompt_is_read():
    engine, sizes = symbolic(max_num_batched_tokens=8)
    for name in "abc":
        engine.add_request(name, prompt(f"t3-{name}"), tokens(30))
        engine.step()
    engine.add_request("long", prompt("p5 d40 t30"), ONE)
    counts = dict.fromkeys("abc", 0)
    while "long" in engine.live_request_ids:
        outputs = {output.request_id: output for output in engine.step()}
        assert set("abc") <= set(outputs), "a decode was left out"
        for name in "abc":
            counts[name] += 1
    assert min(counts.values()) > 10
    drain(engine)
    assert max(sizes) <= 8


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 64])
def test_steps_stay_within_the_token_budget_and_use_it(max_num_batched_tokens):
    engine, sizes = symbolic(max_num_batched_tokens=max_num_batched_tokens)
    for number in range(6):
        engine.add_request(str(number), prompt(f"p5 d13 d9 t{number + 3}"), ONE)
    drain(engine)
    assert max(sizes) <= max_num_batched_tokens
    assert sum(sizes) == 5 + 13 + 9 + sum(range(3, 9))
    assert sum(size < max_num_batched_tokens for size in sizes) <= 2


def test_no_more_run_than_allowed():
    engine, _ = symbolic(max_num_seqs=3)
    for number in range(8):
        engine.add_request(str(number), prompt(f"t9-{number}"), tokens(4))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3


def test_cold_chunks_of_several_requests_share_a_pass_with_decodes():
    engine, sizes = symbolic()
    engine.add_request("decodes", prompt("t9"), tokens(20))
    engine.step()
    for number in range(3):
        engine.add_request(str(number), prompt(f"p5 d9-{number} t3"), ONE)
    finished = {output.request_id for output in engine.step() if output.finished}
    assert finished == {"0", "1", "2"}
    assert sizes[-1] == 1 + 5 + 3 * (9 + 3)


def test_completions_of_one_request_compute_its_prompt_once():
    engine, sizes = symbolic()
    engine.add_request("four", prompt("p8 d16 t33"), tokens(1, n=4))
    outputs = drain(engine)
    assert len({tuple(o.token_ids) for o in outputs["four"].outputs}) == 1
    # The prompt once, and for each further completion the last token and what does not fill a block.
    assert sum(sizes) == 57 + 3 * 1
    engine.check_idle()


def test_the_youngest_gives_way_when_room_runs_out_and_comes_back():
    engine, _ = symbolic(num_blocks=14)
    for name in "abc":
        engine.add_request(name, prompt(f"t9-{name}"), tokens(25))
    outputs = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert {name: len(output.outputs[0].token_ids) for name, output in outputs.items()} == dict.fromkeys("abc", 25)
    assert outputs["a"].timings.finished_s <= outputs["b"].timings.finished_s
    engine.check_idle()


def test_waiting_requests_leave_no_mark_on_what_they_look_at():
    """Looking at stored KV again and again while waiting for room must not make it look much used."""
    engine, _ = symbolic(num_blocks=24)
    engine.add_request("stores", prompt("d8 t21"), ONE)
    drain(engine)
    engine.add_request("runs", prompt("t40-b"), tokens(20))
    engine.step()
    layout = prompt("d8 t21")
    longer = replace(layout.spans[-1], token_ids=layout.spans[-1].token_ids + named_tokens("t60"))
    engine.add_request("waits", PromptLayout((layout.spans[0], longer)), ONE)
    for _ in range(15):
        engine.step()
    assert "waits" in [sequence.group.request_id for sequence in engine.scheduler.waiting]
    assert all(node.num_hits == 0 for node in engine.cache.texts)
    assert drain(engine)["waits"].num_reused_tokens > 8
    engine.check_idle()
