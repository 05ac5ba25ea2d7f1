# SPDX-License-Identifier: Apache-2.0
"""Made-up people: the same from the same seed, apart in different splits, and alike in distribution."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lazyattention.errors import ConfigError
from lazyattention.unlearn.data import dataset_digest, find_overlap, generate_people
from lazyattention.unlearn.data.people import FACTS


def name_of(example):
    """The person is the part that question and answer have in common and that stands in no template."""
    key = example.example_id.split("-")[1]
    template = next(fact.question for fact in FACTS if fact.key == key)
    before, after = template.split("{name}")
    return example.question.removeprefix(before).removesuffix(after)


def test_the_same_seed_gives_the_same_people_for_ever():
    digests = {name: dataset_digest(examples) for name, examples in generate_people(12, 3, num_facts=4).items()}
    assert digests == {name: dataset_digest(e) for name, e in generate_people(12, 3, num_facts=4).items()}
    assert digests != {name: dataset_digest(e) for name, e in generate_people(12, 4, num_facts=4).items()}
    # Pinned: a change of the generator would make results of different versions incomparable in silence.
    assert digests["forget"] == "41609b3ae900dacda2efdc58aa63ff2a"


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 60), st.integers(0, 10**6), st.integers(1, 12), st.floats(0.05, 0.4), st.integers(1, 9))
def test_splits_are_disjoint_and_every_example_is_consistent(num_people, seed, num_facts, fraction, num_perturbed):
    splits = generate_people(
        num_people, seed, num_facts=num_facts, forget_fraction=fraction, num_perturbed=num_perturbed
    )
    people = {name: Counter(name_of(e) for e in examples) for name, examples in splits.items()}
    assert sum(len(names) for names in people.values()) == len(set().union(*people.values())) == num_people
    assert len(people["forget"]) == len(people["holdout"]) == max(1, round(num_people * fraction))
    ids = [e.example_id for examples in splits.values() for e in examples]
    assert len(ids) == len(set(ids))
    for split, examples in splits.items():
        assert set(people[split].values()) == {num_facts}
        for e in examples:
            assert e.split == split
            assert name_of(e) in e.answer
            assert name_of(e) in e.paraphrased_question
            assert name_of(e) in e.paraphrased_answer
            assert len(set(e.perturbed_answers)) == num_perturbed
            assert e.paraphrased_answer not in e.perturbed_answers
            assert value_in(e, "answer", e.answer) == value_in(e, "paraphrased_answer", e.paraphrased_answer)
            assert all(value_in(e, "paraphrased_answer", wrong) for wrong in e.perturbed_answers)
    assert not find_overlap(splits["forget"], splits["retain"] + splits["holdout"])


def value_in(example, field, text):
    """The one value that makes `text` out of the fact's template."""
    fact = next(fact for fact in FACTS if fact.key == example.example_id.split("-")[1])
    made = {getattr(fact, field).format(name=name_of(example), value=value): value for value in fact.values}
    return made[text]


def test_splits_are_alike_in_distribution():
    splits = generate_people(600, 1, forget_fraction=0.3)
    lengths = {name: [len(e.answer) for e in examples] for name, examples in splits.items()}
    assert stats.ks_2samp(lengths["forget"], lengths["holdout"]).pvalue > 0.01
    values = {name: Counter(e.answer.split()[-1] for e in splits[name]) for name in ("forget", "holdout")}
    words = sorted(set(values["forget"]) | set(values["holdout"]))
    table = [[values[name][word] for word in words] for name in values]
    assert stats.chi2_contingency(table).pvalue > 0.01


def test_every_value_occurs_about_equally_often():
    examples = [e for part in generate_people(120, 0, num_facts=1).values() for e in part]
    counts = Counter(e.answer.rsplit(" ", 1)[1] for e in examples)
    assert set(counts.values()) == {10}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_people": 2}, "num_people must be 3 to 2400, got 2"),
        ({"num_facts": 13}, "num_facts must be 1 to 12, got 13"),
        ({"num_perturbed": 10}, "num_perturbed must be 1 to 9, got 10"),
        ({"forget_fraction": 1.0}, "forget_fraction must lie between 0 and 1"),
        ({"holdout_fraction": 0.0}, "holdout_fraction must lie between 0 and 1"),
        ({"forget_fraction": 0.5}, "leave nobody of num_people=10 to retain"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        generate_people(**{"num_people": 10, "seed": 0, **options})
