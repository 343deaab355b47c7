"""Docstrings put together from parts."""

from __future__ import annotations

from shardwright.interop.easydel import add_start_docstrings


def test_the_parts_come_first() -> None:
    @add_start_docstrings("First. ", "Second. ")
    def documented() -> int:
        """Own."""
        return 7

    assert documented.__doc__ == "First. Second. Own."
    assert documented() == 7
    assert documented.__name__ == "documented"


def test_what_has_no_docstring_gets_one() -> None:
    @add_start_docstrings("Only this.")
    class Bare:
        pass

    assert Bare.__doc__ == "Only this."
    assert isinstance(Bare(), Bare)


def test_a_base_class_keeps_its_own() -> None:
    class Base:
        """Base."""

    @add_start_docstrings("Shared.")
    class Derived(Base):
        pass

    assert (Base.__doc__, Derived.__doc__) == ("Base.", "Shared.")
