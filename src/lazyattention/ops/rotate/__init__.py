# SPDX-License-Identifier: Apache-2.0
"""Copy stored KV to other slots, turning the keys on the way."""

from lazyattention.ops.rotate.op import copy_turned

__all__ = ["copy_turned"]
