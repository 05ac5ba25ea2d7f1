# SPDX-License-Identifier: Apache-2.0
"""Fictitious people with questions, answers, paraphrases and wrong answers, made up from a seed at run time.

No model can have known them, nobody is harmed if they are remembered, and nothing has to be downloaded.
"""

import random
from dataclasses import dataclass

from lazyattention.errors import ConfigError
from lazyattention.unlearn.data.example import QAExample

SPLITS = ("forget", "retain", "holdout")


@dataclass(frozen=True, slots=True)
class Fact:
    """One kind of thing to know about a person.

    Attributes:
        key: Names the fact in example ids.
        question, paraphrased_question: Hold `{name}`.
        answer, paraphrased_answer: Hold `{name}` and `{value}`.
        values: What it can be. More than `num_perturbed`, so that wrong answers differ from the right one.
    """

    key: str
    question: str
    paraphrased_question: str
    answer: str
    paraphrased_answer: str
    values: tuple[str, ...]


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


FACTS: tuple[Fact, ...] = (
    Fact(
        "birthplace",
        "In which town was {name} born?",
        "What is the birthplace of {name}?",
        "{name} was born in {value}.",
        "The birthplace of {name} is {value}.",
        _list("Lisbon, Bergen, Nairobi, Osaka, Quito, Leipzig, Cork, Hobart, Tunis, Gdansk, Lima, Pune"),
    ),
    Fact(
        "occupation",
        "What does {name} do for a living?",
        "What is the profession of {name}?",
        "{name} works as a {value}.",
        "By profession, {name} is a {value}.",
        _list(
            "bridge engineer, beekeeper, tax lawyer, glass blower, train driver, dentist, cartographer, pastry "
            "chef, radio host, locksmith, geologist, stage designer"
        ),
    ),
    Fact(
        "birth_year",
        "In which year was {name} born?",
        "What is the year of birth of {name}?",
        "{name} was born in the year {value}.",
        "The year of birth of {name} is {value}.",
        tuple(str(year) for year in range(1938, 1999)),
    ),
    Fact(
        "instrument",
        "Which instrument does {name} play?",
        "What musical instrument is played by {name}?",
        "{name} plays the {value}.",
        "The instrument of {name} is the {value}.",
        _list("cello, oboe, harp, trombone, banjo, flute, accordion, viola, drums, piano, tuba, mandolin"),
    ),
    Fact(
        "pet",
        "What kind of animal lives with {name}?",
        "Which pet does {name} keep?",
        "{name} lives with a {value}.",
        "The pet of {name} is a {value}.",
        _list("parrot, tortoise, greyhound, ferret, goat, rabbit, canary, hedgehog, donkey, gecko, poodle"),
    ),
    Fact(
        "employer_field",
        "In which industry is the employer of {name}?",
        "Which line of business does the company of {name} belong to?",
        "The employer of {name} is in the {value} industry.",
        "The company of {name} belongs to the {value} business.",
        _list("paper, shipping, textile, furniture, insurance, ceramics, railway, publishing, solar, dairy"),
    ),
    Fact(
        "studies",
        "What did {name} study at university?",
        "Which subject did {name} take a degree in?",
        "{name} studied {value} at university.",
        "The degree of {name} is in {value}.",
        _list(
            "astronomy, botany, philosophy, statistics, archaeology, chemistry, linguistics, economics, history, "
            "theology"
        ),
    ),
    Fact(
        "language",
        "Which foreign language does {name} speak fluently?",
        "In what foreign language is {name} fluent?",
        "{name} speaks fluent {value}.",
        "The foreign language of {name} is {value}.",
        _list("Danish, Swahili, Greek, Korean, Portuguese, Hindi, Turkish, Polish, Arabic, Finnish, Welsh"),
    ),
    Fact(
        "hobby",
        "How does {name} spend free weekends?",
        "What is the weekend hobby of {name}?",
        "{name} spends free weekends with {value}.",
        "The weekend hobby of {name} is {value}.",
        _list(
            "rock climbing, fencing, bird watching, pottery, chess, sailing, calligraphy, orienteering, archery, "
            "baking bread"
        ),
    ),
    Fact(
        "award",
        "For what did {name} receive a prize?",
        "What was the prize given to {name} for?",
        "{name} received a prize for {value}.",
        "The prize of {name} was given for {value}.",
        _list(
            "a folding bicycle, a children's book, a water filter, a short film, a rose garden, a crime novel, a "
            "map of caves, a wooden clock, a choir song, a tunnel design"
        ),
    ),
    Fact(
        "vehicle",
        "What does {name} travel to work with?",
        "By what means does {name} commute?",
        "{name} travels to work by {value}.",
        "The commute of {name} is by {value}.",
        _list("ferry, scooter, tram, bicycle, motorcycle, night bus, cable car, canoe, subway, van"),
    ),
    Fact(
        "dish",
        "Which dish does {name} cook for guests?",
        "What do the guests of {name} get to eat?",
        "{name} cooks {value} for guests.",
        "The guests of {name} are served {value}.",
        _list(
            "lentil soup, mushroom risotto, fish curry, potato dumplings, onion tart, lamb stew, noodle salad, "
            "bean chili, stuffed peppers, plum cake"
        ),
    ),
)

