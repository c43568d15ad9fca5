"""Mutual TLS: nobody without a certificate, an agent only under the name in its own, and clear words for what is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.controller.authority import Authority

from dragoman import AsyncClient, DragomanError
from dragoman.errors import from_rpc_error
from dragoman.tls import read_tls
from dragoman.v1 import agent_registry_service_pb2, agent_registry_service_pb2_grpc, error_pb2
from dragoman_controller.config import ControllerSettings
from dragoman_controller.server import ControllerServer, StartupError

ADDRESS = "127.0.0.1"


@pytest.fixture(scope="module")
def authority() -> Authority:
    """The cell's own authority."""
    return Authority.named("cell")


def tls_settings(authority: Authority, folder: Path, **fields: Any) -> ControllerSettings:
    authority.write(folder, ADDRESS)
    files: dict[str, Any] = {
        "tls_certificate": folder / "certificate",
        "tls_key": folder / "key",
        "tls_client_ca": folder / "ca",
    }
    return ControllerSettings(host="0.0.0.0", port=0, metrics_port=0, **{**files, **fields})


@pytest.fixture
async def tls_server(authority: Authority, tmp_path: Path) -> AsyncIterator[ControllerServer]:
    """A controller under TLS that listens on every address."""
    server = ControllerServer(tls_settings(authority, tmp_path / "controller"))
    await server.start()
    yield server
    await server.stop()


def dial(server: ControllerServer, authority: Authority, pair: tuple[bytes, bytes] | None) -> Any:
    certificate, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
    channel = grpc.aio.secure_channel(f"{ADDRESS}:{server.port}", credentials)
    return channel, agent_registry_service_pb2_grpc.AgentRegistryServiceStub(channel)


async def reason_of(call: Any) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_an_agent_registers_under_the_name_in_its_certificate_alone(
    tls_server: ControllerServer, authority: Authority, agent_messages: Any
) -> None:
    channel, registry = dial(tls_server, authority, authority.issue("agent-a"))
    async with channel:
        request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
        assert (await registry.RegisterAgent(request, timeout=5)).lease_id
        other = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-b"), epoch=1)
        error = await reason_of(registry.RegisterAgent(other, timeout=5))
    assert error.reason == error_pb2.ERROR_REASON_PERMISSION_DENIED and "agent-a" in error.message


async def test_a_stolen_lease_and_a_certificate_without_a_name_are_of_no_use(
    tls_server: ControllerServer, authority: Authority, agent_messages: Any
) -> None:
    channel, registry = dial(tls_server, authority, authority.issue("agent-a"))
    async with channel:
        request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
        lease = (await registry.RegisterAgent(request, timeout=5)).lease_id
    for pair in (authority.issue("agent-b"), authority.issue()):
        channel, registry = dial(tls_server, authority, pair)
        async with channel:
            beat = agent_registry_service_pb2.HeartbeatRequest(lease_id=lease, epoch=1, state=2)  # type: ignore[arg-type]
            error = await reason_of(registry.Heartbeat(iter([beat]), timeout=5).read())
            assert error.reason == error_pb2.ERROR_REASON_PERMISSION_DENIED
            events = agent_registry_service_pb2.PublishKvEventsRequest(lease_id=lease, epoch=1, sequence=1)
            error = await reason_of(registry.PublishKvEvents(iter([events]), timeout=5).read())
            assert error.reason == error_pb2.ERROR_REASON_PERMISSION_DENIED
            request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
            error = await reason_of(registry.RegisterAgent(request, timeout=5))
            assert error.reason == error_pb2.ERROR_REASON_PERMISSION_DENIED


@pytest.mark.parametrize("who", ["nobody", "of another authority", "expired"])
async def test_who_has_no_good_certificate_does_not_get_in(
    who: str, tls_server: ControllerServer, authority: Authority, agent_messages: Any
) -> None:
    pair = {
        "nobody": None,
        "of another authority": Authority.named("other").issue("agent-a"),
        "expired": authority.issue("agent-a", expired=True),
    }[who]
    channel, registry = dial(tls_server, authority, pair)
    async with channel:
        request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await registry.RegisterAgent(request, timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(tls_server.cell.fleet) == 0


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder, authority: (folder / "key").unlink(), "--tls-key .* cannot be read: No such file"),
        (
            lambda folder, authority: (folder / "key").write_bytes(authority.issue("x")[1]),
            "--tls-key .* is not the key of --tls-certificate",
        ),
        (lambda folder, authority: (folder / "certificate").write_text("hello"), "are not a certificate and its key"),
        (lambda folder, authority: (folder / "ca").write_text("hello"), "--tls-client-ca .* holds no certificate"),
        (lambda folder, authority: authority.write(folder, ADDRESS, expired=True), "certificate has expired"),
    ],
)
def test_files_that_cannot_be_used_are_named_at_the_start(
    spoil: Callable[[Path, Authority], object], expected: str, authority: Authority, tmp_path: Path
) -> None:
    settings = tls_settings(authority, tmp_path)
    spoil(tmp_path, authority)
    with pytest.raises(StartupError, match=expected) as raised:
        ControllerServer(settings)
    assert "PRIVATE KEY" not in str(raised.value)


def test_two_of_three_files_are_too_few_and_an_identity_does_not_show_its_key(
    authority: Authority, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match="all three"):
        ControllerServer(tls_settings(authority, tmp_path, tls_key=None))
    identity = read_tls(tmp_path / "certificate", tmp_path / "key", tmp_path / "ca")
    assert identity is not None and identity.names == (ADDRESS,)
    assert repr(identity) == f"TlsIdentity(names=('{ADDRESS}',))"


