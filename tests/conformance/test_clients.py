"""Every case of clients/conformance against every language whose toolchain is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clients.conformance.case import Case, load_cases
from clients.conformance.harness import Harness
from clients.conformance.language import Language, load_languages
from tests.needs import skip_without

LANGUAGES = load_languages()
CASES = load_cases()


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    with Harness() as made:
        yield made


@pytest.fixture(scope="module")
def language(request: pytest.FixtureRequest) -> Language:
    found = LANGUAGES[request.param]
    missing = found.missing()
    if missing:
        skip_without(missing, f"the {found.name} client: {missing} is not on the PATH")
    return found


@pytest.mark.parametrize("language", LANGUAGES, indirect=True)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(case: Case, language: Language, harness: Harness) -> None:
    outcome = harness.play(case, language)
    assert not outcome.problems, "\n".join([case.why, *outcome.problems])
