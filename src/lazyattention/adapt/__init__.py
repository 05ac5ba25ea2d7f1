# SPDX-License-Identifier: Apache-2.0
"""Teaches a model to answer under the chunk mask as it does with full attention: read trainer.py first."""
