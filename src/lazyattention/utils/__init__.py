# SPDX-License-Identifier: Apache-2.0
"""Helpers with no knowledge of models or requests: logging, hashing, registries."""
