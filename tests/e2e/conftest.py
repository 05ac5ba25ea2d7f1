# SPDX-License-Identifier: Apache-2.0
import pytest

from fixtures.fake_engine import TOOL_TEMPLATE
from fixtures.live_server import live_server, running_engine
from fixtures.tiny_models import tiny_model
from fixtures.tiny_tokenizer import tiny_tokenizer
from lazyattention.config import CacheConfig, EngineConfig
from lazyattention.models.loaded_model import wrap_model


@pytest.fixture(scope="session")
def loaded():
    """A tiny random Llama with room for long prompts and a template that takes tools."""
    tokenizer = tiny_tokenizer(with_chat_template=False)
    tokenizer.chat_template = TOOL_TEMPLATE
    model = tiny_model(max_position_embeddings=16384, num_hidden_layers=2)
    return wrap_model(model, tokenizer, name="tiny")


@pytest.fixture
def engine(loaded):
    with running_engine(loaded, EngineConfig(cache=CacheConfig(num_blocks=2000))) as engine:
        yield engine


@pytest.fixture
def server(engine):
    with live_server(engine) as server:
        yield server


@pytest.fixture
def anyio_backend():
    return "asyncio"
