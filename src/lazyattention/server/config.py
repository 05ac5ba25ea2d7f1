# SPDX-License-Identifier: Apache-2.0
"""Options of the server: who may use it, how much, and how it ends. The key file's format is in docs/http_api.md."""

import hashlib
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lazyattention.errors import ConfigError

DEFAULT_SCOPE = "default"
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeConfig:
    """One tenant: its keys, what it may do and how much.

    Attributes:
        name: Used in logs and metrics; part of every stored chunk's key.
        key_digests: SHA-256 of each API key. Empty: the scope of requests without a key.
        reads: Scopes whose uploaded documents may be used by id and listed, but not changed.
        is_operator: May read /metrics and see all scopes there.
        max_body_bytes: Largest request body.
        max_documents: Most documents in one request.
        max_concurrent_requests: Requests that run or wait at the same time.
        max_requests_per_minute: None = no limit.
        max_stored_bytes: Text of uploaded documents that is kept.
        max_pinned_bytes: KV that may be pinned. None = where there are several scopes an equal part of the pool, one part
            left over for all; no limit where there is one.
    """

    name: str = DEFAULT_SCOPE
    key_digests: tuple[bytes, ...] = ()
    reads: tuple[str, ...] = ()
    is_operator: bool = False
    max_body_bytes: int = 32 * _MIB
    max_documents: int = 2000
    max_concurrent_requests: int = 512
    max_requests_per_minute: int | None = None
    max_stored_bytes: int = 256 * _MIB
    max_pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"scope name {self.name!r} must be a non-empty printable string")
        if not isinstance(self.is_operator, bool):
            raise ConfigError(f"is_operator of scope {self.name!r} must be true or false, without quotes")
        for name in ("max_body_bytes", "max_documents", "max_concurrent_requests", "max_stored_bytes"):
            _check_positive_int(f"{name} of scope {self.name!r}", getattr(self, name))
        for name in ("max_requests_per_minute", "max_pinned_bytes"):
            if getattr(self, name) is not None:
                _check_positive_int(f"{name} of scope {self.name!r}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the server listens, admits and ends.

    Attributes:
        model_name: The name clients use; None = the engine's.
        host: Address to listen on.
        port: Port to listen on; 0 = a free one.
        scopes: By name. Without keys there is one, named "default".
        allow_anonymous: Listen beyond this machine without keys.
        max_running: Requests inside the engine at the same time; the others wait here, fairly between scopes. None = as
            many as the engine runs together, so that none waits inside it, where there are no scopes.
        max_waiting: Waiting requests, all scopes together; more are refused with 429.
        max_deadline_s: Longest time a request may take; also the default.
        header_timeout_s: A connection that has not sent its headers by then is closed.
        body_timeout_s: A request whose body has not arrived by then is refused.
        shutdown_grace_s: On shutdown, running streams may go on for so long; then they end with an error event.
        cors_origins: Origins whose pages may call the API; none by default.
        tls_cert_file: Certificate chain (PEM); with `tls_key_file` the server speaks HTTPS only.
        tls_key_file: Private key (PEM).
        playground: Serve the page at `/`.
    """

    model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    scopes: Mapping[str, ScopeConfig] = field(default_factory=lambda: {DEFAULT_SCOPE: ScopeConfig(is_operator=True)})
    allow_anonymous: bool = False
    max_running: int | None = None
    max_waiting: int = 1024
    max_deadline_s: float = 600.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    shutdown_grace_s: float = 20.0
    cors_origins: tuple[str, ...] = ()
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    playground: bool = True

    def __post_init__(self) -> None:
        _check_positive_int("max_waiting", self.max_waiting)
        if self.max_running is not None:
            _check_positive_int("max_running", self.max_running)
        for name in ("max_deadline_s", "header_timeout_s", "body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be a positive number of seconds")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"cors origin {origin!r} must be of the form https://host or https://host:port, or *")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("tls_cert_file and tls_key_file go together; give both or none")
        for scope in self.scopes.values():
            for read in scope.reads:
                if read not in self.scopes or read == scope.name:
                    raise ConfigError(f"scope {scope.name!r} reads {read!r}, which is no other scope of the key file")
        digests = [digest for scope in self.scopes.values() for digest in scope.key_digests]
        if len(digests) != len(set(digests)):
            raise ConfigError("two scopes have the same API key; each key belongs to one scope")
        if not self.has_keys and not self.allow_anonymous and not _is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines but no API keys are set; "
                "give a key file, set LAZYATTENTION_API_KEYS, or pass --allow-anonymous"
            )

    @property
    def has_keys(self) -> bool:
        """Requests need an API key."""
        return any(scope.key_digests for scope in self.scopes.values())


def key_digest(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def scopes_from_file(path: Path) -> dict[str, ScopeConfig]:
    """Read scopes and keys from a TOML file.

    Raises:
        ConfigError: The file cannot be read, or an entry is unknown or wrong.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
    tables = content.pop("scopes", None)
    if content or not isinstance(tables, dict) or not tables:
        raise ConfigError(f"key file {path} must hold tables [scopes.NAME] and nothing else; see docs/http_api.md")
    return {name: _scope_from_table(name, table, path) for name, table in tables.items()}


def scopes_from_text(text: str) -> dict[str, ScopeConfig]:
    """Read `scope:key,scope:key` (the environment variable's form); a scope may stand several times.

    Raises:
        ConfigError: An entry has another form. The message does not repeat it: it may be a key.
    """
    keys: dict[str, list[str]] = {}
    for number, entry in enumerate(text.split(","), 1):
        name, colon, key = entry.strip().partition(":")
        if not name or not colon or not key:
            raise ConfigError(f"LAZYATTENTION_API_KEYS: entry {number} is not of the form scope:key")
        keys.setdefault(name, []).append(key)
    return {
        name: ScopeConfig(name=name, key_digests=tuple(map(key_digest, values)), is_operator=len(keys) == 1)
        for name, values in keys.items()
    }


def _scope_from_table(name: str, table: object, path: Path) -> ScopeConfig:
    if not isinstance(table, dict):
        raise ConfigError(f"key file {path}: scopes.{name} must be a table")
    options: dict[str, Any] = dict(table)
    keys = _string_list(name, "keys", options.pop("keys", []))
    if any(key != key.strip() for key in keys):
        raise ConfigError(f"key file {path}: a key of scope {name!r} begins or ends with white space; remove it")
    digests = [key_digest(key) for key in keys]
    for text in _string_list(name, "key_sha256", options.pop("key_sha256", [])):
        try:
            digests.append(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(f"key file {path}: a key_sha256 of scope {name!r} is not hexadecimal") from None
    if not digests or any(len(digest) != hashlib.sha256().digest_size for digest in digests):
        raise ConfigError(f"key file {path}: scope {name!r} needs keys or key_sha256 (64 hexadecimal digits each)")
    allowed = {f.name for f in fields(ScopeConfig)} - {"name", "key_digests"}
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise ConfigError(
            f"key file {path}: scope {name!r} has unknown {unknown}; allowed: keys, key_sha256, {sorted(allowed)}"
        )
    options["reads"] = tuple(_string_list(name, "reads", options.get("reads", [])))
    return ScopeConfig(name=name, key_digests=tuple(digests), **options)


def _string_list(scope: str, name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name} of scope {scope!r} must be a list of non-empty strings")
    return value


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, must be a whole number of at least 1")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
