"""The plan as a message: every field of every kind of plan, with the decision that chose it."""

import dataclasses

from dragoman.step_model import StepModel
from dragoman_agent.pal.decisions import Candidate, Decision, Input
from dragoman_agent.pal.messages import decision_to_proto, plan_to_proto
from dragoman_agent.pal.plan import (
    DecodeAttention,
    DecodeList,
    GemmFixed,
    LibraryGemm,
    LibraryPrefill,
    LongPrefill,
    MemoryLine,
    Plan,
    PrefillAttention,
    ShortGroups,
)
from dragoman_agent.pal.plan_fields import plan_fields

PLAN = Plan(
    device_kind="cuda", model_name="m", page_size=64, num_blocks=10, max_context_tokens=512, max_batch_tokens=1024,
    max_num_seqs=8, max_num_waiting=3, num_threads=1, road="r", kv_dtype="bfloat16",
    memory=(MemoryLine("weights", 5), MemoryLine("kv", 6)), step_model=StepModel((1,), (64,), (0.5,), 100.0, 0.1),
    graph_batch_sizes=(1, 2, 8),
    decode_attention=(DecodeAttention(2, 8, 64, 4, 5), DecodeAttention(8, 1, 32, 2, 3)),
    prefill_attention=PrefillAttention("paged", 128, 64, 8, 2),
    long_prefill=LongPrefill(PrefillAttention("paged", 64, 64, 4, 3, tma=True), 1024, 900, 2048), min_gemm_rows=8, dependent_max_batch=8, burst=True,
    reduction="shared", shared_memory_bytes=99 << 10, prefetch=True, switches_off=("arena", "link_policy"),
    deterministic=True, gemm_fixed=(GemmFixed(96, 32, 0, 64, 64, 128, 3, 4),), attention_part_tokens=256,
    library_prefill=LibraryPrefill("cudnn", 2048, 16), library_gemm=(LibraryGemm(96, 32, 1536, 4095, 2048, 5),), short_groups=(ShortGroups(64, 255, 4, 128, 1e-5, 9e-6),),
    decode_lists=(DecodeList(17, 32, 72, 4), DecodeList(33, 63, 144, 4)),
)  # fmt: skip
# How the nested fields of a plan are spread, and what is a message of its own.
SPREAD = {
    "decode_attention": "decode_num_splits",
    "prefill_attention": "prefill_variant",
    "long_prefill": "long_prefill_min_context_tokens",
    "library_prefill": "library_prefill_library",
}
ELSEWHERE = {"memory", "step_model", "model_name", "num_threads", "pal"}


def test_every_field_of_the_plan_is_told() -> None:
    told = {field.name for field in plan_fields(PLAN)}
    for field in dataclasses.fields(Plan):
        assert SPREAD.get(field.name, field.name) in told | ELSEWHERE, field.name


def test_values_lists_and_labels_arrive() -> None:
    message = plan_to_proto(PLAN, {"page-size": "page-size-3", "decode-attention": "decode-attention-4"})
    fields = {field.name: field for field in message.fields}
    assert (fields["page_size"].number, fields["page_size"].unit) == (64, "tokens")
    assert fields["page_size"].decision_id == "page-size-3"
    assert list(fields["graph_batch_sizes"].numbers.values) == [1, 2, 8]
    splits = fields["decode_num_splits"]
    assert (list(splits.numbers.values), list(splits.numbers.labels)) == ([8, 1], ["2", "8"])
    assert splits.decision_id == "decode-attention-4"
    assert fields["prefill_block_m"].number == 128
    groups = fields["short_groups"]
    assert (list(groups.numbers.values), list(groups.numbers.labels)) == ([4], ["64-255"])
    assert groups.unit == "sequences a program"
    lists = fields["decode_lists"]
    assert (list(lists.numbers.values), list(lists.numbers.labels)) == ([72, 144], ["17-32", "33-63"])
    assert lists.unit == "items"
    assert list(fields["gemm_fixed"].numbers.labels) == ["96x32-m64-n64-k128-g3-w4"]
    algorithm = fields["library_gemm"].numbers
    assert (list(algorithm.values), list(algorithm.labels)) == ([6], ["96x32 from 1536 rows"])
    assert fields["attention_part_tokens"].number == 256
    assert fields["library_prefill_library"].text == "cudnn"
    assert (fields["library_prefill_min_tokens"].number, fields["library_prefill_min_tokens"].unit) == (2048, "tokens")
    assert fields["dependent_max_batch"].number == 8
    long = {name: fields[f"long_prefill_{name}"] for name in ("block_m", "min_context_tokens", "many_tokens")}
    assert {name: (field.number, field.unit) for name, field in long.items()} == {
        "block_m": (64, ""), "min_context_tokens": (900, "tokens"), "many_tokens": (2048, "tokens"),
    }  # fmt: skip
    assert fields["long_prefill_tma"].flag
    assert fields["reduction"].text == "shared"
    assert fields["switches_off"].text == "arena, link_policy"
    assert [(line.name, line.size_bytes) for line in message.memory] == [("weights", 5), ("kv", 6)]
    assert message.digest == PLAN.digest()


def test_a_cpu_plan_tells_its_threads_and_no_kernels_it_does_not_have() -> None:
    told = {field.name: field.value for field in plan_fields(dataclasses.replace(PLAN, device_kind="cpu"))}
    assert told["num_threads"] == 1
    assert not {"decode_num_splits", "graph_batch_sizes", "burst"} & told.keys()


def test_a_decision_arrives_whole() -> None:
    decision = Decision(
        "page-size", "64", "why", (Input("memory.free", "1 bytes", "reported"),), (Candidate("16", 2.0, "slow"),),
        predicted=0.0, unit="s", decision_id="page-size-1", unix_time=1.5,
    )  # fmt: skip
    message = decision_to_proto(decision)
    assert message.HasField("predicted") and not message.HasField("measured")
    assert (message.candidates[0].predicted, message.candidates[0].rejected_because) == (2.0, "slow")
    assert message.decide_time.ToNanoseconds() == 1_500_000_000
