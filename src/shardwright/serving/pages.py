"""Record which request uses which pages of the pool. This needs no arrays and no devices.

A request takes pages as its text grows, and gives its pages back when it ends. Full pages are
shared by all requests whose texts begin with the same tokens. A page that no request uses keeps its
content until the page is needed.

Full pages are found by their content in a tree of prefixes. Keys are compared as tuples of tokens,
so two prefixes never share a page by a collision of hashes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

# Entry of a table in place of a page that was given back.
NO_PAGE = -1
PageKey = tuple[int, ...]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class PageTable:
    """The pages of a request.

    Attributes:
      node: Node of the last page of the request that is in the tree of prefixes.
      pages: Page numbers, in the order of the text. NO_PAGE stands for a page before the window.
      shared: Number of leading pages of the request that are in the tree of prefixes.
      left: Number of leading pages of the request that were given back.
    """

    node: Node
    pages: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0
    left: int = 0


class Pages:
    """The pages of a pool.

    Attributes:
      count: Number of pages.
      size: Rows of a page.
      prefixes: Tree of full pages by content.
      hits: Number of pages that requests shared with earlier requests instead of computing them
        again.
    """

    def __init__(self, *, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.prefixes = Prefixes()
        self.hits = 0
        self._references = [0] * count
        self._free = list(reversed(range(count)))

    @property
    def available(self) -> int:
        """Number of pages that no request uses."""
        return len(self._free) + len(self.prefixes.unused)

    @property
    def used(self) -> int:
        """Number of pages that requests use."""
        return self.count - self.available

    def open(self) -> PageTable:
        """Return a table without pages."""
        return PageTable(node=self.prefixes.root)

    def missing(self, table: PageTable, tokens: int) -> int:
        """Return how many more pages a table needs for a number of tokens."""
        return max(-(-tokens // self.size) - len(table.pages), 0)

    def grow(self, table: PageTable, tokens: int) -> bool:
        """Add pages until a table has room for a number of tokens.

        If too few pages are left, add none.
        """
        count = self.missing(table, tokens)
        if count > self.available:
            return False
        for _ in range(count):
            # Pages with a prefix that other requests may share are taken last. Of these, the least
            # recently used pages are taken first.
            if not self._free:
                self._free += self.prefixes.drop_oldest()
            page = self._free.pop()
            self._references[page] = 1
            table.pages.append(page)
        return True

    def adopt(self, table: PageTable, tokens: Sequence[int], read: int) -> int:
        """Share pages of other requests, if these pages have the next tokens.

        Args:
          table: The table of a request.
          tokens: Tokens that the request must read. The request reads at least its last token
            itself, because it needs the logits of that token.
          read: Number of tokens that the request has read.

        Returns:
          Number of tokens that the request has read or adopted.
        """
        while read % self.size == 0 and read + self.size < len(tokens):
            column = read // self.size
            node = table.node.children.get(tuple(tokens[read : read + self.size]))
            # Adopt no page if the table has pages that are not written: it would have to give these
            # pages back first.
            if node is None or column != table.shared or column != len(table.pages):
                break
            self.prefixes.use(node.page)
            self._references[node.page] += 1
            table.pages.append(node.page)
            table.node, table.shared = node, column + 1
            self.hits += 1
            read += self.size
        return read

    def offer(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Let other requests share the pages that these tokens have filled.

        Args:
          table: The table of the request that wrote the pages.
          tokens: All tokens of this request whose keys and values are written.
        """
        # After `forget`, pages of this table may hold keys and values of the old weights, so share
        # no more of these pages.
        while table.node.is_linked and (table.shared + 1) * self.size <= len(tokens):
            first, page = table.shared * self.size, table.pages[table.shared]
            # A page before the window was given back, so the prefix cannot be complete.
            if page == NO_PAGE:
                return
            key = tuple(tokens[first : first + self.size])
            node = self.prefixes.add(table.node, key, page)
            if node is None:
                # Another request has shared a page with the same tokens. That page stays shared.
                node = table.node.children[key]
            table.node, table.shared = node, table.shared + 1

    def leave_before(self, table: PageTable, position: int) -> None:
        """Give back the pages whose positions are all below `position`."""
        while table.left < min(position // self.size, len(table.pages)):
            self._release(table.pages[table.left])
            table.pages[table.left] = NO_PAGE
            table.left += 1

    def close(self, table: PageTable) -> None:
        """Give back all pages of a table."""
        # Give back the last page first: a page is useless without the pages before it, so the last
        # page should be reused first.
        for page in reversed(table.pages):
            if page != NO_PAGE:
                self._release(page)
        table.pages.clear()
        table.node, table.shared, table.left = self.prefixes.root, 0, 0

    def forget(self) -> None:
        """Stop sharing all pages, because the weights or the arrays were replaced."""
        self._free += self.prefixes.clear()

    def _release(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self.prefixes:
            self.prefixes.leave(page)
        else:
            self._free.append(page)


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A page that other requests may share.

    Attributes:
      page: Number of the page. -1 for the root, which has no page.
      parent: Node of the page before it. None for the root.
      key: The tokens in the page.
      children: Nodes of the pages that continue the text, by their tokens.
      is_linked: Whether the node is in the tree. A node outside of the tree gets no children.
    """

    page: int = -1
    parent: Node | None = None
    key: PageKey = ()
    children: dict[PageKey, Node] = dataclasses.field(default_factory=dict)
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

    def add(self, parent: Node, key: PageKey, page: int) -> Node | None:
        """Add a page in use.

        Return the node of the page, or None if another page has this content.
        """
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
        """Remove the least recently used page and all pages below it from the tree.

        Return those of the removed pages that no request uses.
        """
        node = next(iter(self.unused.values()))
        if node.parent is not None:
            del node.parent.children[node.key]
        return self._drop(node)

    def clear(self) -> list[int]:
        """Remove all pages from the tree. Return those that no request uses."""
        old, self.root = self.root, Node()
        return self._drop(old)

    def _drop(self, top: Node) -> list[int]:
        dropped = []
        # Not recursive: a long text has thousands of pages, one below the other.
        stack = [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            node.is_linked = False
            # A table may still have this node. The table must not find the pages below this node,
            # because they will get other content.
            node.children = {}
            self._nodes.pop(node.page, None)
            if self.unused.pop(node.page, None) is not None:
                dropped.append(node.page)
        return dropped
