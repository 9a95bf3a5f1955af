"""Plain values out of a pickle, without loading it. Pure.

What torch writes by itself at a timeout is a pickle, and the process that wrote it is gone. Its recorder holds
numbers, texts, lists, tuples and dicts alone (torch 2.4 to 2.13), and only the instructions that make those are
followed here, by a stack of our own: nothing is imported or called, so no code in the file can run. Any other
instruction is refused.
"""

from __future__ import annotations

import pickletools
from typing import Any

MOST_INSTRUCTIONS = 20_000_000
_MOST_VALUES = 8_000_000
"""Counted as whoever walks through them meets them: a file of some kilobytes can name one list a million times."""
_MOST_DEPTH = 32
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
        "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    }
)  # fmt: skip
"""Instructions that push what follows them."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_MARK = object()


def plain_values(content: bytes) -> Any:
    """What the pickle holds. Raises ValueError: it is cut, damaged or too large, or holds
    more than plain values."""
    try:
        found = _followed(content)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"damaged: {type(error).__name__}") from None
    _bounded(found)
    return found


def _followed(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for count, (code, argument, _) in enumerate(pickletools.genops(content)):
        name = code.name
        if count > MOST_INSTRUCTIONS:
            raise ValueError(f"more than {MOST_INSTRUCTIONS} instructions")
        if name in _ARGUMENTS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):
            _gathered(name, stack)
        elif name == "APPEND":
            _into(stack[-2], [stack.pop()])
        elif name == "SETITEM":
            pair = stack[-2:]
            del stack[-2:]
            _into(stack[-1], pair)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it holds more than plain values ({name.lower()})")
    raise ValueError("cut short")


def _gathered(name: str, stack: list[Any]) -> None:
    """What lies above the last mark."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise ValueError("damaged: no mark")
    values = stack[at + 1 :]
    del stack[at:]
    if name == "TUPLE":
        stack.append(tuple(values))
    elif name in ("LIST", "DICT"):
        stack.append([] if name == "LIST" else {})
        _into(stack[-1], values)
    else:
        _into(stack[-1], values)


def _into(container: Any, values: list[Any]) -> None:
    if isinstance(container, list):
        container += values
    elif isinstance(container, dict):
        container.update(zip(values[::2], values[1::2], strict=True))
    else:
        raise TypeError("neither list nor dict")


def _bounded(value: Any) -> None:
    left = [(value, 0)]
    seen = 0
    while left:
        one, depth = left.pop()
        seen += 1
        if seen > _MOST_VALUES or depth > _MOST_DEPTH:
            raise ValueError("its values are too many, or lie in each other too deep")
        if isinstance(one, list | tuple):
            left += [(part, depth + 1) for part in one]
        elif isinstance(one, dict):
            left += [(part, depth + 1) for part in one.values()]