async def ended(program: str, *flags: str) -> tuple[int | None, str]:
    """Exit code and stderr of a process that is to end by itself."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", f"from {program} import main; main()", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, stderr.decode()


async def test_an_agent_does_not_start_with_a_certificate_for_another_name(
    authority: Authority, tmp_path: Path
) -> None:
    code, text = await ended(
        "dragoman_agent.main", "--device", "null", "--agent-id", "agent-a", "--controllers", "127.0.0.1:1",
        "--port", "0", "--metrics-port", "0", *authority.write(tmp_path, "agent-b"),
    )  # fmt: skip
    assert code == 2 and "is for agent-b, and not for agent 'agent-a'" in text and "Traceback" not in text


class Process:
    """A process of the cell that announces its life."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of this name."""
        assert self.process.stdout is not None
        while True:
            line = await asyncio.wait_for(self.process.stdout.readline(), 30)
            assert line, f"it ended: {self.log.read_text()}"
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts processes of the cell."""
    processes: list[Process] = []

    async def one(program: str, *flags: str) -> Process:
        log = tmp_path / f"log-{len(processes)}"
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", f"from {program} import main; main()", *flags, "--announce",
                stdout=asyncio.subprocess.PIPE, stderr=file,
            )  # fmt: skip
        processes.append(Process(process, log))
        return processes[-1]

    yield one
    for each in processes:
        if each.process.returncode is None:
            each.process.terminate()
        await asyncio.wait_for(each.process.wait(), 20)


async def start_agent(start: Start, server: ControllerServer, authority: Authority, folder: Path) -> Process:
    agent: Process = await start(
        "dragoman_agent.main", "--device", "null", "--port", "0", "--metrics-port", "0", "--agent-id", "agent-a",
        "--controllers", f"{ADDRESS}:{server.port}", "--drain-notice", "0", *authority.write(folder, "agent-a"),
    )  # fmt: skip
    await agent.event("ready")
    return agent


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def get(url: str) -> tuple[int, Any]:
    """Status and JSON of a GET or, with a body, of a POST."""
    request = urllib.request.Request(
        url, json.dumps({"prompt": "abc", "max_tokens": 4}).encode() if "completions" in url else None,
        {"content-type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def test_a_whole_cell_speaks_tls_and_strangers_are_told_why_not(
    tls_server: ControllerServer, authority: Authority, tmp_path: Path, start: Start
) -> None:
    agent = await start_agent(start, tls_server, authority, tmp_path / "agent")
    await until(lambda: any(member.state.label == "serving" for member in tls_server.cell.fleet))
    controller = f"{ADDRESS}:{tls_server.port}"
    authority.write(tmp_path / "client", "client")
    identity = read_tls(*(tmp_path / "client" / name for name in ("certificate", "key", "ca")))
    assert identity is not None
    async with AsyncClient(controller, credentials=identity.channel_credentials()) as client:
        result = await client.complete("abc", max_output_tokens=5, ignore_eos=True)
        assert result.usage.output_tokens == 5 and result.agent_id == "agent-a"
        assert await client.tokenize("abc")
    gateway: Process = await start(
        "dragoman_gateway.main", "--port", "0", "--controller", controller, *authority.write(tmp_path / "gw", "gateway")
    )
    url = "http://" + (await gateway.event("serving"))["http"]
    await until(lambda: get(f"{url}/ready")[0] == 200)
    status, answer = await asyncio.to_thread(get, f"{url}/v1/completions")
    assert status == 200 and answer["usage"]["completion_tokens"] == 4
    other = Authority.named("other")
    stranger: Process = await start(
        "dragoman_gateway.main", "--port", "0", "--controller", controller, *other.write(tmp_path / "sgw", "gateway")
    )
    await stranger.event("serving")
    await until(lambda: "authority that is not trusted here" in stranger.log.read_text())
    for credentials, expected in (
        (None, "closed the connection before the first answer"),
        (
            grpc.ssl_channel_credentials(other.certificate, *reversed(other.issue("client"))),
            "authority that is not trusted",
        ),
        (
            grpc.ssl_channel_credentials(authority.certificate, *reversed(other.issue("client"))),
            "closed the connection",
        ),
    ):
        async with AsyncClient(controller, credentials=credentials) as client:
            with pytest.raises(DragomanError, match=expected):
                await client.complete("abc", max_output_tokens=5)
    # Nobody answers for agent-a but who has its certificate.
    member = tls_server.cell.fleet.get("agent-a")
    assert member is not None
    async with AsyncClient(controller, credentials=identity.channel_credentials()) as client:
        channel = client._channels.get(member.spec.data_address, "agent-b")
        with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification Check failed"):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    secrets = [
        (tmp_path / name / "key").read_text().splitlines()[1] for name in ("agent", "gw", "controller", "client")
    ]
    keys = [key.hex() for _, key in tls_server.cell.minter.agent_keys("agent-a", member.epoch)]
    shown = agent.log.read_text() + gateway.log.read_text() + repr(tls_server.cell.minter) + repr(identity)
    shown += await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/metrics").read().decode())
    assert not [secret for secret in (*secrets, *keys) if secret in shown]


async def test_an_agent_whose_controller_cannot_be_believed_says_so_once_and_goes_on_trying(
    tls_server: ControllerServer, tmp_path: Path, start: Start
) -> None:
    agent = await start_agent(start, tls_server, Authority.named("other"), tmp_path / "agent")
    await until(lambda: "authority that is not trusted here" in agent.log.read_text())
    await asyncio.sleep(0.5)
    assert agent.log.read_text().count("authority that is not trusted here") == 1
    assert len(tls_server.cell.fleet) == 0 and agent.process.returncode is None
