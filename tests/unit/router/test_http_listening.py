"""Where the server listens and who may call it: Unix socket, TLS, IPv6, other origins, the client's own deadline."""

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from twopool.protocol.config import RouterConfig
from twopool.protocol.errors import ConfigError
from twopool.router.model_info import ModelInfo
from twopool.router.server import listen
from twopool_testing.fake_dispatcher import FakeDispatcher
from twopool_testing.http_server import running_server, sse_events

BODY = {"prompt": "hi", "max_tokens": 3, "stream": True}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


def answering() -> FakeDispatcher:
    return FakeDispatcher(lambda request, choice: [60, 61])


async def test_a_unix_socket(tiny_model: ModelInfo, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    async with running_server(tiny_model, answering(), uds=path):
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            assert sse_events((await client.post("/v1/completions", json=BODY)).text)[-1] == "[DONE]"
        with pytest.raises(ConfigError, match="--uds"):
            listen(RouterConfig(uds=path))
    assert not path.exists()


def test_a_dead_socket_file_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    listen(RouterConfig(uds=path)).close()
    assert path.exists()
    listen(RouterConfig(uds=path)).close()
    precious = tmp_path / "precious"
    precious.write_text("x")
    with pytest.raises(ConfigError, match="--uds"):
        listen(RouterConfig(uds=precious))
    assert precious.read_text() == "x"


async def test_tls(tiny_model: ModelInfo, certificate: tuple[Path, Path]) -> None:
    """Whole answers and streams; a client that speaks plain HTTP gets nothing."""
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    async with running_server(tiny_model, answering(), ssl_certfile=cert, ssl_keyfile=key) as server:
        url = f"https://127.0.0.1:{server.server.port}/v1/completions"
        assert server.server.url.startswith("https://")
        async with httpx.AsyncClient(verify=context) as client:
            whole = (await client.post(url, json=BODY | {"stream": False})).json()["choices"][0]["text"]
            events = sse_events((await client.post(url, json=BODY)).text)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole != ""
        with pytest.raises(httpx.TransportError):
            await server.complete()


def test_a_wrong_certificate_is_refused_in_words(tiny_model: ModelInfo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both or neither"):
        RouterConfig(ssl_certfile=tmp_path)


async def test_a_file_that_is_no_certificate(tiny_model: ModelInfo, tmp_path: Path) -> None:
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        async with running_server(tiny_model, answering(), ssl_certfile=wrong, ssl_keyfile=wrong):
            pass


async def test_ipv6(tiny_model: ModelInfo) -> None:
    async with running_server(tiny_model, answering(), host="::1") as server:
        assert server.server.url == f"http://[::1]:{server.server.port}"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.server.url}/health")).status_code == 200


async def test_pages_of_allowed_origins_may_call(tiny_model: ModelInfo) -> None:
    origin = "https://app.example"
    ask = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with running_server(tiny_model, answering(), keys=["k"], cors_allow_origins=(origin,)) as server:
        preflight = await server.client.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        response = await server.post("/v1/completions", BODY, origin=origin, authorization="Bearer k")
        assert response.headers["access-control-allow-origin"] == origin
        assert sse_events(response.text)[-1] == "[DONE]"
        refused = await server.post("/v1/completions", BODY, origin=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        stranger = await server.client.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


async def test_the_clients_own_deadline(tiny_model: ModelInfo) -> None:
    dispatcher = answering()
    async with running_server(tiny_model, dispatcher, request_timeout_s=50.0) as server:
        for given in ("7.5", "1000"):
            await server.post("/v1/completions", {"prompt": "hi"}, **{"x-request-timeout": given})
        assert [fake.routed.timeout_s for fake in dispatcher.requests] == [7.5, 50.0]
        for wrong in ("0", "-1", "nan", "inf", "soon"):
            response = await server.post("/v1/completions", {"prompt": "hi"}, **{"x-request-timeout": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Timeout")
