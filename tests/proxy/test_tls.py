"""HTTPS between the processes of a run: only clients that trust the authority reach a server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tls_files import made_tls_files

from areal_agents.direct_http import direct_client
from areal_agents.errors import ConfigError, EngineUnavailable
from areal_agents.inference.engine_process import ServerProcess
from areal_agents.launch.ready import wait_until_ready
from areal_agents.proxy.server import build_server
from areal_agents.sockets import listen, url_of
from areal_agents.tls import TlsConfig, check_certificate, trusting


class Elsewhere(ServerProcess):
    """A server that is running already."""

    def __init__(self, url: str) -> None:
        super().__init__("the server", log_path=None, start_timeout_s=600, stop_timeout_s=1)
        self.url = url

    @property
    def alive(self) -> bool:
        return True


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for _ in range(2):
            await send({"type": (await receive())["type"] + ".complete"})
        return
    await PlainTextResponse(scope["scheme"])(scope, receive, send)


def test_a_server_is_verified_by_the_authority_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, other = made_tls_files(tmp_path / "tls"), made_tls_files(tmp_path / "other")
    elsewhere = made_tls_files(tmp_path / "elsewhere", names="IP:10.0.0.11")
    of_user = made_tls_files(tmp_path / "user").authority
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", of_user)
    server = build_server(app, tls=tls)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            url = url_of(listener, "https")
            with trusting(tls), direct_client(timeout_s=20) as client:
                assert client.get(url).text == "https"
                bundle = Path(os.environ["SSL_CERT_FILE"])
                assert os.environ["REQUESTS_CA_BUNDLE"] == os.environ["NODE_EXTRA_CA_CERTS"] == str(bundle)
                trusted = bundle.read_text()
                assert Path(of_user).read_text() in trusted, "and so are those that the user trusts"
                assert trusted.count("BEGIN CERTIFICATE") > 100, "and those of the machine"
            assert os.environ["NODE_EXTRA_CA_CERTS"] == of_user and not bundle.exists()
            for foreign in (None, other, elsewhere):
                with (
                    trusting(foreign),
                    direct_client(timeout_s=20) as client,
                    pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
                ):
                    client.get(url)
                with trusting(foreign), pytest.raises(ConfigError, match="no valid certificate"):
                    wait_until_ready(url)
            with trusting(other), pytest.raises(EngineUnavailable, match="no valid certificate"):
                Elsewhere(url).wait_ready()  # fails at once, long before start_timeout_s
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def test_a_certificate_is_checked_for_the_address_of_its_server(tmp_path: Path) -> None:
    names = "DNS:*.run-engine.training.svc,DNS:localhost,IP:10.0.0.11"
    tls, other = made_tls_files(tmp_path / "tls", names=names), made_tls_files(tmp_path / "other")
    for host in (
        "run-engine-0.run-engine.training.svc",
        "run-engine-11.run-engine.training.svc",
        "10.0.0.11",
    ):
        check_certificate(tls, host)

    def refusal(host: str, tls: TlsConfig = tls) -> str:
        with pytest.raises(ConfigError) as raised:
            check_certificate(tls, host)
        return str(raised.value)

    for host in ("run-proxy-0.run-proxy.training.svc", "run-engine-0.run-engine.other.svc", "10.0.0.12"):
        message = refusal(host)
        assert f"{tls.certificate} is not valid for {host}, where" in message
        assert message.endswith("it is for *.run-engine.training.svc, localhost, 10.0.0.11")
    foreign = refusal("localhost", tls.model_copy(update={"authority": other.authority}))
    assert "unable to get local issuer certificate" in foreign and "it is for" not in foreign


def test_a_process_that_serves_nothing_needs_only_the_authority(tmp_path: Path) -> None:
    tls = made_tls_files(tmp_path / "tls").model_copy(update={"key": str(tmp_path / "none.key")})
    with trusting(tls, serves=False):
        assert os.environ["SSL_CERT_FILE"]
    with pytest.raises(ConfigError, match=r"none\.key"), trusting(tls):
        pass


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    tls, other = made_tls_files(tmp_path / "tls"), made_tls_files(tmp_path / "other")

    def refusal(**changed: str) -> str:
        with pytest.raises(ConfigError) as raised, trusting(tls.model_copy(update=changed)):
            pass
        return str(raised.value)

    assert "the certificate" in refusal(key=other.key)
    locked = str(tmp_path / "locked.key")
    command = ["openssl", "rsa", "-in", tls.key, "-aes128", "-passout", "pass:word", "-out", locked]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert locked in refusal(key=locked)
    assert str(tmp_path / "none.pem") in refusal(certificate=str(tmp_path / "none.pem"))
    assert "cluster.tls.authority" in refusal(authority=str(tmp_path / "none.pem"))
