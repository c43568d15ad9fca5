"""F11 on a GPU: a kernel in the engine's own process writes to address 0. The agent leaves within a second and can start anew
at once; its neighbour serves on.

Agents are deterministic: a step that is padded further may round otherwise, and graphs come one by one after the start.
PYTHONPATH=. python tests/gpu/check_sticky.py MODEL      exit 1 when a check is off. No GPU is reset.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.cell import CellProcess
from tests.faults.injection import Injection

from dragoman import AsyncClient, DragomanError

MAX_EXIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 20
NUM_TOKENS = 400
MIN_KV_SHARE = 0.97


def start(model: str, *, injection: Injection | None = None) -> tuple[CellProcess, str, int]:
    """An agent with a quarter of the card that is free, its address, and the tokens that its KV blocks hold."""
    environ = {}
    if injection is not None:
        wanted = ("PYTHONPATH", "FAULT_TRIGGER")
        environ = {name: injection.environ[name] for name in wanted} | {"FAULT_DEVICE": "cuda"}
    agent = CellProcess(
        "dragoman_agent.main", "--device", "cuda", "--model", model, "--memory-utilization", "0.25", "--deterministic", "--open",
        "--port", "0", "--metrics-port", "0", environ=environ,
    )  # fmt: skip
    address = agent.wait_for("serving")["grpc"]
    return agent, address, agent.wait_for("ready")["info"]["kv_tokens"]


def state_of(pid: int) -> str:
    """What a process that should have ended does, by the kernel."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        name, state = (next(line for line in lines if line.startswith(word)) for word in ("Name", "State"))
        return f"{name}, {state}, {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError as error:
        return str(error)


async def fault(sick: CellProcess, address: str, neighbour: str, trigger: Path) -> dict[str, Any]:
    """What was seen while the sick agent's context broke."""
    seen: dict[str, Any] = {}
    ended: list[float] = []

    def note_end() -> None:
        seen["exit_code"] = sick.popen.wait()
        ended.append(time.monotonic())

    # From beside: the client tries to resume before it gives the stream up, which takes longer than the agent's end.
    watching = threading.Thread(target=note_end, daemon=True)
    watching.start()
    async with AsyncClient(agent=address) as client, AsyncClient(agent=neighbour) as other:
        calm = await other.complete("The sea", max_output_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        beside = asyncio.create_task(
            other.complete("The sea", max_output_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        )
        broken = 0.0
        try:
            async for token in client.generate("Once", max_output_tokens=20_000, ignore_eos=True, temperature=0.0):
                if token.cursor >= 20 and not broken:
                    broken = time.monotonic()
                    await asyncio.to_thread(trigger.write_text, "sticky")
        except DragomanError as error:
            seen["error"], seen["message"] = error.reason_name, str(error)
        family = [process.pid for process in sick.family()] if sick.popen.poll() is None else []
        await asyncio.to_thread(watching.join, MAX_WAIT_SECONDS)
        if not ended:
            seen["still_there"] = {pid: state_of(pid) for pid in family}
        seen["was_broken"], seen["exit_seconds"] = bool(broken), (ended[0] if ended else time.monotonic()) - broken
        seen["neighbour_equal"] = (await beside).text == calm.text
    seen["log"] = [line for line in sick.log_text().splitlines() if "device failed" in line or "CUDA error" in line][:2]
    seen["end_of_log"] = sick.log_text().splitlines()[-8:]
    return seen


def main(argv: list[str]) -> int:
    """Entry point."""
    if len(argv) != 1:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        injection = Injection(Path(folder))
        sick, address, _ = start(argv[0], injection=injection)
        healthy, neighbour, kv_tokens = start(argv[0])
        try:
            seen = asyncio.run(fault(sick, address, neighbour, injection.trigger))
            # At once, beside the same neighbour: what the killed engine held is free again by then.
            again, _, seen["kv_tokens_again"] = start(argv[0])
            again.close()
        finally:
            sick.close()
            healthy.close()
    seen["kv_tokens"] = kv_tokens
    print(json.dumps(seen, indent=1))
    good = (
        seen.get("exit_code") == 1
        and seen["exit_seconds"] <= MAX_EXIT_SECONDS
        and seen["neighbour_equal"]
        and seen.get("error") in ("device_fault", "agent_lost")
        and seen["log"]
        and seen["kv_tokens_again"] >= MIN_KV_SHARE * kv_tokens
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
