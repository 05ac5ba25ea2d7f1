# SPDX-License-Identifier: Apache-2.0
"""HTTP in, HTTP out: an OpenAI-compatible server whose requests can carry documents. `app.py` lists the routes."""
