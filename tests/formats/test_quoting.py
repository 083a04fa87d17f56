"""Quoting: text that comes from files does nothing to a terminal, and has a bound."""

import unicodedata
from pathlib import Path

import pytest

from tokenloader.formats.quoting import shown


@pytest.mark.parametrize("text", ["", "train.bin", "データ [1]*.bin", "naïve 'quoted' \\n", "🙂" * 300])
def test_printable_text_stays_as_it_is(text):
    assert shown(text) == text


def test_every_character_that_is_not_printable_is_escaped():
    refused = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
    for first in range(0, 0x110000, 16):
        text = "".join(map(chr, range(first, first + 16)))
        printable = [c == " " or unicodedata.category(c) not in refused for c in text]
        expected = [c if is_kept else ascii(c)[1:-1] for c, is_kept in zip(text, printable, strict=True)]
        assert shown(text) == "".join(expected)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("\x1b[2J\x1b]52;c;cm0gLXJm\x07", r"\x1b[2J\x1b]52;c;cm0gLXJm\x07"),
        ("two\r\nlines\u2028more", r"two\r\nlines\u2028more"),
        ("\x9b31m \x7f", r"\x9b31m \x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        (Path("not utf-8 \udcff"), r"not utf-8 \udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_instead(text, escaped):
    assert shown(text) == escaped


@pytest.mark.parametrize("text", ["x" * 10**6, "\U0010ffff" * 10**6, "a" + "\n" * 299 + "z"])
def test_long_text_is_cut_in_its_middle(text):
    assert 290 <= len(shown(text)) <= 300
    assert "..." in shown(text)
    assert shown(text)[0] == shown(text[0])[0]
    assert shown(text)[-1] == shown(text[-1])[-1]
