"""A full cache drops the least recently used entries."""

from __future__ import annotations

from areal_agents.lru import LruCache


def test_the_most_recently_used_entries_are_kept() -> None:
    cache: LruCache[str, int] = LruCache(2)
    for name in "ab":
        cache.put(name, ord(name))
    assert cache.get("a") == ord("a")
    cache.put("c", 1)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (ord("a"), None, 1)


def test_the_total_size_is_right_after_entries_are_replaced_or_removed() -> None:
    cache: LruCache[str, bytes] = LruCache(10, len)
    cache.put("a", b"12345678")
    cache.put("a", b"1234")
    cache.put("b", b"123456")
    assert cache.get("a") == b"1234"
    cache.remove("b")
    cache.remove("b")
    cache.put("c", b"123456")
    assert cache.get("a") == b"1234"
    assert cache.put("d", bytes(11)) == bytes(11)
    assert [cache.get(name) for name in "abcd"] == [None] * 4


def test_an_entry_that_has_grown_has_its_new_size_when_it_is_put_again() -> None:
    cache: LruCache[str, bytearray] = LruCache(10, len)
    cache.put("a", bytearray(3))
    cache.put("b", grown := bytearray(3))
    grown += bytes(4)
    cache.put("b", grown)
    cache.put("c", bytearray(3))
    assert [cache.get(name) is not None for name in "abc"] == [False, True, True]
    grown += bytes(4)
    cache.put("b", grown)
    assert [cache.get(name) is not None for name in "bc"] == [False, False]
