# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.engine.mailbox import OutputMailbox
from lazyattention.engine.outputs import CompletionOutput, RequestOutput, Timings


def snapshot(texts, deltas, *, finished=False):
    outputs = [
        CompletionOutput(
            index, text=text, delta_text=delta, token_ids=[1] * len(text), delta_token_ids=[1] * len(delta)
        )
        for index, (text, delta) in enumerate(zip(texts, deltas, strict=True))
    ]
    return RequestOutput("r", [], outputs, finished, [], 0, 0, 0, Timings(0.0))


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.text("cd", max_size=3)), min_size=1), st.data())
def test_deltas_add_up_however_late_the_reader_is(steps, data):
    async def main():
        mailbox, texts, read = OutputMailbox(), ["", ""], ["", ""]
        for number, deltas in enumerate(steps):
            texts = [text + delta for text, delta in zip(texts, deltas, strict=True)]
            mailbox.put(snapshot(texts, deltas, finished=number == len(steps) - 1))
            if number == len(steps) - 1 or data.draw(st.booleans()):
                output = await mailbox.get()
                read = [text + one.delta_text for text, one in zip(read, output.outputs, strict=True)]
                assert [one.text for one in output.outputs] == read
                assert [len(one.delta_token_ids) for one in output.outputs] == [
                    len(o.delta_text) for o in output.outputs
                ]
        assert output.finished
        assert read == texts

    asyncio.run(main())


def test_unread_outputs_do_not_pile_up():
    async def main():
        mailbox, text = OutputMailbox(), ""
        for _ in range(1000):
            text += "x"
            mailbox.put(snapshot([text], ["x"]))
        assert (await mailbox.get()).outputs[0].delta_text == "x" * 1000
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.get(), 0.01)

    asyncio.run(main())


def test_an_exception_comes_after_what_was_there_before():
    async def main():
        mailbox = OutputMailbox()
        mailbox.put(snapshot(["x"], ["x"]))
        mailbox.put(KeyError("gone"))
        assert (await mailbox.get()).outputs[0].text == "x"
        assert isinstance(await mailbox.get(), KeyError)

    asyncio.run(main())
