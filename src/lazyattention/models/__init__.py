# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers models run through our attention function."""
