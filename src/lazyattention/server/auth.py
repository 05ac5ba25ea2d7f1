# SPDX-License-Identifier: Apache-2.0
"""Which scope a request belongs to. It follows from the API key alone, never from anything else a client sends."""

import hmac
from collections.abc import Mapping

from lazyattention.server.config import ScopeConfig, key_digest
from lazyattention.server.errors import AuthenticationError


class Authenticator:
    """Maps API keys to scopes in a time that does not depend on the key."""

    def __init__(self, scopes: Mapping[str, ScopeConfig]) -> None:
        """Without any key in `scopes`, every request belongs to the first scope."""
        self._digests = [(digest, scope) for scope in scopes.values() for digest in scope.key_digests]
        self._anonymous = None if self._digests else next(iter(scopes.values()))

    def scope_of(self, authorization: str | None) -> ScopeConfig:
        """Return the scope of a request.

        Args:
            authorization: The `Authorization` header's value, `Bearer KEY`.

        Raises:
            AuthenticationError: Keys are in use and this is none.
        """
        if self._anonymous is not None:
            return self._anonymous
        kind, _, key = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise AuthenticationError("no API key; send the header 'Authorization: Bearer KEY'")
        digest, found = key_digest(key.strip()), None
        # All of them, whether found or not: where the loop ends must not show in the time it takes.
        for known, scope in self._digests:
            if hmac.compare_digest(known, digest):
                found = scope
        if found is None:
            raise AuthenticationError("this API key is not known; check it, or ask the server's operator for one")
        return found
