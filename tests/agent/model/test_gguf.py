"""The GGUF reader beside the `gguf` library, and on files that are damaged or hostile."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.gguf import TENSOR_TYPES, GgufArray, GgufFile


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def entry(name: str, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    head = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return text(name) + head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def build(
    pairs: list[bytes] = [],  # noqa: B006 - never changed
    entries: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A file by hand; counts may be made to lie."""
    counts = (
        len(entries) if num_entries is None else num_entries,
        len(pairs) if num_pairs is None else num_pairs,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(entries)
    return header + bytes(-len(header) % 32) + data


def opened(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "file.gguf"
    path.write_bytes(data)
    return GgufFile(path)


def everything(file: GgufFile) -> None:
    """Read all there is to read."""
    for value in file.metadata.values():
        if isinstance(value, GgufArray):
            for _ in value:
                pass
    for name in file.tensors:
        file.data(name).sum()


def same_as_library(path: Path, theirs: gguf.GGUFReader) -> None:
    ours = GgufFile(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, field in fields.items():
        value = ours.metadata[key]
        assert (list(value) if isinstance(value, GgufArray) else value) == field.contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.dtype == tensor.tensor_type.name
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.offset == tensor.data_offset
        assert ours.data(tensor.name).tobytes() == tensor.data.tobytes()


def test_the_embedded_model_reads_as_with_the_library(
    embedded_model_path: Path, library_reader: gguf.GGUFReader
) -> None:
    same_as_library(embedded_model_path, library_reader)


def test_a_written_file_reads_as_with_the_library(make_model: Callable[..., Path]) -> None:
    metadata = {
        "x.flag": True,
        "x.strings": ["", "é", "漢" * 50],
        "x.ints": [1, -2, 3],
        "x.floats": [0.5, -1.25],
        "x.flags": [True, False],
    }
    dtypes = {"blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "F16", "blk.1.ffn_up.weight": "Q4_1"}
    path = make_model(metadata=metadata, dtypes=dtypes)
    same_as_library(path, gguf.GGUFReader(path))


@pytest.mark.parametrize(
    ("value_type", "form", "value"),
    [
        (0, "<B", 200),
        (1, "<b", -100),
        (2, "<H", 60000),
        (3, "<h", -30000),
        (4, "<I", 4_000_000_000),
        (5, "<i", -2_000_000_000),
        (6, "<f", 0.25),
        (7, "<?", True),
        (10, "<Q", 1 << 60),
        (11, "<q", -(1 << 60)),
        (12, "<d", 0.1),
    ],
)
def test_every_scalar_type(tmp_path: Path, value_type: int, form: str, value: Any) -> None:
    data = struct.pack(form, value)
    array = struct.pack("<IQ", value_type, 2) + data * 2
    file = opened(tmp_path, build([pair("one", value_type, data), pair("two", 9, array)]))
    assert file.metadata["one"] == value
    assert type(file.metadata["one"]) is type(value)
    two = file.metadata["two"]
    assert isinstance(two, GgufArray)
    assert list(two) == [value, value]


def test_version_2_and_alignment(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    pairs = [pair("general.alignment", 4, struct.pack("<I", 8))]
    header = b"GGUF" + struct.pack("<IQQ", 2, 1, 1) + pairs[0] + entry("t", [4, 2], 0, 8)
    file = opened(tmp_path, header + bytes(-len(header) % 8) + bytes(8) + values.tobytes())
    assert file.version == 2
    assert file.tensors["t"].shape == (2, 4)
    assert file.data("t").view(np.float32).tolist() == values.reshape(2, 4).tolist()


def test_block_sizes_are_the_librarys() -> None:
    for number, (name, block_values, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block_values, block_bytes)


HUGE = (1 << 64) - 1
FOUR = bytes(64)
BAD_FILES = {
    "empty": (b"", "0 bytes are too few"),
    "37 bytes": (build()[:24] + bytes(13), None),
    "37 bytes that claim a tensor": (
        build(num_entries=1)[:24] + bytes(13),
        "tensor count 1 cannot fit into the 21 bytes",
    ),
    "23 bytes": (build()[:23], "23 bytes are too few"),
    "other magic": (build(magic=b"GGML"), "not a GGUF file"),
    "version 1": (build(version=1), "version 1 is not known"),
    "version 99": (build(version=99), "version 99 is not known"),
    "big endian": (build(version=3 << 24), "big-endian"),
    "tensor count": (build(num_entries=HUGE), "tensor count 18446744073709551615 cannot fit"),
    "metadata count": (build(num_pairs=1 << 40), "metadata count 1099511627776 cannot fit"),
    "string length": (build([struct.pack("<Q", HUGE) + b"abcdefghijklm"]), "at most 65535"),
    "string past the end": (build([pair("k", 8, struct.pack("<Q", 1 << 40))]), "the file ends inside text of 'k'"),
    "unknown value type": (build([pair("k", 13, bytes(8))]), "value type 13, which is not known"),
    "unknown array type": (build([pair("k", 9, struct.pack("<IQ", 99, 1) + bytes(8))]), "element type 99"),
    "array of arrays": (build([pair("k", 9, struct.pack("<IQ", 9, 1) + bytes(16))]), "element type 9"),
    "array count": (build([pair("k", 9, struct.pack("<IQ", 4, HUGE) + bytes(8))]), "cannot fit"),
    "string array count": (build([pair("k", 9, struct.pack("<IQ", 8, 1 << 50) + bytes(8))]), "cannot fit"),
    "string array past the end": (
        build([pair("k", 9, struct.pack("<IQQ", 8, 1, 1 << 62) + bytes(8))]),
        "the file ends inside k",
    ),
    "boolean 2": (build([pair("k", 7, b"\x02" + bytes(8))]), "boolean with value 2"),
    "key twice": (build([pair("k", 0, b"\1"), pair("k", 0, b"\1")]), "'k' appears twice"),
    "key not UTF-8": (build([text(b"\xff\xfe") + struct.pack("<I", 0) + b"\1"]), "not valid UTF-8"),
    "alignment 0": (build([pair("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "alignment 48": (build([pair("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment is 48"),
    "alignment 2^31": (build([pair("general.alignment", 4, struct.pack("<I", 1 << 31))]), "general.alignment"),
    "alignment as text": (build([pair("general.alignment", 8, text("32"))]), "general.alignment is '32'"),
    "no dimensions": (build([], [entry("t", [], num_dims=0)], FOUR), "0 dimensions"),
    "five dimensions": (build([], [entry("t", [1] * 5)], FOUR), "5 dimensions"),
    "many dimensions": (build([], [entry("t", [1], num_dims=1 << 31)], FOUR), "dimensions, 1 to 4"),
    "zero dimension": (build([], [entry("t", [4, 0])], FOUR), "dimension of zero"),
    "overflowing product": (build([], [entry("t", [1 << 32, 1 << 32, 1 << 32])], FOUR), "claims"),
    "product that wraps to little": (build([], [entry("t", [1 << 32, 1 << 32, 4])], FOUR), "claims"),
    "unknown tensor type": (build([], [entry("t", [4], 200)], FOUR), "type 200, which is not known"),
    "removed tensor type": (build([], [entry("t", [32], 4)], FOUR), "type 4, which is not known"),
    "part of a block": (build([], [entry("t", [33], 8)], FOUR), "needs multiples of 32"),
    "tensor twice": (build([], [entry("t", [4]), entry("t", [4], 0, 32)], FOUR), "'t' appears twice"),
    "offset past the end": (build([], [entry("t", [4], 0, 1 << 40)], FOUR), "the file has"),
    "offset that wraps": (build([], [entry("t", [4], 0, HUGE - 31)], FOUR), "the file has"),
    "offset not aligned": (build([], [entry("t", [4], 0, 4)], FOUR), "not a multiple of the alignment 32"),
    "overlap": (build([], [entry("a", [16]), entry("b", [4], 0, 32)], FOUR), "overlap"),
    "data cut": (build([], [entry("t", [16])], bytes(63)), "the file has"),
    "long tensor name": (build([], [entry("t" * 65, [4])], FOUR), "at most 64"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    data, message = BAD_FILES[name]
    if message is None:
        everything(opened(tmp_path, data))  # a header of nothing, then zeros: short, yet a GGUF file
        return
    with pytest.raises(ModelFileError, match=r"file.gguf: .*; ") as caught:
        opened(tmp_path, data)
    assert message in str(caught.value)


def test_text_that_is_not_utf8_in_an_array_is_found_when_read(tmp_path: Path) -> None:
    file = opened(tmp_path, build([pair("k", 9, struct.pack("<IQ", 8, 1) + text(b"\xff"))]))
    with pytest.raises(ModelFileError, match="not valid UTF-8"):
        everything(file)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = build([pair("k", 8, text("v")), pair("a", 9, struct.pack("<IQ", 4, 2) + bytes(8))], [entry("t", [16])], FOUR)
    everything(opened(tmp_path, data))
    for size in range(len(data)):
        with pytest.raises(ModelFileError):
            opened(tmp_path, data[:size])


def test_a_missing_file_a_directory_and_a_forbidden_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            GgufFile(path)


def test_claimed_counts_take_no_memory(tmp_path: Path) -> None:
    """A 4 MiB file that claims as many strings as could possibly fit costs no more than its own size."""
    count = (4 << 20) // 8
    data = build([pair("k", 9, struct.pack("<IQ", 8, count) + bytes(8 * count))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = opened(tmp_path, data)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < 3 * len(data)
    assert len(file.metadata["k"]) == count  # type: ignore[arg-type]


SEED = build(
    [
        pair("general.architecture", 8, text("llama")),
        pair("general.alignment", 4, struct.pack("<I", 32)),
        pair("words", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
        pair("flags", 9, struct.pack("<IQ", 7, 2) + b"\0\1"),
        pair("f", 12, struct.pack("<d", 1.5)),
    ],
    [entry("a", [4, 2]), entry("b", [32, 2], 8, 32), entry("c", [8], 1, 128)],
    bytes(160),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=6),
    words=st.lists(
        st.tuples(st.integers(0, len(SEED) - 8), st.sampled_from([0, 1, HUGE, 1 << 63, 1 << 32])), max_size=2
    ),
    cut=st.one_of(st.none(), st.integers(0, len(SEED))),
    tail=st.binary(max_size=16),
)
def test_mutated_files_raise_nothing_else(
    tmp_path: Path, changes: list[tuple[int, int]], words: list[tuple[int, int]], cut: int | None, tail: bytes
) -> None:
    data = bytearray(SEED)
    for position, value in changes:
        data[position] = value
    for position, word in words:
        data[position : position + 8] = struct.pack("<Q", word)
    try:
        everything(opened(tmp_path, bytes(data[:cut]) + tail))
    except ModelFileError as error:
        assert "file.gguf: " in str(error)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_bytes_raise_nothing_else(tmp_path: Path, data: bytes, counts: tuple[int, int]) -> None:
    try:
        everything(opened(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + data))
    except ModelFileError:
        pass
