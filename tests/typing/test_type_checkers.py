"""Each public sampler is in the program beside this file, whose types `make check` lets mypy and pyright check."""

from pathlib import Path

from support.draw.orders import public_samplers

PROGRAM = Path(__file__).with_name("typed_program.py")


def test_every_public_sampler_is_in_the_program() -> None:
    """The types of each class of samplers are checked."""
    assert [name for name in public_samplers() if f"millstream.{name}(" not in PROGRAM.read_text()] == []
