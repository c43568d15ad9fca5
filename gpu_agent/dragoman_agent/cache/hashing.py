"""Names of KV pages by content: the chained prefix hash at each page's end, and the 64-token units that end in it.

The formula is `dragoman.prefix_hash`. A page that is a multiple of 64 tokens is named by the unit hash at its end. A smaller
page divides 64 and is named by a chain of its own over pages, from the same root; a unit then ends in its last page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dragoman.prefix_hash import UNIT_TOKENS, next_hash


class PageHash(NamedTuple):
    """Name of one full page; equal names mean equal tokens from the start of the sequence on."""

    digest: bytes  # 32 bytes
    units: tuple[bytes, ...]  # hashes of the 64-token units whose last token lies in this page, 32 bytes each


class PageHasher:
    """Page hashes of one growing sequence of tokens. Each token is hashed once, whatever happens to its blocks."""

    __slots__ = ("_page_parent", "_unit_parent", "page_size", "pages")

    def __init__(self, root: bytes, page_size: int) -> None:
        """`root` is h0. Raises ValueError when pages and units do not fit each other."""
        check_page_size(page_size)
        self.page_size = page_size
        self.pages: list[PageHash] = []
        self._page_parent = root
        self._unit_parent = root

    def copy(self) -> PageHasher:
        """A hasher that continues from here on its own, for another choice of the same prompt."""
        clone = PageHasher.__new__(PageHasher)
        clone.page_size = self.page_size
        clone.pages = list(self.pages)
        clone._page_parent = self._page_parent
        clone._unit_parent = self._unit_parent
        return clone

    def extend(self, token_ids: Sequence[int], num_pages: int) -> list[PageHash]:
        """The first `num_pages` pages of `token_ids`, hashing those not hashed yet."""
        while len(self.pages) < num_pages:
            self._hash_next(token_ids)
        return self.pages

    def _hash_next(self, token_ids: Sequence[int]) -> None:
        start = len(self.pages) * self.page_size
        end = start + self.page_size
        units = []
        for unit_end in range(start - start % UNIT_TOKENS + UNIT_TOKENS, end + 1, UNIT_TOKENS):
            self._unit_parent = next_hash(self._unit_parent, token_ids[unit_end - UNIT_TOKENS : unit_end])
            units.append(self._unit_parent)
        if self.page_size >= UNIT_TOKENS:
            self._page_parent = self._unit_parent
        else:
            self._page_parent = next_hash(self._page_parent, token_ids[start:end])
        self.pages.append(PageHash(self._page_parent, tuple(units)))


class Pages:
    """The first pages of a sequence, each hashed when it is first looked at: who looks for what is cached stops where nothing is."""

    __slots__ = ("_count", "_hasher", "_token_ids")

    def __init__(self, hasher: PageHasher, token_ids: Sequence[int], count: int) -> None:
        """`count` pages; `token_ids` hold them."""
        self._hasher, self._token_ids, self._count = hasher, token_ids, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> PageHash:
        """One page, by its number from 0."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._hasher.extend(self._token_ids, index + 1)[index]

    def __iter__(self) -> Iterator[PageHash]:
        return self.behind(0)

    def behind(self, num_pages: int) -> Iterator[PageHash]:
        """All but the first `num_pages`."""
        return map(self.__getitem__, range(num_pages, self._count))


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless pages are made of whole 64-token units or units of whole pages."""
    if page_size < 1 or (page_size % UNIT_TOKENS and UNIT_TOKENS % page_size):
        raise ValueError(
            f"page size {page_size}: must divide {UNIT_TOKENS} or be a multiple of it, so that prefixes have one name; "
            "plan with 16, 32, 64, 128 or 256"
        )
