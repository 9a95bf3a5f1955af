"""Plain values out of pickles: what is followed is what Python's own reader makes of them, the rest is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.offline.pickled import plain_values

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert plain_values(pickle.dumps(value, protocol=protocol)) == value


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_anything_else_is_refused_with_one_kind_of_error(noise: bytes) -> None:
    try:
        plain_values(b"\x80\x02" + noise)
    except ValueError:
        return


@given(PLAIN, st.data())
def test_a_cut_file_is_refused(value: Any, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol=2)
    with pytest.raises(ValueError):
        plain_values(whole[: data.draw(st.integers(2, len(whole) - 1))])


def test_what_would_run_code_is_refused() -> None:
    for content in (pickle.dumps(print), pickle.dumps({1, 2}), pickle.dumps(ValueError("x"), protocol=0)):
        with pytest.raises(ValueError, match="more than plain values"):
            plain_values(content)


def test_few_bytes_do_not_become_endless_values() -> None:
    itself: list[Any] = []
    itself.append(itself)
    laughs: list[Any] = ["ha"] * 10
    for _ in range(12):
        laughs = [laughs] * 10
    for value in (itself, laughs):
        with pytest.raises(ValueError, match="too many, or lie in each other too deep"):
            plain_values(pickle.dumps(value))
