# SPDX-License-Identifier: Apache-2.0
"""The engine on its thread: streams always end, leaving frees, stopping and dying are told to everyone."""

import asyncio
import threading

import pytest

from fixtures.tiny_engine import answer, make_engine, prompt
from lazyattention.documents.document import Document
from lazyattention.engine.async_engine import AsyncEngine
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import CapacityError, EngineDeadError, NotFoundError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
TIMEOUT_S = 30


class Gate:
    """Holds the engine's thread inside a forward pass until opened."""

    def __init__(self, engine):
        self.entered, self.opened = threading.Event(), threading.Event()
        run = engine.model_runner.run

        def run_when_open(batch):
            self.entered.set()
            assert self.opened.wait(TIMEOUT_S)
            return run(batch)

        engine.model_runner.run = run_when_open

    async def wait_entered(self):
        assert await asyncio.to_thread(self.entered.wait, TIMEOUT_S)


@pytest.fixture
def engine():
    return make_engine()


@pytest.fixture
def serve(engine):
    """Run a coroutine function with a started AsyncEngine; it is stopped afterwards."""

    def run(scenario):
        served = AsyncEngine(engine)
        served.start()

        async def limited():
            await asyncio.wait_for(scenario(served), TIMEOUT_S)

        try:
            asyncio.run(limited())
        finally:
            served.stop(TIMEOUT_S)
        assert not served._thread.is_alive()

    return run


async def collect(stream):
    return [output async for output in stream]


async def until_idle(served):
    while await served.call(lambda: served.engine.has_work):
        await asyncio.sleep(0.001)


def test_concurrent_streams_give_what_each_request_gives_alone(serve):
    shorthands = ["p11 d9 t7", "p11 d16 d9 t5", "t9", "p11 d9 t7"]
    want = [answer(make_engine(), prompt(shorthand), GREEDY).outputs[0].token_ids for shorthand in shorthands]

    async def scenario(served):
        streams = await asyncio.gather(*(collect(served.generate(prompt(s), GREEDY)) for s in shorthands))
        assert [outputs[-1].outputs[0].token_ids for outputs in streams] == want
        for outputs in streams:
            # Outputs that were not read in time are merged: their number is free, what they add up to is not.
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            deltas = [token_id for output in outputs for token_id in output.outputs[0].delta_token_ids]
            assert deltas == outputs[-1].outputs[0].token_ids
            assert len({output.request_id for output in outputs}) == 1
        await served.call(served.engine.check_idle)

    serve(scenario)


def test_recompute_reaches_the_engine(serve):
    async def scenario(served):
        outputs = [one async for one in served.generate(prompt("p11 d9 d33 t5"), GREEDY, recompute="attention:0.3")]
        assert outputs[-1].num_recomputed_tokens > 0
        assert outputs[-1].timings.selection_s > 0

    serve(scenario)


def test_cancelling_frees_what_the_request_held(serve, engine):
    async def scenario(served):
        task = asyncio.create_task(collect(served.generate(prompt("p11 d30 t7"), ENDLESS)))
        while not await served.call(lambda: engine.scheduler.running):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(served)
        await served.call(engine.check_idle)
        assert engine.live_request_ids == []
        assert served._streams == {}

    serve(scenario)


