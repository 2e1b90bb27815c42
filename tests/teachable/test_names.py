"""Names of classes: refused before work is done, or shown so that they can do no harm, wherever they come from."""

from __future__ import annotations

import pytest

from fscil.errors import UserError
from fscil.teachable.names import check_class_name, check_class_names
from fscil.text import printable


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "1 to 200 printable"),
        ("x" * 201, "1 to 200 printable"),
        ("caf\udce9", r"caf\\udce9.* is not valid text \(UTF-8\)"),
        (b"caf\xe9".decode(errors="replace"), r"is not valid text \(UTF-8\)"),
        ("red\x1b[31m", r"red\\x1b\[31m.* printable"),
        ("a\nb", "printable"),
        ("a\u2028b", "printable"),
        ("safe\u202egpj.exe", r"safe\\u202egpj"),
        ("\u200b\u2060", "nothing of it can be seen"),
        ("unknown", "what pictures of no class are called"),
        ("Unknown", "what pictures of no class are called"),
        ("un\u200bknown", "what pictures of no class are called"),
        ("\uff55nknown", "what pictures of no class are called"),
        ("ro\u200bse", 'looks like the known class "rose"'),
        ("\u2060rose", 'looks like the known class "rose"'),
        ("\uff52ose", 'looks like the known class "rose"'),
        ("rose\ufe0f", 'looks like the known class "rose"'),
        ("tea  rose", 'looks like the known class "tea rose"'),
        ("\ufb01g", 'looks like the known class "fig"'),
    ],
)
def test_what_cannot_be_a_name(name, message):
    with pytest.raises(UserError, match=message) as error:
        check_class_name(name, ["rose", "tea rose", "fig"])
    assert "\n" not in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize("name", ["Rose", "roses", "鷺", "Möwe", "कि", "کتاب‌ها", "👩‍🚀", "C++", "100%", "<b>", "3"])
def test_what_can_be_a_name(name):
    assert check_class_name(f" {name} ", ["rose", "कु"]) == name


def test_a_known_class_may_be_named_as_it_is():
    assert check_class_name("unknown", ["unknown"]) == "unknown"  # of a model made before the word was reserved
    assert check_class_name("cafe\u0301", ["caf\u00e9"]) == "caf\u00e9"
    assert check_class_name(3, [1, 2]) == 3


def test_names_are_checked_against_one_another_and_case_is_noted():
    assert check_class_names(["a", "b", "a"], ["c"]) == []
    assert check_class_names(["Rose", "rose"], ["fig"]) == ['"rose" and "Rose" differ in case only and are two classes']
    assert check_class_names(["FIG"], ["fig"]) == ['"FIG" and "fig" differ in case only and are two classes']
    assert check_class_names(["fig"], ["fig", "FIG"]) == []
    with pytest.raises(UserError, match="looks like"):
        check_class_names(["rose", "ro\u200dse"])


def test_what_is_shown_can_be_shown():
    for text in ("red\x1b[31m", "caf\udce9", "a\u202eb", "a\tb\r"):
        assert printable(text).isprintable() and printable(text).encode()
    assert printable("Möwe 鷺 👩‍🚀") == "Möwe 鷺 👩‍🚀"
