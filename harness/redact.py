"""Redaction: private values out, placeholders in, the same placeholder for the same value everywhere.

    redactor = Redactor(taken=placeholders_in(texts))
    for text in texts: redactor.text(text)            # learns
    clean = [redactor.text(text) for text in texts]   # replaces, also what only another text gave away

Rules (`harness.redact_rules`) find a value where its surroundings give it away; then every other occurrence of it
is replaced too, but for values so plain (a request's text ``error``, a password of digits, ``token: Sequence`` in a
line of source) that half the words would go: those are replaced only where a rule finds them. Idempotent: a text
that was redacted stays as it is. Pure; which files are treated is the bundle's business.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from harness.redact_rules import (
    KINDS,
    PATHS,
    RULES,
    Kind,
    Rule,
    kind_of_key,
    private_folder,
    public_name,
    secret_name,
)

_PASSES = 8
"""A pass may uncover what the one before hid; more than three were never seen."""
_PLACEHOLDER = re.compile(rf"(?:{'|'.join(KINDS)})-\d+(?!\d)")
_MEMO_CHARACTERS = 400
_NUMBERS = (int, float, bool)
_FLAGS = re.IGNORECASE | re.ASCII
_MARKS = 0x10_0000
"""Inside, a placeholder is one character of the private plane from here on: no rule takes it for a word, and
nothing is replaced within one."""
_MARK = re.compile("[\U00100000-\U0010ffff]")


def placeholders_in(texts: Iterable[str]) -> frozenset[str]:
    """What looks like a placeholder already: a host may really be called ``host-1``."""
    return frozenset(found for text in texts for found in _PLACEHOLDER.findall(text))


@dataclass(frozen=True, slots=True)
class _Original:
    """A value that is replaced wherever it occurs; ``folded`` is it in lower case."""

    kind: Kind
    text: str
    folded: str
    placeholder: str

    @property
    def edges(self) -> tuple[str, str]:
        """Patterns of the characters that must not stand before and behind it."""
        if self.kind == "ip":
            return r"[\w.]", r"\w|\.\d"
        if self.kind == "path":
            return r"[\w.~-]", r"[\w-]|\.\w"
        if self.kind in ("host", "user"):
            edge = "[A-Za-z0-9]" if len(self.text) >= 5 else r"\w"
            return edge, edge
        return ("", "") if len(self.text) >= 8 else (r"\w", r"\w")

    @property
    def pattern(self) -> str:
        before, behind = self.edges
        left = f"(?<!{before})" if before else ""
        right = f"(?!{behind})" if behind else ""
        return f"{left}{re.escape(self.text)}{right}"


class Redactor:
    """``taken``: placeholders that are not to be used. ``keep``: values that stay; ``keep_kinds``: kinds that do
    (``secret`` cannot). Not for several threads at once."""

    def __init__(
        self,
        *,
        taken: Iterable[str] = (),
        keep: Iterable[str] = (),
        keep_kinds: Iterable[Kind] = (),
    ) -> None:
        self._keep = {text.lower() for text in keep}
        self._keep_kinds = frozenset(keep_kinds) - {"secret"}
        self._taken = set(taken)
        self._names: dict[tuple[Kind, str], str] = {}
        self._originals: list[_Original] = []
        self._spread: set[str] = set()
        """Placeholders of the originals."""
        self._issued: dict[str, str] = {}
        """Marks by placeholder."""
        self._shows: dict[str, str] = {}
        self._kinds: dict[str, Kind] = {}
        self._memo: dict[str, tuple[str, Counter[Kind]]] = {}
        self.counts: Counter[Kind] = Counter()
        """How often something was replaced since it was last cleared."""

    @property
    def known(self) -> int:
        """How much is known; while it grows, texts that were treated before may hold more."""
        return len(self._issued) + len(self._originals)

    def placeholders(self) -> dict[Kind, list[str]]:
        return {kind: [name for name, of in self._kinds.items() if of == kind] for kind in KINDS}

    def learn(self, kind: Kind, value: str) -> None:
        """A value that is known to be private, as the name of the host. Public names are passed over."""
        if kind in ("host", "user") and public_name(value):
            return
        if kind not in self._keep_kinds and value.lower() not in self._keep and value not in self._issued:
            self._mark(kind, self._marked(value))
            first = value.partition(".")[0]
            if kind == "host" and first != value and not public_name(first):
                self._mark(kind, self._marked(first))

    # --- texts

    def text(self, text: str) -> str:
        """``text`` with placeholders."""
        known = self._memo.get(text)
        if known is None:
            before, known_before = self.counts, self.known
            self.counts = Counter()
            known = self._fixed(text), self.counts
            self.counts = before
            if self.known != known_before:
                self._memo.clear()
            elif len(text) <= _MEMO_CHARACTERS:
                self._memo[text] = known
        if known[1]:  # most texts hold nothing, and documents hold very many
            self.counts.update(known[1])
        return known[0]

    def document(self, document: Any) -> Any:
        """A JSON document with placeholders in its texts and keys; a text that is a JSON document itself is treated
        as one. Numbers stay."""
        if isinstance(document, Mapping):
            return self._table(document)
        if isinstance(document, list | tuple):
            return self._list(list(document))
        if not isinstance(document, str):
            return document
        if document[:1] in "{[" and (inner := _parsed(document)) is not None:
            return json.dumps(self.document(inner), separators=(",", ":"))
        return self.text(document)

    def left(self, text: str) -> list[str]:
        """Placeholders of the values that are still in ``text``: none, if all is well."""
        marked = self._marked(text)
        folded = marked.lower()
        return [one.placeholder for one in self._originals if one.folded in folded and _occurs(one, marked)]

    # --- inside

    def _fixed(self, text: str) -> str:
        marked = self._marked(text)
        for _ in range(_PASSES):
            before = marked
            marked = self._once(marked)
            if marked == before:
                break
        return self._shown(marked)

    def _marked(self, text: str) -> str:
        text = _MARK.sub("\ufffd", text)
        return _PLACEHOLDER.sub(lambda found: self._issued.get(found[0], found[0]), text)

    def _shown(self, marked: str) -> str:
        """A digit behind a placeholder would make it another one."""

        def shown(found: re.Match[str]) -> str:
            placeholder = self._shows[found[0]]
            return f"{placeholder}." if marked[found.end() : found.end() + 1].isdecimal() else placeholder

        return _MARK.sub(shown, marked)

    def _once(self, marked: str) -> str:
        for rule in (*RULES, PATHS):
            if rule.kind not in self._keep_kinds:
                marked = self._apply(rule, marked)
        return self._everywhere(marked)

    def _apply(self, rule: Rule, marked: str) -> str:
        pieces, place, position = [], 0, 0
        while (match := rule.pattern.search(marked, position)) is not None:
            value, (start, end) = match["value"], match.span("value")
            accepted = rule.accept(match)
            if rule is PATHS and accepted:
                value = private_folder((value + (match["rest"] or "")).rstrip("/"))
                end = start + len(value)
            if not accepted or _MARK.fullmatch(value) or value.lower() in self._keep:
                behind = match.end("name") if "name" in rule.pattern.groupindex else start + 1
                position = max(behind, position + 1)
                continue
            pieces += [marked[place:start], self._mark(rule.kind, value, everywhere=not rule.weak(match))]
            self.counts[rule.kind] += 1
            place = position = max(end, match.start() + 1)
        return "".join([*pieces, marked[place:]])

    def _everywhere(self, marked: str) -> str:
        folded = marked.lower()
        present = [one for one in self._originals if one.folded in folded]
        if not present:
            return marked
        by_text = {one.folded: one for one in present}

        def replaced(match: re.Match[str]) -> str:
            one = by_text[match[0].lower()]
            self.counts[one.kind] += 1
            return self._issued[one.placeholder]

        return _alternatives(tuple(one.pattern for one in present)).sub(replaced, marked)

    def _mark(self, kind: Kind, value: str, *, everywhere: bool = True) -> str:
        """The character that stands for ``value``, which is marked text. ``everywhere``: from now on replaced in
        all texts, if it is not too plain for that."""
        folded = value.lower() if kind in ("host", "user") else value
        name = self._names.get((kind, folded)) or self._named(kind, folded)
        if everywhere and name not in self._spread and _everywhere_too(kind, value):
            self._spread.add(name)
            self._originals.append(_Original(kind, value, value.lower(), name))
            self._originals.sort(key=lambda one: (-len(one.text), one.text))
            self._memo.clear()
        return self._issued[name]

    def _named(self, kind: Kind, folded: str) -> str:
        numbers = (f"{kind}-{number}" for number in count(1))
        name = next(one for one in numbers if one not in self._taken and one not in self._issued)
        mark = chr(_MARKS + len(self._issued))
        self._names[kind, folded] = name
        self._issued[name], self._shows[mark], self._kinds[name] = mark, name, kind
        self._memo.clear()
        return name

    def _table(self, table: Mapping[str, Any]) -> dict[str, Any]:
        named = table.get("name", table.get("key"))
        if isinstance(named, str) and isinstance(table.get("value"), str) and secret_name(named):
            table = {**table, "value": self._valued(named, str(table["value"]))}
        made: dict[str, Any] = {}
        for key, value in table.items():
            name = self.text(str(key))
            while name in made:
                name += "'"
            made[name] = self._valued(str(key), value) if isinstance(value, str) else self.document(value)
        return made

    def _valued(self, key: str, value: str) -> str:
        kind = kind_of_key(key, value)
        if kind is None or kind in self._keep_kinds or value.lower() in self._keep or value in self._issued:
            treated: str = self.document(value)
            return treated
        self.counts[kind] += 1
        self.learn(kind, value)
        return self._shows[self._mark(kind, self._marked(value))]

    def _list(self, items: list[Any]) -> list[Any]:
        """``["--api-key", "..."]`` is an option and its value."""
        if all(type(item) in _NUMBERS for item in items):
            return items
        made = []
        for before, item in zip([None, *items], items, strict=False):
            option = isinstance(before, str) and before.startswith("--") and "=" not in before
            if option and isinstance(item, str) and not item.startswith("--"):
                made.append(self._valued(str(before).lstrip("-"), item))
            else:
                made.append(self.document(item))
        return made


def _everywhere_too(kind: Kind, value: str) -> bool:
    if kind == "prompt":
        return len(value) >= 16
    if kind == "secret":
        return not value.isdecimal() and len(value) >= 3
    return True


def _occurs(one: _Original, text: str) -> bool:
    return re.search(one.pattern, text, _FLAGS) is not None


@lru_cache(maxsize=4096)
def _alternatives(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """The longest first."""
    return re.compile("|".join(patterns), _FLAGS)


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None
