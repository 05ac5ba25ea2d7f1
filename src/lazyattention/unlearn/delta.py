# SPDX-License-Identifier: Apache-2.0
"""The delta file: what a run changed, as bits that turn either model into the other.

Per tensor it holds the exclusive-or of old and new bits of the changed slices, so one file both applies and rolls back,
to the last bit, in any dtype. Digests of the whole tensors before and after tell which way is possible.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from lazyattention.errors import RequestError
from lazyattention.models.weights_id import tensors_digest
from lazyattention.unlearn.masked_step import put, take
from lazyattention.unlearn.neuron_mask import Selection
from lazyattention.unlearn.snapshot import Snapshot

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FORMAT = "lazyattention.unlearn.delta/1"


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(_BITS[values.element_size()])


@torch.no_grad()
def write_delta(path: Path, base: Snapshot, original: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write the difference between `original` and what `base` reads now.

    Args:
        path: A .safetensors file, replaced if it exists.
        base: Of the unlearned model, adapters merged.
        original: What `base.capture()` returned before the run.

    Returns:
        The file's metadata: per tensor "dim" (None = whole tensor), "before" and "after" digests.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, param in base.params.items():
        selection = base.selections.get(param)
        new = take(param.detach(), selection).cpu()
        changed = _as_bits(new) ^ _as_bits(original[name])
        if not changed.any():
            continue
        after = tensors_digest({name: param})
        whole = param.detach().cpu().clone()
        put(whole, selection and Selection(selection.dim, selection.index.cpu()), original[name])
        entries[name] = {
            "dim": selection.dim if selection else None,
            "before": tensors_digest({name: whole}),
            "after": after,
        }
        tensors[f"xor:{name}"] = changed
        if selection is not None:
            tensors[f"index:{name}"] = selection.index.cpu()
    metadata = {"format": _FORMAT, "entries": json.dumps(entries)}
    save_file(tensors, path, metadata=metadata)
    return entries


@torch.no_grad()
def change_by_delta(model: nn.Module, path: Path, direction: Literal["apply", "rollback"]) -> int:
    """Turn the original model into the unlearned one or back, in place and to the last bit.

    All tensors are checked before any is touched.

    Args:
        model: A model loaded in the dtype the run had.
        path: Written by `write_delta`.
        direction: "apply" = original to unlearned; "rollback" = unlearned to original.

    Returns:
        Number of tensors changed.

    Raises:
        RequestError: The file is of another kind or for other weights than the model's.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise RequestError(f"{path} is not a delta file of format {_FORMAT}; give the delta.safetensors of a run")
        entries = json.loads(metadata["entries"])
        params = dict(model.named_parameters())
        expected = "before" if direction == "apply" else "after"
        for name, entry in entries.items():
            if name not in params or tensors_digest({name: params[name]}) != entry[expected]:
                raise RequestError(
                    f"cannot {direction} {path}: weight {name} of the model is not the one {expected} the run; give the "
                    f"{'original' if direction == 'apply' else 'unlearned'} model, in the dtype of the run"
                )
        for name, entry in entries.items():
            param = params[name]
            selection = None
            if entry["dim"] is not None:
                selection = Selection(entry["dim"], file.get_tensor(f"index:{name}").to(param.device))
            bits = _as_bits(take(param.detach(), selection)) ^ file.get_tensor(f"xor:{name}").to(param.device)
            put(param, selection, bits.view(param.dtype))
    return len(entries)
