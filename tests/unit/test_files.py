"""Single files of a log: what their ends say."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from llmtrack.query.read.files import Reached, Sealed, check_sealed, look_at_sealed, parse_sealed, sealed_reached
from llmtrack.writer.log.seal import seal_part
from tests.handmade import DAY, write_part

NAMES = ["b", "a", 'llmtrack.format\x18\x05llmtrack.tokens_min\x18\x019\x00"', "損失"]
LOOKS = [look_at_sealed, parse_sealed, check_sealed]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """Return a sealed part whose last row is not the furthest, with names that look like the keys of a footer."""
    rows = [
        {"seq": seq, "tokens": tokens, "step": tokens // 10, "time": DAY, "name": name, "value": 1.0}
        for seq, (tokens, name) in enumerate(zip((500, 900, 800, 700), NAMES, strict=True), start=7)
    ]
    return seal_part(write_part(tmp_path, "metrics", rows))


@pytest.mark.parametrize("look", LOOKS)
def test_a_footer_says_what_is_in_a_part(look: Callable[[str], Sealed], sealed: Path) -> None:
    """How far it goes, where it begins and which metrics it has, whatever they are called."""
    found = look(str(sealed))
    assert not found.fault
    assert (found.first_tokens, found.first_seq, found.names) == (500, 7, frozenset(NAMES))
    assert found.digest == pq.read_metadata(sealed).metadata[b"llmtrack.source_digest"]
    assert found.reached == sealed_reached(str(sealed)) == Reached(DAY, 90, 900)


@pytest.mark.parametrize("look", LOOKS)
def test_a_footer_that_says_nothing_promises_nothing(look: Callable[[str], Sealed], tmp_path: Path) -> None:
    """Another program's, or an older one's: its statistics say how far it goes."""
    path = tmp_path / "metrics-00001.parquet"
    rows = pq.read_table(
        seal_part(write_part(tmp_path / "from", "metrics", [{"tokens": 30, "name": "a", "value": 1.0}]))
    )
    pq.write_table(rows.replace_schema_metadata(None), path)
    assert look(str(path)) == Sealed("")
    assert sealed_reached(str(path)) == Reached(DAY + dt.timedelta(seconds=1), 3, 30)


@pytest.mark.parametrize("look", LOOKS)
def test_a_part_without_a_row_reaches_nowhere(look: Callable[[str], Sealed], tmp_path: Path) -> None:
    """It has no first and no last place, no digest to compare, and no metric."""
    found = look(str(seal_part(write_part(tmp_path, "metrics", []))))
    assert found == Sealed("", names=frozenset())


def test_more_metrics_than_a_footer_should_hold_are_left_out_of_it(tmp_path: Path) -> None:
    """Nothing is known of them then, and the part is looked into."""
    rows = [{"name": f"{index:0200}", "tokens": 5, "value": 1.0} for index in range(100)]
    found = look_at_sealed(str(seal_part(write_part(tmp_path, "metrics", rows))))
    assert (found.names, found.first_tokens) == (None, 5)


@pytest.mark.parametrize("look", [parse_sealed, check_sealed])
def test_a_changed_byte_of_a_small_part_is_seen(look: Callable[[str], Sealed], sealed: Path) -> None:
    """Where all of a file was read anyway, all of it is compared."""
    data = bytearray(sealed.read_bytes())
    data[100] ^= 1
    sealed.write_bytes(data)
    assert look(str(sealed)).fault == "fails its checksum"
