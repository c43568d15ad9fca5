"""Kernels compiled ahead are those that the device then launches, without PyTorch; who is started when."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.agent.device.apart import printed_by
from tests.agent.device.conformance.subjects import deterministic_plan, gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG

from dragoman_agent.device import precompile
from dragoman_agent.device.kernel_forms import forms_of, shares
from dragoman_agent.pal.plan import GemmDecode, LongPrefill, PrefillAttention, ShortGroups


def binaries(which: str, plan: str, cache: Path) -> dict[str, str]:
    printed = printed_by("compile_trace", which, plan, TRITON_CACHE_DIR=str(cache))
    return dict(line.split() for line in printed.splitlines())


@pytest.mark.parametrize(
    ("plan", "least", "unused"),
    [
        # A larger tile, and attention of more than 2 sequences without groups: beside prompts, which this step has none of.
        ("planned", 20, ["_decode_split_kernel", "_gemm_decode_kernel"]),
        ("deterministic", 10, []),
        ("float8", 10, []),
    ],
)
def test_what_the_device_launches_was_compiled_ahead_under_the_same_names(
    plan: str, least: int, unused: list[str], tmp_path: Path
) -> None:
    ahead, device = binaries("ahead", plan, tmp_path), binaries("device", plan, tmp_path)
    assert len(device) >= least
    assert {name for digest, name in device.items() if digest not in ahead} == set()
    assert sorted(name for digest, name in ahead.items() if digest not in device) == unused


def test_a_kernel_that_a_worker_compiles_alone_has_the_name_that_it_has_among_others(tmp_path: Path) -> None:
    """Triton names a binary by its functions' sources, and by which of those it had read before."""
    whole, alone = (
        binaries("ahead", "planned", tmp_path / "whole"),
        binaries("last-parts", "planned", tmp_path / "alone"),
    )
    assert sorted(set(alone.values())) == ["_edit_rows_kernel", "_kept_pick_kernel", "_pick_kernel"]
    assert alone.items() <= whole.items()


