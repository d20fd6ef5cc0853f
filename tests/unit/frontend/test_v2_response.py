# SPDX-License-Identifier: Apache-2.0
"""Responses, errors and compression."""

from __future__ import annotations

import gzip
import json
import struct
import zlib

import pytest

from actorserve.errors import InternalError, InvalidArgument, NotFound, TooLarge, Unavailable
from actorserve.frontend.v2_compression import (
    UnsupportedEncoding,
    accepted_encoding,
    compress,
    content_encoding,
    inflate,
)
from actorserve.frontend.v2_request import OutputChoice
from actorserve.frontend.v2_response import (
    EncodedBody,
    encode_error,
    encode_response,
    json_output_bytes,
    retry_after_s,
)
from actorserve.triton.inference import InferResponse, InferTensor


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Nothing here opens anything, so the costly look for leaks is left out."""


BODY = memoryview(struct.pack("<2f", 1.5, 2.5)).toreadonly()


def response(**more: object) -> InferResponse:
    """A response with two equal outputs."""
    outputs = [InferTensor(name, "FP32", (2,), BODY) for name in ("A", "B")]
    return InferResponse("m", "1", more.pop("id", ""), outputs, **more)  # type: ignore[arg-type]


def joined(body: EncodedBody) -> bytes:
    """Put a body together."""
    data = b"".join(body.pieces)
    assert len(data) == body.nbytes
    return data


def test_json_has_exactly_the_members_of_the_protocol() -> None:
    """No id and no parameters where there are none."""
    body = encode_response(response(), OutputChoice(), False)
    assert body.json_bytes is None
    assert json.loads(joined(body)) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]} for name in "AB"
        ],
    }


def test_id_and_parameters_are_sent_where_there_are_some() -> None:
    """They stand beside the outputs."""
    body = encode_response(response(id="7", parameters={"a": 1, "b": "x"}), OutputChoice(), False)
    document = json.loads(joined(body))
    assert document["id"] == "7"
    assert document["parameters"] == {"a": 1, "b": "x"}


def test_no_outputs_are_an_empty_list() -> None:
    """The member `outputs` is always there."""
    body = encode_response(InferResponse("m", "1", "", []), OutputChoice(), False)
    assert json.loads(joined(body)) == {"model_name": "m", "model_version": "1", "outputs": []}


def test_binary_outputs_follow_the_document_uncopied() -> None:
    """The pieces are the views that the response came with, in the order of the outputs."""
    choice = OutputChoice(default=True, binary={"A": False})
    body = encode_response(response(), choice, False)
    assert body.pieces[1] is BODY
    data = joined(body)
    assert body.json_bytes is not None
    document = json.loads(data[: body.json_bytes])
    assert document["outputs"][0]["data"] == [1.5, 2.5]
    assert document["outputs"][1]["parameters"] == {"binary_data_size": 8}
    assert "data" not in document["outputs"][1]
    assert data[body.json_bytes :] == BODY
    assert json_output_bytes(response(), choice) == 8


def test_views_of_other_shapes_are_counted_in_bytes() -> None:
    """A typed view is as good as plain bytes."""
    tensor = InferTensor("A", "FP32", (2,), BODY.cast("f"))
    body = encode_response(InferResponse("m", "1", "", [tensor]), OutputChoice(True), False)
    assert joined(body).endswith(bytes(BODY))


def test_an_output_without_a_known_type_is_an_internal_error() -> None:
    """A response that cannot be right is not sent."""
    tensor = InferTensor("A", "FOO", (2,), BODY)
    with pytest.raises(InternalError):
        encode_response(InferResponse("m", "1", "", [tensor]), OutputChoice(), False)


def test_errors_are_json_whatever_their_text() -> None:
    """What UTF-8 cannot express is replaced."""
    assert json.loads(encode_error('a "b"\n')) == {"error": 'a "b"\n'}
    assert json.loads(encode_error("\udcff")) == {"error": "?"}


def test_retry_after_is_whole_seconds() -> None:
    """Rounded up, and never 0."""
    assert retry_after_s(Unavailable("x", 0.1)) == 1
    assert retry_after_s(Unavailable("x", 2.1)) == 3
    assert retry_after_s(Unavailable("x")) is None
    assert retry_after_s(NotFound("x")) is None


# --- compression ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"", ""),
        (b"identity", ""),
        (b"gzip", "gzip"),
        (b"deflate", "deflate"),
        (b"br, GZIP;q=0.5, deflate;q=0.8", "deflate"),
        (b"gzip, deflate", "gzip"),
        (b"gzip;q=0", ""),
        (b"gzip;q=nonsense", ""),
        (b"\xff,;;,", ""),
    ],
)
def test_accepted_encoding_is_the_one_preferred(header: bytes, expected: str) -> None:
    """Qualities count, then the order."""
    assert accepted_encoding(header) == expected


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_keep_the_size_of_the_document(encoding: str) -> None:
    """The header's size is that of the document before compression."""
    plain = encode_response(response(), OutputChoice(True), False)
    packed = compress(plain, encoding)
    assert (packed.json_bytes, packed.encoding) == (plain.json_bytes, encoding)
    data = joined(packed)
    unpacked = gzip.decompress(data) if encoding == "gzip" else zlib.decompress(data)
    assert unpacked == joined(plain)
    assert inflate(data, encoding, 1000) == joined(plain)


def test_bare_deflate_and_several_gzip_members_are_read() -> None:
    """What clients send under these names."""
    bare = zlib.compressobj(wbits=-15)
    assert inflate(bare.compress(b"abc") + bare.flush(), "deflate", 10) == b"abc"
    assert inflate(gzip.compress(b"abc") + gzip.compress(b"def"), "gzip", 10) == b"abcdef"


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", gzip.compress(b"abc")[:-3], gzip.compress(b"a") + b"x"],
    ids=["empty", "nonsense", "cut", "with a rest"],
)
def test_broken_compression_is_the_clients_mistake(data: bytes) -> None:
    """Cut off, not compressed at all, or followed by something else."""
    with pytest.raises(InvalidArgument):
        inflate(data, "gzip", 1000)


def test_a_bomb_is_stopped_at_the_limit() -> None:
    """Row 87: the decoded size counts, over all members."""
    bomb = gzip.compress(bytes(1 << 20))
    assert len(bomb) < 2000
    with pytest.raises(TooLarge, match="exceeds the maximum allowed input size of 65536 bytes"):
        inflate(bomb, "gzip", 65536)
    with pytest.raises(TooLarge):
        inflate(gzip.compress(bytes(40000)) * 2, "gzip", 65536)
    assert len(inflate(bomb, "gzip", 1 << 20)) == 1 << 20


@pytest.mark.parametrize("header", [b"br", b"zstd", b"gzip, gzip"])
def test_other_encodings_are_415(header: bytes) -> None:
    """Row 87: nested encodings too."""
    with pytest.raises(UnsupportedEncoding) as caught:
        content_encoding(header)
    assert caught.value.http_status == 415
