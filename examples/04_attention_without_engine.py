# SPDX-License-Identifier: Apache-2.0
"""The attention function alone, inside your own transformers code: store a text's KV once, read it at any position.

The text is stored at positions 0 onwards. A question is then asked with the text standing at 0 and, without touching
what is stored, at 300. Attention depends on distances only, so the logits must agree.

Run: python examples/04_attention_without_engine.py [MODEL]
"""

import sys

import numpy as np
import torch

from lazyattention.models.loader import load_model
from lazyattention.ops.metadata import AttentionMetadata
from lazyattention.ops.plan import KVRange, RowGroup, make_plan

TEXT = "The Nile flows north through Egypt into the Mediterranean Sea."
QUESTION = " Where does the Nile flow? It flows"
BLOCK_SIZE, NUM_BLOCKS = 16, 8


def main(model=None):
    loaded = load_model(model)
    text, question = (
        loaded.tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids[0] for part in (TEXT, QUESTION)
    )
    kv_caches = [
        tuple(torch.zeros(NUM_BLOCKS, BLOCK_SIZE, *shape, dtype=loaded.dtype, device=loaded.device) for _ in range(2))
        for shape in loaded.kv_shapes
    ]

    def forward(token_ids, start, slot_start, ranges, groups):
        index = np.arange(len(token_ids))
        plan = make_plan(start + index, slot_start + index, ranges, groups, block_size=BLOCK_SIZE, device=loaded.device)
        metadata = AttentionMetadata(plan, kv_caches, loaded.rotaries)
        positions = torch.from_numpy(start + index)[None].to(loaded.device)
        ids = token_ids[None].to(loaded.device)
        return loaded.model(ids, position_ids=positions, use_cache=False, attention_metadata=metadata).logits[0, -1]

    # Blocks 0-3 hold the text, 4-7 the question. A row group says which tokens look at which range.
    stored = KVRange("text", [0, 1, 2, 3], len(text), first_position=0)
    with torch.inference_mode():
        forward(text, 0, 0, [stored], [RowGroup(0, 0, len(text), position_delta=0)])
        logits = []
        for start in (0, 300):
            at = start + len(text)
            own = KVRange("question", [4, 5, 6, 7], len(question), first_position=at)
            groups = [RowGroup(0, 0, len(question), position_delta=start), RowGroup(1, 0, len(question), 0)]
            logits.append(forward(question, at, 4 * BLOCK_SIZE, [stored, own], groups))
    print("next token:", repr(loaded.tokenizer.decode(logits[0].argmax())))
    print(f"largest difference between both positions: {(logits[0] - logits[1]).abs().max():.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
