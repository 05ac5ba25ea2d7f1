# SPDX-License-Identifier: Apache-2.0
"""The only reader of environment variables. Every variable, its default and its meaning stand here.

Values are read once, on import; arguments and command-line flags take precedence over them.
"""

import os
from pathlib import Path

# Where models prepared from packages or GGUF files are kept. Default: $XDG_CACHE_HOME/lazyattention.
CACHE_DIR = Path(
    os.environ.get("LAZYATTENTION_CACHE_DIR")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lazyattention"
)
# Level of our loggers when a program does not set one.
LOG_LEVEL = os.environ.get("LAZYATTENTION_LOG_LEVEL", "WARNING")
# "1": checksum every chunk's KV after it is written and compare after every step. Slow; for debugging and tests.
DEBUG_CHECKSUMS = os.environ.get("LAZYATTENTION_DEBUG_CHECKSUMS", "0") == "1"
# "0": no progress bars, whatever the terminal.
PROGRESS = os.environ.get("LAZYATTENTION_PROGRESS", "1") != "0"
# Server: keys and the scopes they belong to, "scope:key,scope:key", when no key file is given.
API_KEYS = os.environ.get("LAZYATTENTION_API_KEYS", "")
# Clients (`lazyattention documents`, `unlearn run --store`, `unlearn purge`): the server's address.
SERVER_URL = os.environ.get("LAZYATTENTION_SERVER_URL", "http://127.0.0.1:8000")
# Clients: the key to send, which says whose documents they are.
API_KEY = os.environ.get("LAZYATTENTION_API_KEY", "")
