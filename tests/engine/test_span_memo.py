# SPDX-License-Identifier: Apache-2.0
from lazyattention.engine.span_memo import SpanMemo
from lazyattention.reuse import Span


def make(num_tokens, made):
    made.append(num_tokens)
    return (Span(tuple(range(num_tokens)), "d"),)


def test_what_is_remembered_is_not_made_again():
    memo, made = SpanMemo(), []
    first = memo.get(("text", None, "d"), lambda: make(5, made))
    assert memo.get(("text", None, "d"), lambda: make(6, made)) is first
    memo.get(("text", "title", "d"), lambda: make(7, made))
    assert made == [5, 7]


def test_memory_is_bounded_and_the_longest_unused_goes_first():
    memo, made = SpanMemo(max_bytes=100_000), []
    for number in range(50):
        memo.get((f"text {number}", None, "d"), lambda: make(200, made))
        memo.get(("text 0", None, "d"), lambda: make(200, made))
    assert 5 < len(memo) < 15
    assert made.count(200) == 50  # "text 0" was used all the time
    memo.get(("huge", None, "d"), lambda: make(10_000, made))
    assert 5 < len(memo) < 15
    memo.get(("x" * 100_000, None, "d"), lambda: make(1, made))
    assert 5 < len(memo) < 15


def test_clearing_forgets_what_is_being_made():
    memo, made = SpanMemo(), []

    def make_while_others_clear():
        memo.clear()
        return make(5, made)

    memo.get(("text", None, "d"), make_while_others_clear)
    assert len(memo) == 0
    memo.get(("text", None, "d"), lambda: make(5, made))
    assert len(memo) == 1
    memo.clear()
    assert len(memo) == 0
