"""schemathesis sends what the OpenAPI document allows, and some of what it does not, to a router process."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from twopool.router import openapi
from twopool.scripts.bench_router_model import build_model
from twopool_testing.cluster import Process, wait_for

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

EXAMPLES = 12
"""For each of the document's operations."""

CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a router whose workers answer anything at once, 64 tokens at most."""
    import httpx

    folder = tmp_path_factory.mktemp("openapi")
    model = build_model(folder / "model")
    command = ["router", "--model", str(model), "--served-model-name", "m", "--port", "0", "--control-port", "0"]
    router = Process([*command, "--max-model-len", "64"], folder / "router.log")
    try:
        announced = router.wait_announced()
        module = [sys.executable, "-P", "-m", "twopool.scripts.bench_router_workers", "--model", str(model)]
        workers = subprocess.Popen([*module, "--router", announced["control"]], stdin=subprocess.PIPE)
        try:
            wait_for(lambda: httpx.get(announced["http"] + "/ready").status_code == 200, 20, "/ready")
            yield schemathesis.openapi.from_url(announced["http"] + "/openapi.json")
            assert router.is_running()
            assert "Traceback" not in router.log_text()
        finally:
            workers.kill()
            workers.communicate()
    finally:
        router.kill()


OPERATIONS = [(method, path) for path, methods in openapi.document()["paths"].items() for method in methods]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_document_holds(document: Any, method: str, path: str) -> None:
    """No 5xx, no status or content type it does not name, no body of another shape."""
    operation = document[path][method]

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=20)

    check()
