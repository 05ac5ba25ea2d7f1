# SPDX-License-Identifier: Apache-2.0
"""The command `lazyattention`. `app.py` lists the commands; nothing here imports torch before a command needs it."""

from lazyattention.cli.app import app, main

__all__ = ["app", "main"]
