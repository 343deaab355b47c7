"""The dims of a reshape that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Dims before a reshape, and dims after it.
Group = tuple[list[int], list[int]]


def equal_products(old: Sequence[int], new: Sequence[int]) -> Iterator[Group]:
    """Cut two shapes into the smallest groups of neighboring dims with equal products.

    >>> list(equal_products((5, 4, 6), (5, 3, 8)))
    [([0], [0]), ([1, 2], [1, 2])]
    """
    at_old = at_new = 0
    while at_old < len(old) or at_new < len(new):
        before, after = [], []
        product_old = product_new = 1
        if at_old < len(old):
            before, product_old, at_old = [at_old], old[at_old], at_old + 1
        if at_new < len(new):
            after, product_new, at_new = [at_new], new[at_new], at_new + 1
        while product_old != product_new:
            if product_old < product_new and at_old < len(old):
                before.append(at_old)
                product_old, at_old = product_old * old[at_old], at_old + 1
            elif at_new < len(new):
                after.append(at_new)
                product_new, at_new = product_new * new[at_new], at_new + 1
            else:
                break
        yield before, after
