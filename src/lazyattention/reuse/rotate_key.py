# SPDX-License-Identifier: Apache-2.0
"""Store keys without rotation and turn them at every read."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class RotateKey(ReuseMethod):
    """One copy serves every position, but each read turns every key, and requests at different positions cannot share a read.

    Source: the reading scheme described for MEPIC, arXiv:2512.16822.
    """

    name = "rotate_key"
    summary = "Store keys without rotation and turn them at every read."
    document_use = SpanUse.SHARED
    keys_turned = False
