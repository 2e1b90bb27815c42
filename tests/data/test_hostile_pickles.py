"""Pickles made by hand to cost memory, time or the stack: refused at once, at the cost of their own size."""

import struct
import tracemalloc

import numpy as np
import pytest

from fscil.data.plain_pickle import read_plain_pickle
from fscil.errors import UserError

START = b"\x80\x02"
EMPTY_ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
UINT8 = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def array(shape: bytes, data: bytes) -> bytes:
    """An ndarray whose shape is whatever these opcodes leave on the stack."""
    return EMPTY_ARRAY + b"(K\x01" + shape + UINT8 + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"


def file_of(value: bytes) -> bytes:
    return START + b"}U\x04data" + value + b"s."


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


DOUBLED = b"]q\x00(K\x01K\x01e" + b"".join(b"]q%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(1, 35))
LONG = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000
ENCODED = b"X\x06\x00\x00\x00latin1\x86R"
HOSTILE = {
    "a shape whose product is gigabytes of text": file_of(array(b"(U\x10" + b"x" * 16 + number(2**30) + b"t", b"")),
    "a shape of other things": file_of(array(b"(](K\x01etK\x01\x86", b"x")),
    "a shape with a truth value": file_of(array(b"\x88\x85", b"x")),
    "negative sizes": file_of(array(number(-1) + number(-1) + b"\x86", b"x")),
    "a product of thousands of sizes": file_of(array(b"(" + number(2**31 - 1) * 5000 + b"t", b"x")),
    "a shape that is a number": file_of(array(b"K\x01", b"x")),
    "lists of lists that stand for billions": file_of(DOUBLED),
    "a list in itself": file_of(b"]q\x00h\x00a"),
    "a key that takes for ever to hash": START + b"}" + b"K\x01\x85q\x00" + b"h\x00h\x00\x86q\x00" * 40 + b"K\x01s.",
    "tuples a million deep": START + b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.",
    "values a million deep": file_of(b")" + b"\x85" * 1_000_000),
    "text encoded again and again": file_of(
        b"c_codecs\nencode\nq\x00" + LONG + b"q\x01" + ENCODED + (b"h\x00h\x01" + ENCODED) * 1000
    ),
    "a long key again and again": START + b"}" + LONG + b"q\x00K\x01s" + b"h\x00K\x01s" * 9999 + b".",
    "more bytes than there are": file_of(b"T" + struct.pack("<i", 2**31 - 1) + b"x"),
    "a length below zero": file_of(b"T" + struct.pack("<i", -5) + b"x"),
    "a text of four gigabytes": file_of(b"X" + struct.pack("<I", 2**32 - 1)),
    "an item without a list": START + b"K\x01a.",
    "a tuple of what is not there": START + b"\x87.",
    "a mark that is not there": START + b"t.",
    "an odd number of keys and values": START + b"}(U\x01aK\x01U\x01bu.",
    "something that was never kept": START + b"h\x07.",
    "nothing at its end": START + b".",
    "an unknown opcode": file_of(b"\xff"),
    "digits without end": file_of(b"I" + b"9" * 100_000 + b"\n"),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_cost_no_more_than_their_own_size(tmp_path, content):
    path = tmp_path / "train"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="refused as a CIFAR python file"):
            read_plain_pickle(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 400 * len(content)


def test_what_is_hostile_above_is_so_by_its_content_alone(tmp_path):
    path = tmp_path / "train"
    path.write_bytes(file_of(array(number(2) + number(3) + b"\x86", b"abcdef")))
    assert np.array_equal(read_plain_pickle(path)["data"], np.frombuffer(b"abcdef", np.uint8).reshape(2, 3))


def test_pipes_and_folders_are_no_pickles(tmp_path):
    with pytest.raises(UserError, match="it is a folder"):
        read_plain_pickle(tmp_path)