def test_cancelling_before_the_engine_took_the_request(serve, engine):
    gate = Gate(engine)

    async def scenario(served):
        other = asyncio.create_task(collect(served.generate(prompt("t9"), GREEDY)))
        await gate.wait_entered()
        task = asyncio.create_task(collect(served.generate(prompt("p11 d30 t7"), ENDLESS)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
        assert len((await other)[-1].outputs[0].token_ids) == 4
        await until_idle(served)
        assert engine.live_request_ids == []
        assert served._streams == {}

    serve(scenario)


def test_closing_the_iterator_early_aborts(serve, engine):
    async def scenario(served):
        stream = served.generate(prompt("p11 d30 t7"), ENDLESS)
        async for _ in stream:
            break
        await stream.aclose()
        await until_idle(served)
        assert engine.live_request_ids == []
        await served.call(engine.check_idle)

    serve(scenario)


def test_abort_by_id_ends_the_stream_as_aborted(serve):
    async def scenario(served):
        outputs = []
        async for output in served.generate(prompt("t9"), ENDLESS, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 1:
                assert await served.abort("mine")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert not await served.abort("mine")

    serve(scenario)


def test_refusal_reaches_its_caller_alone(serve):
    async def scenario(served):
        good = asyncio.create_task(collect(served.generate(prompt("t9"), GREEDY, request_id="taken")))
        while not await served.call(lambda: served.engine.live_request_ids):
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'taken' is in use"):
            await collect(served.generate(prompt("t9"), GREEDY, request_id="taken"))
        with pytest.raises(RequestError, match="max_model_len"):
            await collect(served.generate(prompt("t600"), GREEDY))
        assert (await good)[-1].error is None

    serve(scenario)


def test_a_failed_pass_reaches_its_callers_and_the_engine_goes_on(serve, engine):
    run, failing = engine.model_runner.run, [True]

    def run_or_raise(batch):
        if failing:
            failing.clear()
            raise RuntimeError("out of order")
        return run(batch)

    engine.model_runner.run = run_or_raise

    async def scenario(served):
        with pytest.raises(CapacityError, match="out of order"):
            await collect(served.generate(prompt("t9"), GREEDY))
        assert (await collect(served.generate(prompt("t9"), GREEDY)))[-1].error is None
        assert served.is_running

    serve(scenario)


def test_stop_ends_every_stream_with_an_error(engine):
    gate = Gate(engine)
    served = AsyncEngine(engine)
    served.start()

    async def scenario():
        streams = [asyncio.create_task(collect(served.generate(prompt("t9"), ENDLESS))) for _ in range(3)]
        await gate.wait_entered()
        stopping = asyncio.create_task(asyncio.to_thread(served.stop, TIMEOUT_S))
        gate.opened.set()
        results = await asyncio.gather(*streams, return_exceptions=True)
        await stopping
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert not served.is_running
        with pytest.raises(EngineDeadError, match="start a new one"):
            await collect(served.generate(prompt("t9"), GREEDY))
        with pytest.raises(EngineDeadError):
            await served.stats()

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert engine.live_request_ids == []


def test_a_request_that_comes_in_while_the_engine_stops_is_told(engine):
    """It was taken into the engine that had just ended its last step, and its stream waited for ever."""
    gate = Gate(engine)
    served = AsyncEngine(engine)
    served.start()

    async def scenario():
        running = asyncio.create_task(collect(served.generate(prompt("t9"), ENDLESS)))
        await gate.wait_entered()
        # The engine's thread is in a step; both the request and the call to stop wait for it to end.
        late = asyncio.create_task(collect(served.generate(prompt("t9"), GREEDY)))
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(asyncio.to_thread(served.stop, TIMEOUT_S))
        while not served._is_stopping:
            await asyncio.sleep(0.001)
        gate.opened.set()
        results = await asyncio.gather(running, late, return_exceptions=True)
        await stopping
        assert [type(result) for result in results] == [EngineDeadError] * 2

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_a_call_posted_after_the_inbox_was_emptied_for_the_last_time_is_told(engine, monkeypatch):
    """The engine may die between a caller's look at it and its call; nobody was left to answer."""
    served = AsyncEngine(engine)
    served.start()
    served.stop(TIMEOUT_S)
    monkeypatch.setattr(AsyncEngine, "is_running", property(lambda self: True))

    async def scenario():
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(served.stats(), TIMEOUT_S)

    asyncio.run(scenario())


def test_death_of_the_engine_is_told_to_every_stream(engine):
    gate = Gate(engine)
    served = AsyncEngine(engine)
    served.start()

    def die(*unused):
        raise MemoryError("bookkeeping is broken")

    async def scenario():
        streams = [asyncio.create_task(collect(served.generate(prompt("t9"), ENDLESS))) for _ in range(2)]
        await gate.wait_entered()
        engine.scheduler.schedule = die
        gate.opened.set()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 2
        assert all("bookkeeping is broken" in str(result) for result in results)
        with pytest.raises(EngineDeadError):
            await collect(served.generate(prompt("t9"), GREEDY))

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert isinstance(served.error, MemoryError)
    assert not served.is_running


def test_a_stream_whose_loop_is_gone_harms_nobody(engine):
    served = AsyncEngine(engine)
    served.start()
    stream = served.generate(prompt("t9"), SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()

    async def scenario():
        assert (await collect(served.generate(prompt("t9"), GREEDY)))[-1].error is None
        assert served.is_running
        await stream.aclose()
        await until_idle(served)

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    served.stop(TIMEOUT_S)
    assert engine.live_request_ids == []


def test_documents_can_be_cared_for_while_requests_run(serve):
    document = Document("the lighthouse stands on the northern cape", id="cape")

    async def scenario(served):
        running = asyncio.create_task(collect(served.generate(prompt("t9"), ENDLESS, request_id="long")))
        warmed = await served.warm_document(document)
        assert warmed.documents[0].reason == "new"
        await served.pin_documents(["cape"], ttl_s=100)
        [info] = await served.list_documents()
        assert (info.document_id, info.is_pinned, info.is_uploaded) == ("cape", True, True)
        await served.unpin_documents(["cape"])
        assert await served.list_documents(scope="other") == []
        with pytest.raises(NotFoundError):
            await served.delete_document("cape", scope="other")
        assert (await served.delete_document("cape")).num_chunks == 1
        assert (await served.stats())["num_deleted_chunks"] == 1
        await served.abort("long")
        assert (await running)[-1].finished

    serve(scenario)


def test_callers_of_several_loops_are_served(engine):
    served = AsyncEngine(engine)
    served.start()
    results = []

    def one_loop():
        outputs = asyncio.run(collect(served.generate(prompt("p11 d9 t7"), GREEDY)))
        results.append(outputs[-1].outputs[0].token_ids)

    threads = [threading.Thread(target=one_loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    served.stop(TIMEOUT_S)
    assert len(results) == 3
    assert results.count(results[0]) == 3


def test_an_engine_that_was_never_started_says_so(engine):
    served = AsyncEngine(engine)

    async def scenario():
        with pytest.raises(EngineDeadError, match="not running"):
            await collect(served.generate(prompt("t9"), GREEDY))

    asyncio.run(scenario())
    served.stop()
