# SPDX-License-Identifier: Apache-2.0
"""Generated questions: a needle among needles, and facts that lie in two documents. Nothing a model can know already."""

import random

from lazyattention.documents.document import Document
from lazyattention.errors import ConfigError
from lazyattention.quality.examples import QualityExample

_SYLLABLES = ("ba", "do", "ka", "li", "mo", "nu", "ra", "se", "ti", "vo", "wen", "zor", "fal", "gri", "pel", "hum")
_ROLES = ("gardener", "pilot", "clerk", "carpenter", "teacher", "nurse", "baker", "sailor", "painter", "judge")
_FRUITS = ("apple", "pear", "cherry", "plum", "fig", "melon", "grape", "lemon", "peach", "mango", "kiwi", "banana")
_FILLER = (
    "The {role} walked to the market before noon and came back with a full basket.",
    "It rained in the afternoon, so the meeting with the {role} was held indoors.",
    "Nobody could say when the old bridge had been repaired for the last time.",
    "The {role} wrote a short letter and left it on the table by the window.",
    "Lamps were lit early that evening, and the street stayed quiet until late.",
    "A visitor asked the {role} about the road to the coast and was shown a map.",
    "Most of the shelves were empty, but the books that were left had been cared for.",
    "In spring the river is high, and the {role} takes the longer way home.",
)
# Where in its document the fact stands; the first and last tokens of a chunk are where encoding alone could hurt most.
_DEPTHS = (0.0, 0.5, 1.0)


def needle_examples(num_documents: int, num_questions: int, seed: int) -> list[QualityExample]:
    """Ask for one person's fact; every document holds another person's fact of the same kind.

    Half of the facts are numbers, which nothing predicts, half are common words, which a model might guess.
    """
    examples = []
    for index in range(num_questions):
        draw = random.Random(f"needle {num_documents} {seed} {index}")
        names = _names(draw, num_documents)
        is_number = index % 2 == 0
        values = (
            [str(value) for value in draw.sample(range(10_000, 100_000), num_documents)]
            if is_number
            else [draw.choice(_FRUITS) for _ in names]
        )
        thing = "The access code of" if is_number else "The favourite fruit of"
        depth = _DEPTHS[index // 2 % len(_DEPTHS)]
        documents = tuple(
            _document(draw, f"{thing} {name} is {value}.", depth) for name, value in zip(names, values, strict=True)
        )
        gold = draw.randrange(num_documents)
        question = f"What is {thing[0].lower()}{thing[1:]} {names[gold]}?"
        examples.append(QualityExample(f"needle-{index}", question, documents, (values[gold],), (gold,)))
    return examples


def two_hop_examples(num_documents: int, num_questions: int, seed: int) -> list[QualityExample]:
    """Ask for a person's city: one document names the person's team, another one the team's city.

    Raises:
        ConfigError: There is no room for two documents.
    """
    if num_documents < 2:
        raise ConfigError(f"two_hop needs at least 2 documents per question, got {num_documents}; raise num_documents")
    examples = []
    for index in range(num_questions):
        draw = random.Random(f"two hop {num_documents} {seed} {index}")
        num_pairs = (num_documents + 1) // 2
        names = _names(draw, 3 * num_pairs)
        people, teams, cities = names[:num_pairs], names[num_pairs : 2 * num_pairs], names[2 * num_pairs :]
        facts = [
            (f"{person} belongs to the team {team}.", pair)
            for pair, (person, team) in enumerate(zip(people, teams, strict=True))
        ]
        facts += [
            (f"The team {team} has its office in {city}.", pair)
            for pair, (team, city) in enumerate(zip(teams, cities, strict=True))
        ]
        # The asked pair keeps both its facts; with an odd number one other fact goes.
        while len(facts) > num_documents:
            facts.pop()
        draw.shuffle(facts)
        asked = 0
        documents = tuple(_document(draw, fact, draw.choice(_DEPTHS)) for fact, _ in facts)
        gold = tuple(place for place, (_, pair) in enumerate(facts) if pair == asked)
        question = f"In which city is the office of the team that {people[asked]} belongs to?"
        examples.append(QualityExample(f"two-hop-{index}", question, documents, (cities[asked],), gold))
    return examples


def _names(draw: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choice(_SYLLABLES) for _ in range(3)).capitalize()] = None
    return list(found)


def _document(draw: random.Random, fact: str, depth: float) -> Document:
    sentences = [line.format(role=draw.choice(_ROLES)) for line in draw.sample(_FILLER, 5)]
    sentences.insert(round(depth * len(sentences)), fact)
    return Document(" ".join(sentences))