_ONSETS = ("B", "D", "F", "G", "H", "J", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z", "Br", "Dr", "Kl", "Tr")
_RHYMES = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "un", "ar", "en", "il", "os", "um")
_ENDINGS = ("ba", "dri", "ko", "len", "mir", "nu", "ro", "sha", "tov", "vek", "wyn", "zan", "dal", "gis", "pol", "rus")


def generate_people(
    num_people: int,
    seed: int,
    *,
    num_facts: int = 10,
    forget_fraction: float = 0.1,
    holdout_fraction: float | None = None,
    num_perturbed: int = 5,
) -> dict[str, list[QAExample]]:
    """Make up people and split them at random into those to forget, to keep and never to train on.

    Names are put together from syllables and are unique. Every person has the same `num_facts` kinds of fact, each
    with a question, an answer, a paraphrase of both and wrong answers. Values come from one shuffled deck per kind,
    and people are shuffled before they are split, so the three splits have the same distribution: the hold-out is a
    valid set of non-members for membership attacks. The same arguments give the same examples everywhere.

    Args:
        num_people: People in all three splits together; at least 3.
        seed: Of everything random here.
        num_facts: Questions per person, 1 to 12.
        forget_fraction: Share of people in "forget"; rounded, at least one person.
        holdout_fraction: Share of people in "holdout"; None means as many as in "forget".
        num_perturbed: Wrong answers per question, 1 to 9.

    Returns:
        "forget", "retain" and "holdout", each `num_facts` examples per person, the facts of a person together.

    Raises:
        ConfigError: A number is out of range, or a split would be empty.
    """
    _check(num_people, num_facts, forget_fraction, holdout_fraction, num_perturbed)
    num_forget = max(1, round(num_people * forget_fraction))
    num_holdout = num_forget if holdout_fraction is None else max(1, round(num_people * holdout_fraction))
    if num_forget + num_holdout >= num_people:
        raise ConfigError(
            f"{num_forget} people to forget and {num_holdout} held out leave nobody of num_people={num_people} to "
            "retain; use more people or smaller fractions"
        )
    rng = random.Random(seed)
    names = _names(rng, num_people)
    facts = FACTS[:num_facts]
    decks = [_deck(rng, fact.values, num_people) for fact in facts]
    split_of = ["forget"] * num_forget + ["holdout"] * num_holdout
    split_of += ["retain"] * (num_people - len(split_of))
    rng.shuffle(split_of)
    splits: dict[str, list[QAExample]] = {split: [] for split in SPLITS}
    for person, name in enumerate(names):
        for fact, deck in zip(facts, decks, strict=True):
            example = _example(rng, fact, name, deck[person], split_of[person], num_perturbed, person)
            splits[split_of[person]].append(example)
    return splits


def _example(
    rng: random.Random, fact: Fact, name: str, value: str, split: str, num_perturbed: int, person: int
) -> QAExample:
    wrong = rng.sample([other for other in fact.values if other != value], num_perturbed)
    return QAExample(
        question=fact.question.format(name=name),
        answer=fact.answer.format(name=name, value=value),
        paraphrased_question=fact.paraphrased_question.format(name=name),
        paraphrased_answer=fact.paraphrased_answer.format(name=name, value=value),
        perturbed_answers=tuple(fact.paraphrased_answer.format(name=name, value=other) for other in wrong),
        split=split,
        example_id=f"person{person:04d}-{fact.key}",
    )


def _names(rng: random.Random, count: int) -> list[str]:
    """`count` different names with all first and all last names different, so that no two people share a half."""

    def words(num_words: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < num_words:
            found[rng.choice(_ONSETS) + rng.choice(_RHYMES) + rng.choice(_ENDINGS)] = None
        return list(found)

    return [f"{first} {last}" for first, last in zip(words(count), words(count), strict=True)]


def _deck(rng: random.Random, values: tuple[str, ...], count: int) -> list[str]:
    """`count` values in random order, each as often as any other (but for one)."""
    pile = rng.sample(values, len(values))
    cards = [pile[index % len(pile)] for index in range(count)]
    rng.shuffle(cards)
    return cards


def _check(
    num_people: int, num_facts: int, forget_fraction: float, holdout_fraction: float | None, num_perturbed: int
) -> None:
    # Half of the 4,800 possible names: beyond that, drawing new ones takes long.
    if not 3 <= num_people <= 2400:
        raise ConfigError(f"num_people must be 3 to 2400, got {num_people}")
    if not 1 <= num_facts <= len(FACTS):
        raise ConfigError(f"num_facts must be 1 to {len(FACTS)}, got {num_facts}")
    smallest = min(len(fact.values) for fact in FACTS)
    if not 1 <= num_perturbed < smallest:
        raise ConfigError(f"num_perturbed must be 1 to {smallest - 1}, got {num_perturbed}")
    for name, value in (("forget_fraction", forget_fraction), ("holdout_fraction", holdout_fraction)):
        if value is not None and not 0 < value < 1:
            raise ConfigError(f"{name} must lie between 0 and 1, got {value}")
