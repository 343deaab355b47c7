"""Patterns of `[[tensors]]` entries: regular expressions whose search takes linear time.

Python's `re` backtracks, so a short pattern in a file could search for years: `(a+)+b` or
`(a|a)(a|a)...`, for instance. The patterns here are a subset of the syntax of `re`, with the same
meaning. A pattern is compiled to a nondeterministic automaton (Thompson's construction). A search
follows all threads of the automaton at once, one character at a time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final

from shardwright.errors import StrategyError

MOST_CHARACTERS: Final = 1000
MOST_STEPS: Final = 1000
DEEPEST: Final = 32
# Limits of a pattern's cache: sets of threads, and characters for each set. The cache makes it fast
# to search text that occurs in many paths.
_MOST_STATES: Final = 500
_MOST_SYMBOLS: Final = 300

_TAKE, _SPLIT, _JUMP, _REQUIRE, _MATCH = range(5)
_FLAGS: Final = {"a": re.ASCII, "i": re.IGNORECASE, "s": re.DOTALL, "u": re.UNICODE}
_COUNT: Final = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-3][0-7]{2}|.)",
    re.DOTALL,
)
_OPENING: Final = re.compile(r"\((?:\?:|\?P<[^>]*>|(?!\?))")
_GLOBAL_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]+)\)")
_ASSERTIONS: Final = {
    "^": "start",
    "$": "end",
    "\\A": "start",
    "\\Z": "very end",
    "\\b": "edge",
    "\\B": "no edge",
}
_REQUIREMENTS: Final = ("start", "end", "very end", "edge", "no edge")
# The symbol of a newline at the end of a path. `$` matches before it, but before no other newline.
_LAST_NEWLINE: Final = "\n$"
_AT_START, _AFTER_WORD, _AFTER_OTHER = range(3)

_EARLIER = (
    "write the exception as a [[tensors]] entry of its own before this one: the first that "
    "matches and names the axis applies"
)
_SUBSET = (
    'a pattern has characters, ".", classes, groups, "|", "*", "+", "?", counts, "^", "$" and "\\b"'
)
_REFUSED: Final = (
    (re.compile(r"\(\?<?[=!]"), "looks ahead or behind", _EARLIER),
    (re.compile(r"\(\?P=|\(\?\(|\\[1-9]"), "refers back to a group", _SUBSET),
    (re.compile(r"\(\?>"), "has an atomic group", "write (?:...)"),
    (re.compile(r"\(\?#"), "has a comment", "write the comment in the file, after a #"),
    (
        re.compile(r"\(\?"),
        "changes flags",
        "write (?i) at the very start of the pattern, or a class such as [Aa]",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A part of a pattern: one character, an assertion, a sequence, a choice, or a repetition.

    `literal` is the character that an atom matches, or empty for a class, a dot or an escape.
    """

    kind: str
    text: str = ""
    literal: str = ""
    parts: tuple[_Node, ...] = ()
    least: int = 1
    most: int | None = 1


@dataclasses.dataclass(slots=True, eq=False)
class _State:
    """The threads between two characters, the character before them, and the next states."""

    threads: frozenset[int]
    before: int
    following: dict[str, _State] = dataclasses.field(default_factory=dict)


_MATCHED: Final = _State(frozenset(), -1)


