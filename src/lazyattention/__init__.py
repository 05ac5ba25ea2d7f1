# SPDX-License-Identifier: Apache-2.0
"""Answer questions over documents without computing the same document twice."""

__version__ = "0.1.0"
