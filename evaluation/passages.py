# SPDX-License-Identifier: Apache-2.0
"""Write the passages of the training questions as a folder of documents: what a user has who has no questions.

    PYTHONPATH=src python3 evaluation/passages.py DATA

DATA holds nq-open-oracle.jsonl.gz and receives the folder `passages`. No passage is of an article that is tested.
"""

import argparse
import html
from pathlib import Path

from lazyattention.quality.datasets import build_dataset

_ALL = 1_000_000


def main() -> None:
    """Write each passage once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_folder", type=Path)
    data_folder: Path = parser.parse_args().data_folder
    folder = data_folder / "passages"
    folder.mkdir(exist_ok=True)
    examples = build_dataset(f"nq-train:{data_folder / 'nq-open-oracle.jsonl.gz'}", num_documents=1, num_questions=_ALL)
    passages = dict.fromkeys((str(d.title), d.text) for example in examples for d in example.documents)
    for number, (title, text) in enumerate(passages):
        page = f"<title>{html.escape(title)}</title>\n<p>{html.escape(text)}</p>\n"  # a form that carries a title
        (folder / f"{number:04d}.html").write_text(page, encoding="utf-8")
    print(f"{len(passages)} passages in {folder}")


if __name__ == "__main__":
    main()
