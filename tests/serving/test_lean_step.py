"""What a decode step sends and takes: nothing beyond what its model needs."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

from shardwright.serving import arrays, steps
from shardwright.vocabulary.modes import MODE_DECODE
from tests.serving.test_same_text import engine, manager_of

COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def collectives(program: Any) -> list[str]:
    """Return the kind and the result of each collective of a compiled program, in order."""
    found = re.findall(rf"= (.*?) ({COLLECTIVES})\(", program.as_text())
    return sorted(f"{kind} {result}" for result, kind in found)


@pytest.mark.parametrize("kind", ["dense", "sliding"])
@pytest.mark.full(but=["dense"])
def test_decode_sends_what_its_model_sends(kind: str) -> None:
    """The model, and a gather of the logits: no temperature, count or token is sent."""
    held = engine(kind, manager_of("serve_tp"), slots=4, prefill_rows=2)._arrays
    setup, slots = held._setup, held.slots

    def model_alone(caches: Any, tokens: Any, valid: Any, params: Any) -> Any:
        logits, new = steps.read(setup.model, params, tokens, caches, valid)
        return steps.rows_by_slot(logits[:, 0], MODE_DECODE), new

    with setup.under(MODE_DECODE):
        alone = jax.jit(model_alone, donate_argnums=0).lower(
            slots.caches, slots.ends[:, :1], slots.ends[:, :1] > 0, setup.params
        )
        whole = arrays._decode.lower(
            setup.model, 1, slots.caches, slots.ends, slots.rules, setup.params
        )
    assert collectives(whole.compile()) == collectives(alone.compile()) != []


def test_decode_takes_no_array_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NumPy array would be sent to every device in each step."""
    held = engine("dense", manager_of("serve_tp"), slots=4, prefill_rows=2)._arrays
    given, decode = list[Any](), arrays._decode

    def watched(*args: Any) -> Any:
        given.extend(jax.tree.leaves(args[2:]))
        return decode(*args)

    monkeypatch.setattr(arrays, "_decode", watched)
    held.decode(dict)
    assert {isinstance(leaf, jax.Array) for leaf in given} == {True}


def test_emptying_slots_sends_nothing() -> None:
    """Every device empties its own slots, whatever the number of layers."""
    held: Any = engine("dense", manager_of("serve_tp"), slots=4, prefill_rows=2)._arrays
    with held._setup.under(MODE_DECODE):
        program = arrays._clear_slots.lower(held.slots, jax.numpy.zeros(4, "int32")).compile()
    assert collectives(program) == []
