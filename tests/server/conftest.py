# SPDX-License-Identifier: Apache-2.0
import httpx
import pytest

from fixtures.fake_engine import FakeEngine
from lazyattention.server.app import create_app
from lazyattention.server.config import ScopeConfig, ServerConfig, key_digest


@pytest.fixture
def engine():
    return FakeEngine()


def client_of(engine, **options):
    """An HTTP client of an app around `engine`, without a network between."""
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig(**options)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)


@pytest.fixture
async def client(engine):
    async with client_of(engine) as client:
        yield client


def two_scopes(**more):
    """Two tenants and a shared corpus; keys "key-a", "key-b", "key-shared", "key-operator"."""
    options = {"reads": ("shared",), **more}
    return {
        "a": ScopeConfig(name="a", key_digests=(key_digest("key-a"),), **options),
        "b": ScopeConfig(name="b", key_digests=(key_digest("key-b"),), **options),
        "shared": ScopeConfig(name="shared", key_digests=(key_digest("key-shared"),)),
        "operator": ScopeConfig(name="operator", key_digests=(key_digest("key-operator"),), is_operator=True),
    }


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def chat_body(text="Why?", **more):
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


@pytest.fixture
def anyio_backend():
    return "asyncio"
