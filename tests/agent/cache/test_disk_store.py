"""Blocks on disk: read back as written or not at all, whatever happened to the files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_agent.cache import disk_store
from dragoman_agent.cache.disk_store import DiskStore, DiskTierError, StoredBlock, _whole_prefixes, format_key
from dragoman_agent.cache.hashing import PageHash

BYTES = 4096
KEY = format_key(b"model", "float16", "layout", 64, BYTES)


def page(number: int) -> PageHash:
    return PageHash(number.to_bytes(32, "big"), ((number + 1000).to_bytes(32, "big"),))


def contents(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BYTES, dtype=np.uint8)


def store_in(folder: Path, key: bytes = KEY) -> DiskStore:
    return DiskStore(folder, key, BYTES, 2)


def filled(folder: Path, count: int = 3) -> DiskStore:
    """A chain of blocks."""
    store = store_in(folder)
    store.open(100)
    for number in range(1, count + 1):
        store.write(page(number), page(number - 1).digest if number > 1 else b"", contents(number))
    return store


def read(store: DiskStore, number: int) -> np.ndarray | None:
    out = np.zeros(BYTES, np.uint8)
    parent = page(number - 1).digest if number > 1 else b""
    return out if store.read(page(number), parent, out) else None


def file_of(folder: Path, number: int) -> Path:
    return folder / f"{page(number).digest.hex()}.kvblock"


def test_what_is_written_is_read_also_after_a_restart(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert all(np.array_equal(read(store, n), contents(n)) for n in (1, 2, 3))
    store.close()
    again = store_in(tmp_path)
    found = again.open(100)
    assert [block.page for block in found] == [page(1), page(2), page(3)], "parents first"
    assert [block.parent for block in found] == [b"", page(1).digest, page(2).digest]
    assert all(np.array_equal(read(again, n), contents(n)) for n in (1, 2, 3)) and again.num_bad == 0
    assert file_of(tmp_path, 1).stat().st_size <= again.file_bytes


def test_more_than_the_disk_has_free_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    store.open(100)
    assert not caplog.records
    store.close()
    store.open(10**12)
    assert len(caplog.records) == 1 and "--kv-disk-bytes leaves 4" in caplog.text and "MB free" in caplog.text
    store.close()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a bit of the contents", lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
        ("a bit of the name", lambda data: data[:45] + bytes([data[45] ^ 1]) + data[46:]),
        ("cut short", lambda data: data[:-1]),
        ("cut in the header", lambda data: data[:50]),
        ("longer", lambda data: data + b"x"),
        ("empty", lambda data: b""),
        ("no block at all", lambda data: b"hello"),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_file_is_a_miss_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: object, restarted: bool
) -> None:
    store = filled(tmp_path)
    file = file_of(tmp_path, 3)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    caplog.set_level(logging.WARNING)
    if restarted:
        store.close()
        store = store_in(tmp_path)
        store.open(100)
    assert read(store, 3) is None and read(store, 3) is None, name
    assert np.array_equal(read(store, 2), contents(2))
    assert not file.exists() and len(caplog.records) == 1 and "is not used" in caplog.text


def test_a_block_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    store = filled(tmp_path)
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 3).read_bytes())
    assert read(store, 2) is None


def test_blocks_of_another_model_are_removed_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path).close()
    other = store_in(tmp_path, format_key(b"another model", "float16", "layout", 64, BYTES))
    assert other.open(100) == [] and other.num_bad == 3 and len(caplog.records) == 1
    assert "another model" in caplog.text and not list(tmp_path.glob("*.kvblock"))


def test_only_whole_prefixes_survive_and_the_newest_used(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    store.write(page(9), b"", contents(9))
    for number, used in ((1, 10), (2, 20), (3, 30), (9, 40)):
        os.utime(file_of(tmp_path, number), (used, used))
    store.close()
    again = store_in(tmp_path)
    assert [block.page for block in again.open(3)] == [page(9), page(1), page(2)]
    assert not file_of(tmp_path, 3).exists(), "what is over the limit is gone"
    again.close()
    file_of(tmp_path, 1).unlink()
    last = store_in(tmp_path)
    assert [block.page for block in last.open(3)] == [page(9)] and not file_of(tmp_path, 2).exists()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 50)), max_size=9), st.integers(0, 9))
def test_what_is_kept_is_closed_under_parents(rows: list[tuple[int, int, int]], limit: int) -> None:
    """Whatever the headers say, rings of parents included."""
    blocks = {n: StoredBlock(page(n), page(p).digest if p else b"", float(used)) for n, p, used in rows}
    kept = _whole_prefixes(list(blocks.values()), limit)
    seen = {b""}
    for block in kept:
        assert block.parent in seen, "a parent comes first"
        seen.add(block.page.digest)
    assert len(kept) == len(seen) - 1 <= limit


def test_a_directory_has_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "LOCK_SECONDS", 0.1)
    store = filled(tmp_path)
    with pytest.raises(DiskTierError, match="another process"):
        store_in(tmp_path).open(1)
    store.close()
    store_in(tmp_path).open(1)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskTierError, match="cannot be used"):
        store_in(tmp_path / "file").open(1)


def test_a_disk_that_is_full_leaves_no_file(tmp_path: Path) -> None:
    """By the process' limit on the size of files, which a write meets as it would a full disk."""
    script = (
        "import resource, signal, sys; from pathlib import Path; import tests_path; from test_disk_store import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "store = store_in(Path(sys.argv[1])); store.open(9)\n"
        "try: store.write(page(1), b'', contents(1))\n"
        "except OSError as error: print('refused', error.errno)\n"
    ).replace("import tests_path", f"sys.path.insert(0, {str(Path(__file__).parent)!r})")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused"), done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [disk_store.LOCK_NAME]


def test_killed_in_the_middle_of_writes_what_is_there_is_whole(tmp_path: Path) -> None:
    script = (
        "import sys, itertools; from pathlib import Path; import numpy as np\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_disk_store import *\n"
        "store = store_in(Path(sys.argv[1])); store.open(10**6); print('go', flush=True)\n"
        "for n in itertools.count(1): store.write(page(n), page(n - 1).digest if n > 1 else b'', contents(n))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = store_in(tmp_path)
    found = store.open(10**6)
    assert len(found) >= 40 and not list(tmp_path.glob("*.kvpart"))
    for number in range(1, len(found) + 1):
        assert np.array_equal(read(store, number), contents(number))
    assert store.num_bad == 0


def test_blocks_in_a_directory_that_others_may_enter_are_their_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    filled(tmp_path, 1).close()
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600


def test_a_new_directory_is_its_users_alone(tmp_path: Path) -> None:
    store = store_in(tmp_path / "new")
    store.open(1)
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    store.close()
