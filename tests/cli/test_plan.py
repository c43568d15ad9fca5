"""`dragoman plan`: what fits where, in words and numbers, on a machine without a GPU and without importing torch."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Dragoman, assert_error

from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.profile import Value

SMALL = ("--profile", "rtx4060-laptop", "--model", "qwen3-0.6b")


def body(dragoman: Dragoman, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = dragoman("plan", *arguments, "--json")
    assert done.returncode == code, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_plan_is_told_with_its_memory_and_speed(dragoman: Dragoman) -> None:
    done = dragoman("plan", *SMALL, "--context", "4k", "--concurrency", "8")
    assert done.returncode == 0, done.stderr
    for part in (
        "qwen3-0.6b on NVIDIA GeForce RTX 4060 Laptop GPU",
        "the library's rtx4060-laptop",
        "spec values",
        "page_size",
        "memory budget",
        "weights",
        "kv",
        "workspace",
        "margin",
        "TTFT",
        "TPOT",
        "tokens/s",
    ):
        assert part in done.stdout, done.stdout


def test_names_longer_than_a_file_can_have(dragoman: Dragoman) -> None:
    assert_error(dragoman("plan", "--model", "x" * 300, "--profile", "l4"), "there is no model 'xxx")
    assert_error(dragoman("plan", "--model", "qwen3-0.6b", "--profile", "x" * 300), "there is no profile 'xxx")


def test_no_torch_is_needed() -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom dragoman_cli.main import main\nmain(sys.argv[1:])"
    for arguments in (("plan", *SMALL), ("explain", *SMALL, "--why", "road"), ("models", "ls")):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_json_holds_the_numbers(dragoman: Dragoman) -> None:
    told = body(dragoman, *SMALL, "--context", "4k", "--concurrency", "8")
    assert told["fits"] is True
    assert told["profile"]["name"] == "rtx4060-laptop"
    assert told["plan"]["max_num_seqs"] == 8
    assert told["plan"]["max_context_tokens"] == 4096
    assert {"weights", "kv", "workspace", "margin"} <= told["memory"].keys()
    free = load_library("rtx4060-laptop").number("memory.free")
    assert sum(told["memory"].values()) <= free
    alone, all_of_them = told["predicted"]
    assert (alone["concurrency"], all_of_them["concurrency"]) == (1, 8)
    assert all_of_them["num_running"] == 8
    # A card cannot be quicker than its memory: 1.2 GB of weights a token at 256 GB/s.
    assert alone["tpot_seconds"] > told["memory"]["weights"] / 256e9
    assert alone["tokens_per_second"] == pytest.approx(1 / alone["tpot_seconds"])
    subjects = {decision["subject"] for decision in told["decisions"]}
    assert {"profile", "road", "page-size", "kv-blocks", "step-model"} <= subjects


def test_what_does_not_fit_says_why_and_what_would(dragoman: Dragoman) -> None:
    done = dragoman("plan", "--profile", "rtx4060-laptop", "--model", "qwen3-8b")
    assert done.returncode == 1
    assert "qwen3-8b does not fit" in done.stdout
    assert "weights 15.3 GiB" in done.stdout or "15622 MiB" in done.stdout or "15.26 GiB" in done.stdout
    told = body(dragoman, "--profile", "rtx4060-laptop", "--model", "qwen3-8b", code=1)
    assert told["fits"] is False
    assert 1 <= len(told["changes"]) <= 3


def test_a_card_without_the_number_format_is_refused_as_an_agent_would(dragoman: Dragoman, tmp_path: Path) -> None:
    old = load_library("l4").with_values(
        {"compute.capability": Value("7.5", "", "spec"), "compute.dtypes": Value("float16 int8", "", "spec")}
    )
    (tmp_path / "old.json").write_text(old.to_json())
    told = body(dragoman, "--profile", str(tmp_path / "old.json"), "--model", "qwen3-0.6b", code=1)
    assert (
        told["problem"] == "qwen3-0.6b is computed in bfloat16, which needs compute capability 8.0; this card has 7.5"
    )
    assert (told["fits"], told["plan"]) == (False, {})


def test_a_load_that_does_not_fit_gets_three_changes_that_make_it_fit(dragoman: Dragoman) -> None:
    load = ("--context", "8k", "--concurrency", "64")
    done = dragoman("plan", *SMALL, *load)
    assert done.returncode == 1
    assert "It does not fit: 64 x 8,192 tokens need" in done.stdout
    changes = body(dragoman, *SMALL, *load, code=1)["changes"]
    assert len(changes) == 3
    fewer = next(change for change in changes if change.startswith("--concurrency "))
    shorter = next(change for change in changes if change.startswith("--context "))
    assert dragoman("plan", *SMALL, "--context", "8k", "--concurrency", fewer.split()[1]).returncode == 0
    assert dragoman("plan", *SMALL, "--context", shorter.split()[1], "--concurrency", "64").returncode == 0


def test_pal_off_is_another_plan(dragoman: Dragoman) -> None:
    on, off = body(dragoman, *SMALL), body(dragoman, *SMALL, "--pal", "off")
    part = body(dragoman, *SMALL, "--pal-launch-tuning", "off")
    assert len({on["digest"], off["digest"], part["digest"]}) == 3
    assert (off["plan"]["switches_off"], part["plan"]["switches_off"]) == ("pal", "launch_tuning")


def test_a_file_is_planned_from_like_the_library(dragoman: Dragoman, tmp_path: Path) -> None:
    slow = load_library("rtx4060-laptop").with_values({"memory.read_bandwidth": Value(1e10, "bytes/s", "measured")})
    (tmp_path / "mine.json").write_text(dataclasses.replace(slow, name="mine").to_json())
    told = body(dragoman, "--profile", str(tmp_path / "mine.json"), "--model", "qwen3-0.6b")
    assert told["profile"]["origin"] == f"the file {tmp_path / 'mine.json'}"
    assert told["predicted"][0]["tpot_seconds"] > body(dragoman, *SMALL)["predicted"][0]["tpot_seconds"]


def test_this_machine_is_planned_for_without_a_profile(dragoman: Dragoman) -> None:
    told = body(dragoman, "--model", "smollm2-135m")
    assert told["profile"]["origin"].startswith("this machine's")
    assert told["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "parts", "code"),
    [
        (("--model", "qwen3-0.5b"), ("no model 'qwen3-0.5b'; did you mean qwen3-0.6b?", "give a path, or one of"), 1),
        (("--model", "/no/such"), ("/no/such", "no such file"), 1),
        ((*SMALL, "--profile", "rtx4060"), ("no profile 'rtx4060'", "did you mean rtx4060-laptop?"), 1),
        ((*SMALL, "--profile", "/no/such.json"), ("/no/such.json", "No such file"), 1),
        ((*SMALL, "--context", "1M"), ("made for 40960 tokens",), 1),
        ((*SMALL, "--context", "long"), ("--context: 'long' is not a size in tokens",), 2),
        ((*SMALL, "--context", "1"), ("--context", "below the least allowed, 2"), 2),
        ((*SMALL, "--concurrency", "0"), ("--concurrency",), 2),
        ((*SMALL, "--pal", "of"), ("--pal: 'of' is not one of on, off",), 2),
        ((*SMALL, "--pal-arena", "no"), ("--pal-arena: 'no'",), 2),
        ((*SMALL, "--memory-utilization", "2"), ("--memory-utilization",), 2),
        (("--model", "smollm2-135m", "--dtype", "int4"), ("--dtype int4 is not one the CPU computes in",), 1),
        ((*SMALL, "--dtype", "int8"), ("--dtype int8 is for the CPU", "computes in bfloat16"), 1),
        ((), ("--model",), 2),
    ],
)
def test_mistakes_are_one_answer(
    dragoman: Dragoman, arguments: tuple[str, ...], parts: tuple[str, ...], code: int
) -> None:
    assert_error(dragoman("plan", *arguments), *parts, code=code)


def test_a_damaged_profile_is_named(dragoman: Dragoman, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(load_library("l4").to_json().replace('"bytes/s"', '"GB/s"', 1))
    assert_error(
        dragoman("plan", "--profile", str(file), "--model", "qwen3-0.6b"),
        "memory.read_bandwidth is in 'GB/s'",
        str(file),
    )


def test_a_plan_costs_under_a_second_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from dragoman_cli.main import main\n"
        "try: main(['plan', '--profile', 'h100-sxm', '--model', 'llama-3.2-1b'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'triton', 'grpc', 'cuda', 'pynvml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1.5, f"a plan took {spent:.2f} s of CPU"  # alone on a machine 0.6 s; others run beside the tests


def test_deterministic_and_eight_bits_are_planned_with_their_reasons(dragoman: Dragoman) -> None:
    card = ("--profile", "h200", "--model", "qwen3-0.6b")
    usual = body(dragoman, *card)
    fixed = body(dragoman, *card, "--deterministic")
    narrow = body(dragoman, *card, "--kv-dtype", "fp8")
    assert fixed["plan"]["deterministic"] is True and "deterministic" not in usual["plan"]
    assert len({usual["digest"], fixed["digest"], narrow["digest"]}) == 3
    assert fixed["predicted"][0]["tpot_seconds"] > usual["predicted"][0]["tpot_seconds"]
    assert (usual["plan"]["kv_dtype"], narrow["plan"]["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert narrow["plan"]["num_blocks"] > 1.9 * usual["plan"]["num_blocks"]
    reasons = {decision["subject"]: decision["reason"] for decision in fixed["decisions"]}
    assert "asked for" in reasons["deterministic"]
    refused = dragoman("plan", "--profile", "rtx3090", "--model", "qwen3-0.6b", "--kv-dtype", "fp8")
    assert refused.returncode == 1 and "compute capability 8.9" in refused.stderr
