from __future__ import annotations

import pytest

from dragoman.prefix_hash import prefix_hashes, root_hash
from dragoman_agent.cache.hashing import PageHasher, Pages, check_page_size

ROOT = root_hash(b"digest")
TOKENS = list(range(1000, 1000 + 600))


@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_large_page_is_named_by_the_unit_at_its_end(page_size: int) -> None:
    pages = PageHasher(ROOT, page_size).extend(TOKENS, len(TOKENS) // page_size)
    units = prefix_hashes(ROOT, TOKENS)
    step = page_size // 64
    assert [p.digest for p in pages] == units[step - 1 :: step][: len(pages)]
    assert [u for p in pages for u in p.units] == units[: len(pages) * step]


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_small_pages_chain_on_their_own_and_units_end_in_their_last_page(page_size: int) -> None:
    num_pages = len(TOKENS) // page_size
    pages = PageHasher(ROOT, page_size).extend(TOKENS, num_pages)
    assert len({p.digest for p in pages}) == num_pages
    units = prefix_hashes(ROOT, TOKENS)
    assert [u for p in pages for u in p.units] == units
    ends = [i for i, p in enumerate(pages) if p.units]
    assert ends == [(k + 1) * 64 // page_size - 1 for k in range(len(units))]


def test_pages_grow_with_the_tokens_and_a_copy_goes_its_own_way() -> None:
    hasher = PageHasher(ROOT, 64)
    first = list(hasher.extend(TOKENS[:128], 2))
    copy = hasher.copy()
    assert copy.extend(TOKENS, 4)[:2] == first
    other = hasher.extend([*TOKENS[:128], *([7] * 64)], 3)
    assert other[2] != copy.pages[2]
    assert len(hasher.pages) == 3


def test_root_and_every_earlier_token_decide_the_name() -> None:
    names = {PageHasher(root_hash(b"digest", cache_salt=s), 64).extend(TOKENS, 3)[2].digest for s in ("", "a")}
    changed = [0, *TOKENS[1:]]
    names.add(PageHasher(ROOT, 64).extend(changed, 3)[2].digest)
    assert len(names) == 3


@pytest.mark.parametrize("page_size", [0, -64, 48, 96, 100])
def test_page_sizes_that_do_not_fit_units_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match="page size"):
        check_page_size(page_size)


def test_pages_are_hashed_when_they_are_looked_at() -> None:
    hasher = PageHasher(ROOT, 64)
    pages = Pages(hasher, TOKENS, 5)
    assert (len(pages), len(hasher.pages)) == (5, 0)
    assert next(iter(pages)) == pages[0] and len(hasher.pages) == 1
    assert next(pages.behind(2)) == pages[2] and len(hasher.pages) == 3
    hasher.extend(TOKENS, 9)
    assert list(pages) == hasher.pages[:5], "no more than asked for, though more are hashed"
    assert list(pages.behind(5)) == []
    for index in (5, -1):
        with pytest.raises(IndexError):
            pages[index]
