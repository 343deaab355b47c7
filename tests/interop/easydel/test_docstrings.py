"""A decorator that adds shared text to docstrings."""

from __future__ import annotations

from shardwright.interop.easydel import add_start_docstrings


def test_parts_come_first() -> None:
    @add_start_docstrings("First. ", "Second. ")
    def documented() -> int:
        """Own."""
        return 7

    assert documented.__doc__ == "First. Second. Own."
    assert documented() == 7
    assert documented.__name__ == "documented"


def test_function_without_docstring() -> None:
    @add_start_docstrings("Only this.")
    class Bare:
        pass

    assert Bare.__doc__ == "Only this."
    assert isinstance(Bare(), Bare)


def test_base_class_is_unchanged() -> None:
    class Base:
        """Base."""

    @add_start_docstrings("Shared.")
    class Derived(Base):
        pass

    assert (Base.__doc__, Derived.__doc__) == ("Base.", "Shared.")
