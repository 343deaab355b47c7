"""Find full pages by their content, in a tree.

A node is a page. The key of a node is the tuple of tokens in its page, and its parent is the page
before it in the text. Keys are compared as tuples, so two prefixes never share a page by a
collision of hashes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

Key = tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A page that others may share.

    Attributes:
      page: Its number. -1 for the root, which has no page.
      parent: The page before it. None for the root.
      key: The tokens in it.
      children: The pages that continue it, by their tokens.
      is_linked: Whether it is in the tree. No child is added to a node that is not.
    """

    page: int = -1
    parent: Node | None = None
    key: Key = ()
    children: dict[Key, Node] = dataclasses.field(default_factory=dict)
    is_linked: bool = True


class Prefixes:
    """The tree of full pages.

    Attributes:
      root: The node of the empty prefix.
      unused: Nodes whose pages no request uses, by page; the least recently used ones first.
    """

    def __init__(self) -> None:
        self.root = Node()
        self.unused: collections.OrderedDict[int, Node] = collections.OrderedDict()
        self._nodes: dict[int, Node] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def add(self, parent: Node, key: Key, page: int) -> Node | None:
        """Add a page in use. Return its node, or None if another page has this content."""
        if key in parent.children:
            return None
        node = Node(page=page, parent=parent, key=key)
        parent.children[key] = self._nodes[page] = node
        return node

    def use(self, page: int) -> None:
        """Record that a request uses a page."""
        self.unused.pop(page, None)

    def leave(self, page: int) -> None:
        """Record that no request uses a page any more."""
        self.unused[page] = self._nodes[page]

    def drop_oldest(self) -> list[int]:
        """Remove the least recently used page and all pages below it. Return the unused ones."""
        node = next(iter(self.unused.values()))
        if node.parent is not None:
            del node.parent.children[node.key]
        return self._drop(node)

    def clear(self) -> list[int]:
        """Remove all pages. Return the unused ones."""
        old, self.root = self.root, Node()
        return self._drop(old)

    def _drop(self, top: Node) -> list[int]:
        dropped = []
        for node in _subtree(top):
            node.is_linked = False
            # A table may still have this node. It must not find pages below it that were reused.
            node.children = {}
            self._nodes.pop(node.page, None)
            if self.unused.pop(node.page, None) is not None:
                dropped.append(node.page)
        return dropped


def _subtree(node: Node) -> Iterator[Node]:
    # Not recursive: a long text has thousands of pages, one below the other.
    stack = [node]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
