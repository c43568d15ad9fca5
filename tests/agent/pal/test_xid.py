"""The table of Xids: every row says what it means and what to do."""

from __future__ import annotations

import pytest

from dragoman_agent.pal.xid import _TABLE, XidAction, classify, describe


@pytest.mark.parametrize(("xid", "action"), [(48, "cordon"), (79, "exit"), (94, "cordon"), (95, "exit"), (31, "note")])
def test_f11_classes(xid: int, action: str) -> None:
    assert classify(xid).action is XidAction(action)


def test_an_unknown_fault_is_noted_and_never_ends_the_agent() -> None:
    assert classify(9999).action is XidAction.NOTE and "9999" in describe(9999) and "list" in describe(9999)


def test_every_row_has_its_words() -> None:
    for xid, row in _TABLE.items():
        assert row.meaning and row.remedy and f"Xid {xid}:" in describe(xid) and row.remedy in describe(xid)
