"""Decompression in pieces of a limited size."""

from __future__ import annotations

import gzip
import zlib

import pytest

from toolspace.core.decompression import Decompressor, normalize_encoding

TEXT = b"".join(b"line %d\n" % number for number in range(20_000))


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("gzip", gzip.compress(TEXT[:1_000]) + gzip.compress(b"") + gzip.compress(TEXT[1_000:])),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)[2:-4]),
    ],
)
@pytest.mark.parametrize("chunk_size", [7, 4_096, 10_000_000])
def test_pieces_are_limited_and_complete(encoding: str, body: bytes, chunk_size: int) -> None:
    decompressor = Decompressor(encoding)
    pieces: list[bytes] = []
    for start in range(0, len(body), chunk_size):
        pieces.append(decompressor.decompress(body[start : start + chunk_size], 500))
        while decompressor.has_rest:
            pieces.append(decompressor.decompress(b"", 500))
    assert max(map(len, pieces)) <= 500
    assert b"".join(pieces) == TEXT


@pytest.mark.parametrize(("header", "encoding"), [("", ""), (" X-GZIP ", "gzip"), ("identity", ""), ("br", "br")])
def test_the_encoding_of_a_header(header: str, encoding: str) -> None:
    assert normalize_encoding(header) == encoding
