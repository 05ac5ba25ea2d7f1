# SPDX-License-Identifier: Apache-2.0
"""Does an answer match a gold answer: exact match, F1, containment, after the usual normalisation."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case; without punctuation, English articles and surplus blanks.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250 (SQuAD's evaluation).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the normalised answer equals a gold answer, else 0."""
    return float(any(normalize(answer) == normalize(gold) for gold in golds))


def containment(answer: str, golds: Sequence[str]) -> float:
    """1 if a gold answer stands in the answer, as whole words, else 0. Gold answers of nothing but articles never do."""
    padded = f" {normalize(answer)} "
    return float(any(wanted and f" {wanted} " in padded for wanted in map(normalize, golds)))


def f1(answer: str, golds: Sequence[str]) -> float:
    """Best F1 over gold answers, counted in normalised words."""
    return max((_f1(normalize(answer).split(), normalize(gold).split()) for gold in golds), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    num_shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * num_shared / (len(answer) + len(gold))
