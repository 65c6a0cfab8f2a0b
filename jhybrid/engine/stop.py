"""Stop strings on a stream of text, independent of how the text is cut into pieces.

The stop string that is complete first ends the text, as it would character by character; of
several complete at the same character the longest wins. The text ends before it. Text is held
back only while it is the beginning of some stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """An Aho-Corasick automaton: its state is the longest suffix that begins a stop string.

    The depth of the state is therefore exactly how much text must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._stop: list[str | None] = [None]  # longest stop string that ends at this node
        self._depth = [0]
        self._node = 0
        self._held = ""
        for stop in stops:
            self._insert(stop)
        self._link()

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text that is now final, the stop string that ended it or None).

        With `armed` False stop strings that become complete in `text` are passed over; one that
        is complete later may still begin in it. After a match nothing may be pushed.
        """
        buffer = self._held + text
        for position, letter in enumerate(text, start=len(self._held) + 1):
            self._node = self._next(self._node, letter)
            stop = self._stop[self._node]
            if stop is not None and armed:
                self._node, self._held = 0, ""
                return buffer[: position - len(stop)], stop
            while self._node and not self._children[self._node]:
                self._node = self._fail[self._node]  # passed over: no longer a beginning
        final = len(buffer) - self._depth[self._node]
        self._held = buffer[final:]
        return buffer[:final], None

    def finish(self) -> str:
        """The held-back text, which no stop string can claim any more."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _next(self, node: int, letter: str) -> int:
        while node and letter not in self._children[node]:
            node = self._fail[node]
        return self._children[node].get(letter, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for letter in stop:
            child = self._children[node].get(letter)
            if child is None:
                child = len(self._children)
                self._children[node][letter] = child
                self._children.append({})
                self._fail.append(0)
                self._stop.append(None)
                self._depth.append(self._depth[node] + 1)
            node = child
        self._stop[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's fallback is shallower, so it is linked already."""
        nodes = deque(self._children[0].values())
        while nodes:
            node = nodes.popleft()
            for letter, child in self._children[node].items():
                self._fail[child] = self._next(self._fail[node], letter)
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                nodes.append(child)
