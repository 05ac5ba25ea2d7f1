# SPDX-License-Identifier: Apache-2.0
"""Requests made up by schemathesis from the served OpenAPI description: no 500, answers as promised."""

import pytest
from hypothesis import HealthCheck, settings
from tests.server.conftest import two_scopes

from fixtures.fake_engine import FakeEngine
from lazyattention.server.app import create_app
from lazyattention.server.config import ServerConfig

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra 'dev'")

checks = pytest.importorskip("schemathesis.specs.openapi.checks")
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeEngine(), ServerConfig(max_deadline_s=5)))


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_input_gives_a_500_and_answers_fit_the_description(case):
    # Rules between fields (best_of equals n, top_logprobs needs logprobs) cannot be said in a schema; nor can that
    # /v1/documents/x/pin is also GET-able, as the document of the id "x/pin".
    excluded = [checks.positive_data_acceptance, checks.allow_header_conformance]
    case.call_and_validate(excluded_checks=excluded)


def test_keys_are_part_of_the_description():
    described = create_app(FakeEngine(), ServerConfig(scopes=two_scopes())).openapi()
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert described["paths"]["/v1/models"]["get"]["security"]
    assert "security" not in described["paths"]["/health"]["get"]
    assert "422" not in described["paths"]["/v1/chat/completions"]["post"]["responses"]
