"""Admission with a clock in hand: grants, waits, refusals, and what comes of asking again or leaving."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2, ticket_pb2
from dragoman_controller.admission import MAX_NUM_MISFITS, MAX_RETRY_SECONDS, Queued
from dragoman_controller.cell import Outcome
from dragoman_controller.fleet import AgentState, Load
from dragoman_controller.granted import Granted
from dragoman_controller.policy import Policy, TenantPolicy
from dragoman_controller.requests import Priority, Resume
from dragoman_controller.shares import MAX_NUM_TENANTS


def granted(answers: list[Any]) -> Granted:
    assert isinstance(answers[-1], Granted), answers
    return answers[-1]


def refused(answers: list[Any]) -> DragomanError:
    assert isinstance(answers[-1], DragomanError), answers
    return answers[-1]


def claims(answers: list[Any]) -> ticket_pb2.TicketClaims:
    token = granted(answers).ticket.token
    return ticket_pb2.TicketClaims.FromString(ticket_pb2.SignedTicket.FromString(token).claims)


def end(bench: Any, answers: list[Any], agent_id: str = "a") -> None:
    """The granted request ends at its agent."""
    outcome = Outcome(granted(answers).ticket.jti, 0.1, 0.5, 10, False)
    bench.beat(agent_id, bench.members[agent_id].load, outcomes=[outcome])


def fill(bench: Any, count: int = 6, **fields: Any) -> list[list[Any]]:
    """Takes every slot of an agent of 4 + 2."""
    return [bench.ask(**fields) for _ in range(count)]


def test_an_unknown_model_names_what_is_served(bench: Any) -> None:
    bench.join(model="qwen3-0.6b")
    error = refused(bench.ask(model="qwen3-0.5b"))
    assert error.reason == error_pb2.ERROR_REASON_MODEL_NOT_SERVED
    assert "'qwen3-0.6b'" in error.message and "did you mean" in error.message


def test_a_controller_that_just_started_says_ask_again_and_not_unknown(bench: Any) -> None:
    error = refused(bench.ask())
    assert (error.reason, error.retry_delay) == (error_pb2.ERROR_REASON_NO_AGENT, 1.0)
    bench.pass_time(5.1)
    assert refused(bench.ask()).reason == error_pb2.ERROR_REASON_MODEL_NOT_SERVED


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (AgentState.STARTING, error_pb2.ERROR_REASON_MODEL_LOADING),
        (AgentState.DRAINING, error_pb2.ERROR_REASON_NO_AGENT),
    ],
)
def test_agents_that_take_nothing_now(bench: Any, state: AgentState, reason: int) -> None:
    bench.join()
    bench.beat(state=state)
    error = refused(bench.ask())
    assert error.reason == reason and error.retry_delay is not None


def test_a_model_whose_agents_are_silent_or_gone_has_no_agent(bench: Any) -> None:
    bench.join()
    for seconds in (3.1, 3.0, 10.0):
        bench.pass_time(seconds)
        assert refused(bench.ask()).reason == error_pb2.ERROR_REASON_NO_AGENT


def test_a_prompt_over_every_context_is_refused_with_the_counts(bench: Any) -> None:
    bench.join(max_context=512)
    bench.join("b", max_context=1024)
    error = refused(bench.ask(prompt_tokens=1024))
    assert error.reason == error_pb2.ERROR_REASON_CONTEXT_EXCEEDED
    assert error.metadata["limit"] == "1024" and error.metadata["prompt_tokens"] == "1024"
    answers = bench.ask(prompt_tokens=1023)
    assert granted(answers).ticket.agent_id == "b"
    assert claims(answers).max_output_tokens == 1


def test_output_is_clamped_to_the_room_and_unset_means_all_of_it(bench: Any) -> None:
    bench.join(max_context=512)
    assert claims(bench.ask(prompt_tokens=100, max_output_tokens=0)).max_output_tokens == 412
    assert claims(bench.ask(prompt_tokens=100, max_output_tokens=9999)).max_output_tokens == 412
    assert claims(bench.ask(prompt_tokens=100, max_output_tokens=7, num_choices=3)).max_output_tokens == 7


def test_a_client_without_a_tokenizer_is_bounded_by_its_bytes(bench: Any) -> None:
    bench.join(max_context=512)
    assert claims(bench.ask(prompt_tokens=None, prompt_bytes=40)).max_prompt_tokens == 56
    assert claims(bench.ask(prompt_tokens=None, prompt_bytes=4000)).max_prompt_tokens == 512


def test_grants_debit_the_agent_so_that_the_next_goes_elsewhere(bench: Any) -> None:
    bench.join("a")
    bench.join("b")
    first, second = bench.ask(), bench.ask()
    assert {granted(first).ticket.agent_id, granted(second).ticket.agent_id} == {"a", "b"}
    fallback = granted(first).fallback
    assert fallback is not None and fallback.agent_id != granted(first).ticket.agent_id


def test_past_the_slots_requests_wait_and_an_outcome_lets_the_next_in(bench: Any) -> None:
    bench.join()
    running = fill(bench)
    waiting = [bench.ask("w0"), bench.ask("w1")]
    assert [answers[0].position for answers in waiting] == [0, 1]
    assert all(isinstance(answers[-1], Queued) and answers[-1].predicted_wait_seconds > 0 for answers in waiting)
    end(bench, running[0])
    granted(waiting[0])
    assert len(waiting[1]) == 1
    end(bench, running[1])
    granted(waiting[1])
    assert bench.tickets["granted"] == 8


def test_a_report_of_a_free_slot_lets_the_next_in_although_no_outcome_came(bench: Any) -> None:
    bench.join()
    fill(bench)
    answers = bench.ask(max_queue_wait_seconds=20.0)
    bench.pass_time(11.2, beating=["a"])
    granted(answers)
    assert bench.tickets["expired"] == 6


def test_a_wait_ends_with_queue_full_and_a_time_to_ask_again(bench: Any) -> None:
    bench.join()
    fill(bench)
    answers = bench.ask(max_queue_wait_seconds=0.5)
    bench.pass_time(0.4, beating=["a"])
    assert len(answers) == 1
    bench.pass_time(0.3, beating=["a"])
    error = refused(answers)
    assert error.reason == error_pb2.ERROR_REASON_QUEUE_FULL
    assert error.retry_delay is not None and 1.0 <= error.retry_delay <= MAX_RETRY_SECONDS
    assert bench.cell.admission.num_waiting(Priority.STANDARD) == 0


def test_who_may_not_wait_is_refused_at_once(bench: Any) -> None:
    bench.join()
    fill(bench)
    assert refused(bench.ask(max_queue_wait_seconds=0.0)).reason == error_pb2.ERROR_REASON_QUEUE_FULL


def test_the_queue_is_bounded_in_all_and_by_tenant(bench_of: Any) -> None:
    limits = {"small": TenantPolicy(max_queued_requests=1)}
    bench = bench_of(Policy(max_queued_requests=3, tenants=limits))
    bench.join()
    fill(bench)
    assert isinstance(bench.ask(tenant="small")[-1], Queued)
    assert "tenant 'small'" in refused(bench.ask(tenant="small")).message
    bench.ask()
    bench.ask()
    error = refused(bench.ask())
    assert error.reason == error_pb2.ERROR_REASON_QUEUE_FULL and "holds 3 requests" in error.message


def test_a_tenant_at_its_running_limit_waits_and_does_not_hold_up_others(bench_of: Any) -> None:
    bench = bench_of(Policy(tenants={"one": TenantPolicy(max_running_requests=1)}))
    bench.join()
    first, second, other = bench.ask(tenant="one"), bench.ask(tenant="one"), bench.ask(tenant="two")
    assert isinstance(second[-1], Queued)
    granted(other)
    end(bench, first)
    granted(second)


def test_a_large_request_that_waits_does_not_hold_up_other_tenants(bench: Any) -> None:
    bench.join("small", max_context=512)
    bench.join("large", max_context=4096, max_running=1, max_waiting=0)
    long = bench.ask(prompt_tokens=2000, tenant="x")
    waiting = bench.ask(prompt_tokens=2000, tenant="x")
    assert granted(long).ticket.agent_id == "large" and isinstance(waiting[-1], Queued)
    assert granted(bench.ask(prompt_tokens=10, max_output_tokens=10, tenant="y")).ticket.agent_id == "small"


def test_a_higher_class_goes_first(bench: Any) -> None:
    bench.join()
    running = fill(bench)
    batch = bench.ask(priority=Priority.BATCH)
    person = bench.ask(priority=Priority.INTERACTIVE)
    end(bench, running[0])
    granted(person)
    assert isinstance(batch[-1], Queued)


def test_asking_again_gives_the_same_ticket_and_takes_no_second_slot(bench: Any) -> None:
    bench.join()
    first = granted(bench.ask("same"))
    bench.now += 2.0
    again = granted(bench.ask("same"))
    assert again.ticket.token == first.ticket.token
    assert again.ticket.usable_seconds == pytest.approx(8.0)
    assert len(bench.cell.ledger) == 1


def test_asking_again_while_waiting_answers_both(bench: Any) -> None:
    bench.join()
    running = fill(bench)
    first, again = bench.ask("same"), bench.ask("same")
    assert bench.cell.admission.num_waiting(Priority.STANDARD) == 1
    end(bench, running[0])
    assert granted(first).ticket.token == granted(again).ticket.token


def test_an_id_is_free_again_after_the_end_and_after_the_window(bench: Any) -> None:
    bench.join()
    first = bench.ask("same")
    end(bench, first)
    second = bench.ask("same")
    assert granted(second).ticket.token != granted(first).ticket.token
    bench.pass_time(10.1, beating=["a"])
    assert granted(bench.ask("same")).ticket.token != granted(second).ticket.token


def test_the_id_of_another_prompt_is_refused(bench: Any) -> None:
    bench.join()
    bench.ask("same")
    error = refused(bench.ask("same", prompt_digest=b"q" * 32))
    assert error.reason == error_pb2.ERROR_REASON_DUPLICATE_REQUEST


def test_tenants_do_not_share_ids(bench: Any) -> None:
    bench.join()
    assert granted(bench.ask("same", tenant="x")).ticket.jti != granted(bench.ask("same", tenant="y")).ticket.jti


def test_abandoning_leaves_the_queue_or_returns_the_ticket(bench: Any) -> None:
    bench.join()
    running = fill(bench, 5)
    held, first, second = bench.ask("held"), bench.ask("w1"), bench.ask("w2")
    bench.cell.admission.abandon("w1")
    bench.cell.admission.abandon("held")
    granted(second)
    assert len(first) == 1 and len(held) == 1 and len(running) == 5
    assert (bench.tickets["abandoned"], bench.tickets["released"]) == (1, 1)
    bench.cell.admission.abandon("never asked")


def test_a_caller_that_leaves_takes_its_request_along_unless_another_waits_for_it(bench: Any) -> None:
    bench.join()
    fill(bench)
    request = bench.request("same")
    one: list[Any] = []
    other: list[Any] = []
    take_one, take_other = one.append, other.append
    bench.cell.admission.submit(request, take_one)
    bench.cell.admission.submit(request, take_other)
    bench.cell.admission.detach(request, take_one)
    assert bench.cell.admission.num_waiting(Priority.STANDARD) == 1
    bench.cell.admission.detach(request, take_other)
    assert bench.cell.admission.num_waiting(Priority.STANDARD) == 0


def test_agents_lost_while_waiting_end_the_wait_with_the_true_reason(bench: Any) -> None:
    bench.join()
    fill(bench)
    answers = bench.ask(max_queue_wait_seconds=4.0)
    bench.pass_time(4.1)
    assert refused(answers).reason == error_pb2.ERROR_REASON_NO_AGENT


def test_a_resume_counts_the_delivered_tokens_and_carries_the_claim(bench: Any) -> None:
    bench.join()
    resume = Resume("gone", 77, 2, 30)
    answers = bench.ask("r", max_output_tokens=50, resume=resume)
    assert claims(answers).resume == ticket_pb2.ResumeClaim(origin_epoch=77, attempt=2, from_cursor=30)
    assert claims(answers).max_output_tokens == 50
    record = bench.cell.placements.find("r")
    assert record is not None and (record.shape.prompt_tokens, record.shape.output_tokens) == (130, 20)


def test_a_resume_goes_to_an_agent_of_the_same_plan_even_when_its_own_is_gone(bench: Any) -> None:
    bench.join("dying", epoch=9, plan_digest=b"x" * 32)
    bench.join("other", plan_digest=b"y" * 32)
    bench.join("equal", plan_digest=b"x" * 32)
    bench.cell.fleet.deregister(bench.members["dying"].lease_id)
    for attempt in range(1, 4):
        answers = bench.ask(resume=Resume("dying", 9, attempt, 5))
        assert granted(answers).ticket.agent_id == "equal"
    bench.beat("equal", state=AgentState.DRAINING)
    assert granted(bench.ask(resume=Resume("dying", 9, 1, 5))).ticket.agent_id == "other"


def test_a_fourth_resume_is_refused(bench: Any) -> None:
    bench.join()
    assert refused(bench.ask(resume=Resume("a", 1, 4, 5))).reason == error_pb2.ERROR_REASON_RESUME_REFUSED
    assert refused(bench.ask(resume=Resume("a", 1, 0, 5))).reason == error_pb2.ERROR_REASON_INVALID_REQUEST


def test_a_silent_agent_is_not_chosen_for_the_resume_of_its_own_stream(bench: Any) -> None:
    bench.join("a")
    bench.join("b")
    bench.pass_time(3.2, beating=["b"])
    for _ in range(5):
        assert granted(bench.ask(resume=Resume("a", 1, 1, 5))).ticket.agent_id == "b"


def test_a_quote_grants_nothing(bench: Any) -> None:
    bench.join()
    quote, agent_id = bench.cell.admission.quote(bench.request(request_id=""))
    assert agent_id == "a" and quote.finish.expected > quote.time_to_first_token.expected > 0
    assert len(bench.cell.ledger) == 0
    fill(bench)
    with pytest.raises(DragomanError) as raised:
        bench.cell.admission.quote(bench.request())
    assert raised.value.reason == error_pb2.ERROR_REASON_QUEUE_FULL


def test_a_ticket_runs_out_by_the_agents_own_clock(bench: Any) -> None:
    bench.join()
    bench.beat()
    bench.now += 0.15
    assert claims(bench.ask()).not_after_ms == int(bench.members["a"].agent_monotonic_ms + 150 + 10_000)


def test_closing_refuses_new_requests_and_lets_the_waiting_wait(bench: Any) -> None:
    bench.join()
    running = fill(bench)
    waiting = bench.ask()
    closing = DragomanError(error_pb2.ERROR_REASON_AGENT_DRAINING, "closing")
    bench.cell.admission.close(closing)
    assert refused(bench.ask()) is closing
    end(bench, running[0])
    granted(waiting)
    assert not bench.cell.admission.has_waiting


def test_everything_is_forgotten_once_all_have_ended(bench: Any) -> None:
    bench.join()
    for round_number in range(5):
        running = fill(bench)
        waiting = [bench.ask() for _ in range(3)]
        for answers in running:
            end(bench, answers)
        for answers in waiting[round_number % 2 :]:
            end(bench, answers)
        bench.pass_time(41.0, beating=["a"])
    admission = bench.cell.admission
    assert len(bench.cell.ledger) == 0
    assert (
        not admission._asks
        and not admission._keys
        and not admission._waits
        and not admission._unused
        and not admission._queued_of_tenant
    )
    assert bench.members["a"].load == Load()


def test_ten_thousand_tenants_cost_a_dispatch_no_more_than_a_few_and_leave_nothing_behind(bench_of: Any) -> None:
    bench = bench_of(Policy(default_tenant=TenantPolicy(max_running_requests=1), max_queued_requests=20_000))
    bench.join("a", max_running=8, max_waiting=0)
    tried = []
    choose = bench.cell.placer._choose
    bench.cell.placer._choose = lambda *args: tried.append(1) or choose(*args)
    # Every tenant has one running where there is room, and one that waits; the 8 places are full.
    for number in range(10_000):
        bench.ask(tenant=f"t{number}")
    assert bench.cell.admission._num_waiting("tiny") == 9_992 and len(tried) <= 10
    # Wide requests that fit nowhere hold up at most so many tries.
    for _ in range(30):
        bench.ask(tenant="wide", num_choices=8)
    del tried[:]
    bench.beat("a", Load(running_requests=7))
    assert len(tried) <= MAX_NUM_MISFITS + 2
    bench.pass_time(31.0, beating=["a"])
    admission = bench.cell.admission
    assert not admission.has_waiting and not admission._queued_of_tenant and not admission._limited
    bench.pass_time(12.0, beating=["a"])
    bench.ask()
    bench.pass_time(1.0, beating=["a"])
    assert not admission._waits and len(admission._unused) <= 1 and len(admission._shares.asked_at) <= MAX_NUM_TENANTS


def test_a_tenant_at_its_limit_is_let_in_when_one_of_its_own_ends_or_the_policy_allows_more(bench_of: Any) -> None:
    bench = bench_of(Policy(tenants={"t": TenantPolicy(max_running_requests=1)}))
    bench.join(max_running=8)
    first, second, third = (bench.ask(tenant="t") for _ in range(3))
    granted(first)
    assert isinstance(second[-1], Queued)
    end(bench, first)
    granted(second)
    assert isinstance(third[-1], Queued)
    bench.cell.policy.update(Policy(revision=bench.cell.policy.current.revision))
    bench.beat("a", Load(running_requests=1))
    granted(third)


def test_the_last_places_are_kept_for_tenants_within_their_share(bench: Any) -> None:
    bench.join(max_running=16, max_waiting=4)
    bench.ask(tenant="small")
    flood = [bench.ask(tenant="flood") for _ in range(30)]
    bench.pass_time(1.0, beating=["a"])
    running = sum(isinstance(answers[-1], Granted) for answers in flood)
    # 16 places, one for the small tenant, and the reserve of two is not for the flood.
    assert 12 <= running <= 13
    granted(bench.ask(tenant="small"))
    granted(bench.ask(tenant="new"))


def test_one_tenant_alone_has_all_places(bench: Any) -> None:
    bench.join(max_running=16, max_waiting=40)
    asked = [bench.ask(tenant="only") for _ in range(60)]
    # And of the agent's own queue what keeps it busy until the next beat is answered.
    assert 18 <= sum(isinstance(answers[-1], Granted) for answers in asked) <= 24
