# SPDX-License-Identifier: Apache-2.0
"""Run by test_simu.py in two processes: one short run, weights written per process."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from memorizing_model import new_model, people, word_tokenizer

from lazyattention.unlearn.presets import preset
from lazyattention.unlearn.simu import UnlearnSets, unlearn

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    splits = people(num_people=8, num_facts=2, forget_fraction=0.25)
    tokenizer = word_tokenizer(splits)
    options = {"train.template": "plain", "train.batch_size": 1, "attribution.num_steps": 2, "optimizer.lr": 1e-3}
    config = preset("simu", overrides=options | {"guards.eval_every": 2, "guards.target": 1e6, "train.num_epochs": 3})
    result = unlearn(
        new_model(tokenizer),
        tokenizer,
        UnlearnSets(forget=splits["forget"], retain=splits["retain"]),
        config,
        output_dir=folder / "checkpoints",
    )
    torch.save(result.model.state_dict(), folder / f"rank{rank}.pt")