class PathPattern:
    """A compiled pattern.

    >>> PathPattern("(attn|mlp)/.*kernel$").matches("blocks/0/mlp/up/kernel")
    True

    Raises:
      StrategyError: The text is not a regular expression, exceeds a limit, or uses syntax of `re`
        that these patterns do not support.
    """

    def __init__(self, text: str) -> None:
        check_syntax(text)
        node, flags = _Parser(text).parse()
        self.text = text
        self._code: list[tuple[int, int, int]] = []
        self._atoms: list[str] = []
        self._emit(node)
        self._code.append((_MATCH, 0, 0))
        self._flags = flags
        self._word = re.compile(r"\w", flags)
        self._taken: list[dict[str, bool]] = [{} for _ in self._atoms]
        self._states: dict[tuple[frozenset[int], int], _State] = {}
        self._needle = "" if flags & re.IGNORECASE else _needle(node)
        self._is_needle = self._needle == text

    @property
    def steps(self) -> int:
        """Number of instructions, which bounds the work of a search for each character."""
        return len(self._code)

    def matches(self, path: str) -> bool:
        """Tell whether the pattern is found anywhere in a path, as `re.search` would."""
        # Most paths lack the text that a pattern requires, and most patterns are only that text.
        if self._needle not in path or self._is_needle:
            return self._needle in path
        state = self._state(frozenset(), _AT_START)
        for symbol in (*path[:-1], _LAST_NEWLINE) if path.endswith("\n") else path:
            following = state.following.get(symbol) or self._step(state, symbol)
            if following is _MATCHED:
                return True
            state = following
        return self._threads(state, None) is None

    # Instructions.

    def _emit(self, node: _Node) -> None:
        if node.kind == "atom":
            self._add(_TAKE, len(self._atoms))
            self._atoms.append(node.text)
        elif node.kind == "assertion":
            self._add(_REQUIRE, _REQUIREMENTS.index(node.text))
        elif node.kind == "sequence":
            for part in node.parts:
                self._emit(part)
        elif node.kind == "choice":
            self._emit_choice(node.parts)
        else:
            self._emit_repetition(node)

    def _add(self, operation: int, first: int = 0, second: int = 0) -> int:
        if len(self._code) >= MOST_STEPS:
            what = (
                f"the pattern has more than {MOST_STEPS} steps, counted with its repetitions "
                f"written out"
            )
            raise StrategyError(
                what,
                fix=(
                    'write "*" or "+" for large counts, or split the pattern into several '
                    "[[tensors]] entries"
                ),
            )
        self._code.append((operation, first, second))
        return len(self._code) - 1

    def _emit_choice(self, parts: Iterable[_Node]) -> None:
        *others, last = parts
        jumps = []
        for part in others:
            split = self._add(_SPLIT)
            self._emit(part)
            jumps.append(self._add(_JUMP))
            self._code[split] = (_SPLIT, split + 1, len(self._code))
        self._emit(last)
        for jump in jumps:
            self._code[jump] = (_JUMP, len(self._code), 0)

    def _emit_repetition(self, node: _Node) -> None:
        (part,) = node.parts
        for _ in range(node.least):
            before = len(self._code)
            self._emit(part)
            if len(self._code) == before:
                return  # the part is empty, and so is any number of repetitions
        if node.most is None:
            loop = self._add(_SPLIT)
            self._emit(part)
            self._add(_JUMP, loop)
            self._code[loop] = (_SPLIT, loop + 1, len(self._code))
            return
        splits = []
        for _ in range(node.most - node.least):
            splits.append(self._add(_SPLIT))
            self._emit(part)
            if len(self._code) == splits[-1] + 1:
                break
        for split in splits:
            self._code[split] = (_SPLIT, split + 1, len(self._code))

    # The search.

    def _state(self, threads: frozenset[int], before: int) -> _State:
        state = self._states.get((threads, before))
        if state is None:
            if len(self._states) >= _MOST_STATES:
                self._states.clear()
            state = self._states[threads, before] = _State(threads, before)
        return state

    def _step(self, state: _State, symbol: str) -> _State:
        character = symbol[0]
        threads = self._threads(state, symbol)
        following = _MATCHED
        if threads is not None:
            alive = frozenset(at + 1 for at in threads if self._takes(self._code[at][1], character))
            following = self._state(alive, _AFTER_WORD if self._is_word(symbol) else _AFTER_OTHER)
        if len(state.following) < _MOST_SYMBOLS:
            state.following[symbol] = following
        return following

    def _threads(self, state: _State, symbol: str | None) -> list[int] | None:
        """Return the threads that need a character in order to continue, or None on a match.

        `symbol` is the next character, or None at the end of the text. Assertions depend on it.
        """
        waiting = [*state.threads, 0]  # a match may start anywhere
        visited: set[int] = set()
        taking = []
        while waiting:
            at = waiting.pop()
            if at in visited:
                continue
            visited.add(at)
            operation, first, second = self._code[at]
            if operation == _MATCH:
                return None
            if operation == _TAKE:
                taking.append(at)
            elif operation == _SPLIT:
                waiting += (first, second)
            elif operation == _JUMP:
                waiting.append(first)
            elif _holds(_REQUIREMENTS[first], state.before, self._is_word(symbol), symbol):
                waiting.append(at + 1)
        return taking

    def _is_word(self, symbol: str | None) -> bool:
        return symbol is not None and self._word.match(symbol[0]) is not None

    def _takes(self, atom: int, character: str) -> bool:
        cache = self._taken[atom]
        matches = cache.get(character)
        if matches is None:
            matches = re.compile(self._atoms[atom], self._flags).fullmatch(character) is not None
            if len(cache) < _MOST_SYMBOLS:
                cache[character] = matches
        return matches


def _holds(requirement: str, before: int, ahead: bool, symbol: str | None) -> bool:
    """Tell whether an assertion holds at a position.

    Args:
      requirement: One of `_REQUIREMENTS`.
      before: The kind of the previous character, such as `_AFTER_WORD`.
      ahead: Whether the next character belongs to a word.
      symbol: The next character, or None at the end.
    """
    if requirement == "start":
        return before == _AT_START
    if requirement == "end":
        return symbol is None or symbol == _LAST_NEWLINE
    if requirement == "very end":
        return symbol is None
    return ((before == _AFTER_WORD) != ahead) == (requirement == "edge")