def test_a_kernel_that_cannot_be_compiled_costs_no_other(tmp_path: Path) -> None:
    order = precompile.order_of(CONFIG, gpu_plan("cuda"), "9.0")
    silu = next(form for form in order["forms"] if form["kind"] == "silu")
    order["forms"] = [{**silu, "sizes": [1, 2]}, {**silu, "kind": "decode"}, silu]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "dragoman_agent.device.precompile"], input=json.dumps(order), text=True,
        capture_output=True, env={**environ, "TRITON_CACHE_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "not all kernels were compiled" in done.stderr and "ValueError" in done.stderr
    assert list(tmp_path.glob("*/_silu_mul_kernel.cubin"))


def test_forms_follow_the_plan() -> None:
    plan = gpu_plan("cuda")
    kinds = [form.kind for form in forms_of(CONFIG, plan)]
    assert kinds.index("prefill") == 0 and len(set(forms_of(CONFIG, plan))) == len(kinds)
    assert not any(form.dependent for form in forms_of(CONFIG, plan))
    early = forms_of(CONFIG, dataclasses.replace(plan, dependent_max_batch=2))
    assert [form.sizes[0] for form in early if form.kind == "decode" and form.dependent] == [2], "the bucket of 2 alone"
    groups = (ShortGroups(3, 4, 2, 20, 2e-6, 1e-6),)
    grouped = forms_of(CONFIG, dataclasses.replace(plan, dependent_max_batch=4, short_groups=groups))
    found = sorted((form.sizes[0], form.dependent, form.flag) for form in grouped if form.kind == "decode")
    assert found == [(1, False, False), (1, True, True), (2, False, False), (2, True, False)], (
        "4 sequences in groups alone"
    )
    two = forms_of(CONFIG, dataclasses.replace(plan, long_prefill=LongPrefill(PrefillAttention("paged", 128, 64, 12, 4, tma=True), 1024, 900)))  # fmt: skip
    assert [form.sizes for form in two if form.kind == "prefill"] == [(16, 16, 3, 4, 0), (128, 64, 4, 12, 1)]
    assert len(two) == len(forms_of(CONFIG, plan)) + 1, "one form more"
    kinds = [form.kind for form in forms_of(CONFIG, deterministic_plan("cuda"))]
    assert "decode" not in kinds and "gemm" not in kinds and kinds.count("fixed-gemm") == 5 and "sample" in kinds


def test_workers_take_about_as_long_and_none_waits_for_kernels_that_another_could_compile() -> None:
    forms = forms_of(CONFIG, dataclasses.replace(gpu_plan("cuda"), dependent_max_batch=2))
    for count in (1, 3, 8, 12, len(forms) + 1):
        each = shares(forms, count)
        assert sorted(str(form) for own in each for form in own) == sorted(map(str, forms))
        longest = max(sum(form.seconds for form in own) for own in each)
        # What the rule is known for: within a third of the best, which is no less than either of these.
        assert longest <= 4 / 3 * max(sum(form.seconds for form in forms) / count, forms[0].seconds)
    assert {form.part for form in forms if form.kind == "filters"} == set(range(5))


def test_each_entry_of_the_few_row_product_has_the_tiles_of_its_rows() -> None:
    gemm = tuple(GemmDecode(128, 64, rows, 16, 64, 3, 2) for rows in (8, 64))
    model = dataclasses.replace(CONFIG, attention_bias=True)
    forms = [
        form for form in forms_of(model, dataclasses.replace(gpu_plan("cuda"), gemm_decode=gemm)) if form.kind == "gemm"
    ]
    assert sorted((form.sizes[2], form.flag) for form in forms) == [(8, True), (16, True), (32, True), (64, True)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Workers that note their forms and end with the exit code of `code`; `TRITON_CACHE_DIR` is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precompile, "usable_cores", lambda: 5)
    monkeypatch.setattr(precompile, "free_host_bytes", lambda host: 8 << 30)
    begun: list[list[str]] = []
    script = f"import sys; open(f'{tmp_path}/{{id(sys)}}-{{__import__(\"os\").getpid()}}', 'w').write(sys.stdin.read()); sys.exit(int(open('{tmp_path}/code').read()))"  # fmt: skip
    (tmp_path / "code").write_text("0")
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> object:
        begun.append(command)
        return popen([sys.executable, "-S", "-c", script], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start)
    return begun


def test_workers_share_the_forms_and_the_next_start_needs_none(started: list[list[str]], tmp_path: Path) -> None:
    plan = gpu_plan("cuda")
    assert precompile.start_compilers(CONFIG, plan, "9.0").wait()
    assert len(started) == 4, "one core is left to the engine"
    orders = [json.loads(path.read_text()) for path in tmp_path.glob("*-*") if path.is_file()]
    whole = json.loads(json.dumps(precompile.order_of(CONFIG, plan, "9.0")))
    assert sorted(str(form) for order in orders for form in order["forms"]) == sorted(map(str, whole["forms"]))
    assert precompile.start_compilers(CONFIG, plan, "9.0").wait()
    assert len(started) == 4
    precompile.start_compilers(CONFIG, plan, "8.0").wait()
    assert len(started) == 8, "another architecture is another cache"


def test_a_host_with_little_memory_gets_fewer_workers(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, count in ((1 << 30, 2), (100 << 20, 1)):
        started.clear()
        monkeypatch.setattr(precompile, "free_host_bytes", lambda host, free=free: free)
        precompile.start_compilers(CONFIG, gpu_plan("cuda"), "9.0").close()
        assert len(started) == count


def test_a_worker_that_fails_costs_only_the_time(
    started: list[list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "code").write_text("3")
    assert not precompile.start_compilers(CONFIG, gpu_plan("cuda"), "9.0").wait()
    assert "compiled when first launched" in caplog.text
    precompile.start_compilers(CONFIG, gpu_plan("cuda"), "9.0").close()
    assert len(started) == 8, "tried again at the next start"


def test_a_host_that_gives_no_process_starts_all_the_same(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert not precompile.start_compilers(CONFIG, gpu_plan("cuda"), "9.0").wait()
    assert "Resource temporarily unavailable" in caplog.text and "when first launched" in caplog.text


def test_a_worker_that_hangs_is_ended(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompile, "WAIT_SECONDS", 0.0)
    compilers = precompile.start_compilers(CONFIG, gpu_plan("cuda"), "9.0")
    assert not compilers.wait()
    assert not compilers.wait()