def _needle(node: _Node) -> str:
    """Return the longest literal text of the outermost sequence, which every match contains."""
    parts = node.parts if node.kind == "sequence" else (node,)
    runs = "".join(part.literal or "\0" for part in parts).split("\0")
    return max(runs, key=len)


def check_syntax(text: object) -> None:
    """Check that a text is a regular expression and not too long.

    Raises:
      StrategyError: The text is not a regular expression, or it is too long.
    """
    if not isinstance(text, str):
        raise StrategyError(f"{text!r} is not a pattern", fix="write a regular expression as text")
    if len(text) > MOST_CHARACTERS:
        fix = "split it into several [[tensors]] entries"
        raise StrategyError(
            f"the pattern has {len(text)} characters, at most {MOST_CHARACTERS} are read", fix=fix
        )
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        reason, at = (error.msg, error.pos or 0) if isinstance(error, re.error) else (str(error), 0)
        raise StrategyError(
            f"not a regular expression: {reason}",
            snippet=f"{text}\n{' ' * at}^",
            fix="see the documentation of Python's re",
        ) from error


class _Parser:
    """Parse a pattern that `re` accepts into nodes. Refuse syntax that is not supported."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def parse(self) -> tuple[_Node, re.RegexFlag]:
        """Return the pattern and its flags."""
        flags = re.NOFLAG
        while letters := _GLOBAL_FLAGS.match(self.text, self.at):
            if not set(letters[1]) <= _FLAGS.keys():
                raise self._refused(
                    "changes flags", "of the flags only (?a), (?i), (?s) and (?u) can be set"
                )
            for letter in letters[1]:
                flags |= _FLAGS[letter]
            self.at = letters.end()
        return self._choice(), flags

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self.text.startswith("|", self.at):
            self.at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("choice", parts=tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._item()))
        return _Node("sequence", parts=tuple(parts))

    def _item(self) -> _Node:
        character = self.text[self.at]
        if character == "(":
            return self._group()
        end = self.at + 1
        if character == "[":
            end = self._class_end()
        elif character == "\\":
            escape = _ESCAPE.match(self.text, self.at)
            assert escape is not None, "re accepts the pattern"
            end = escape.end()
        item = self.text[self.at : end]
        if item in _ASSERTIONS:
            self.at = end
            return _Node("assertion", text=_ASSERTIONS[item])
        if re.fullmatch(r"\\[1-9][0-9]?", item):
            raise self._refused("refers back to a group", _SUBSET)
        self.at = end
        if len(item) > 1 or item == ".":
            return _Node("atom", text=item)
        return _Node("atom", text=re.escape(item), literal=item)

    def _class_end(self) -> int:
        at = self.at + (2 if self.text.startswith("[^", self.at) else 1)
        # A "]" that comes first in a class is an ordinary character.
        at += self.text.startswith("]", at)
        while self.text[at] != "]":
            at += 2 if self.text[at] == "\\" else 1
        return at + 1

    def _group(self) -> _Node:
        opening = _OPENING.match(self.text, self.at)
        if opening is None:
            for pattern, what, fix in _REFUSED:
                if pattern.match(self.text, self.at):
                    raise self._refused(what, fix)
            raise self._refused("has a group of another kind", _SUBSET)
        if self.depth >= DEEPEST:
            raise self._refused(
                f"has more than {DEEPEST} groups within each other",
                "write it without some of the groups",
            )
        self.at, self.depth = opening.end(), self.depth + 1
        inner = self._choice()
        self.at, self.depth = self.at + 1, self.depth - 1
        return inner

    def _repeated(self, item: _Node) -> _Node:
        bounds: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        least, most = bounds.get(self.text[self.at : self.at + 1], (1, 1))
        counted = _COUNT.match(self.text, self.at)
        if (least, most) != (1, 1):
            self.at += 1
        elif counted and (counted[1] or counted[2]):
            least = int(counted[1] or 0)
            most = int(counted[3]) if counted[3] else None
            if not counted[2]:  # {3}, without a comma
                most = least
            self.at = counted.end()
        else:
            return item
        if self.text.startswith("+", self.at):
            raise self._refused("has a possessive repetition", "remove the second +")
        # Skip the "?" of a lazy repetition. It only changes where a match ends.
        self.at += self.text.startswith("?", self.at)
        return _Node("repetition", parts=(item,), least=least, most=most)

    def _refused(self, what: str, fix: str) -> StrategyError:
        return StrategyError(
            f"the pattern {what}, which [[tensors]] patterns do not support",
            snippet=f"{self.text}\n{' ' * self.at}^",
            fix=fix,
        )
