"""Both writers give the same bytes, and both readers the same tensors or the same refusal."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from differential.both import agree, draw
from differential.inputs import text
from hybrid.checkpoint import safetensors
from hybrid.checkpoint.digests import digest_bytes

pytestmark = pytest.mark.node

TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "F16": "f2", "U32": "u4", "I32": "i4", "F32": "f4",
    "U64": "u8", "I64": "i8", "F64": "f8", "C64": "c8",
}  # fmt: skip

# Where the message quotes the JSON parser, each language has a parser of its own.
OWN_WORDS = {"header_not_json", "header_not_utf8"}


def arrays(random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(random.randrange(6)):
        odd = ("model.norm.weight", "__proto__", str(random.randrange(20)))
        name = random.choice((text(random, 10, lone=False), *odd))
        shape = [random.randrange(4) for _ in range(random.randrange(4))]
        dtype = random.choice(list(TYPES))
        raw = random.randbytes(int(np.prod(shape, dtype=int)) * np.dtype(TYPES[dtype]).itemsize)
        found[name] = array(dtype, shape, bytes(byte & 1 for byte in raw) if dtype == "BOOL" else raw)
    return found


def array(dtype: str, shape: list[int], raw: bytes) -> Any:
    return np.frombuffer(bytearray(raw), TYPES[dtype]).reshape(shape)


def metadata(random) -> dict[str, str] | None:
    texts = {text(random, 5, lone=False): text(random, lone=False) for _ in range(random.randrange(4))}
    return random.choice((None, texts, {"format": "pt"}))


def written(tensors, about) -> bytes:
    tensors.pop("", None)
    out = io.BytesIO()
    safetensors.write(out.write, tensors, about)
    return out.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_both_writers_give_the_same_bytes(node):
    random = draw("write_safetensors")
    cases = []
    for _ in range(300):
        tensors = [
            {
                "name": name,
                "dtype": safetensors.stored_dtype(name, array),
                "shape": list(array.shape),
                "bytes": encoded(array.tobytes()),
            }
            for name, array in arrays(random).items()
        ]
        cases.append({"tensors": tensors, "metadata": metadata(random)})

    def python(case):
        tensors = {
            one["name"]: array(one["dtype"], one["shape"], base64.b64decode(one["bytes"])) for one in case["tensors"]
        }
        out = io.BytesIO()
        sha256 = safetensors.write(out.write, tensors, case["metadata"])
        digest = digest_bytes(out.getvalue())
        whole = {"size": digest.size, "sha256": digest.sha256, "chunks": list(digest.chunks)}
        return [encoded(out.getvalue()), whole, {name: sha256[name] for name in tensors}]

    # A key `__proto__` cannot be compared by stable JSON: it goes by another name in the answers.
    for case in cases:
        for one in case["tensors"]:
            if one["name"] == "__proto__":
                one["name"] = "__proto"
    kinds = agree(node, "write_safetensors", cases, python)
    assert set(kinds) <= {"value", "HybridError"} and kinds["value"] > 100


def read(case: str) -> dict[str, Any]:
    data = base64.b64decode(case)
    try:
        file = safetensors.read_stream("file", io.BytesIO(data), len(data))
    except safetensors.SafetensorsError as error:
        return {"refused": [error.category, str(error)]}
    entries = [
        {"name": e.name, "dtype": e.dtype, "shape": list(e.shape), "start": e.start, "end": e.end}
        for e in file.header.entries
    ]
    return {"entries": entries, "metadata": file.header.metadata, "sha256": file.sha256}


def same_refusals(node, files: list[bytes]) -> dict[str, int]:
    """Both readers agree about each file; the number of files by what became of them."""
    cases = [encoded(data) for data in files]
    counts: dict[str, int] = {}
    for data, theirs in zip(files, node.ask("read_safetensors", cases), strict=True):
        ours = read(encoded(data))
        assert "value" in theirs, (theirs, data)
        theirs = theirs["value"]
        category = ours.get("refused", ["read"])[0]
        if category in OWN_WORDS:
            assert theirs["refused"][0] == category, (data, theirs, ours)
        else:
            assert theirs == ours, data
        counts[category] = counts.get(category, 0) + 1
    return counts


def test_damaged_files_are_refused_alike(node):
    random = draw("damaged")
    files = []
    for _ in range(500):
        data = written(arrays(random), metadata(random))
        kind = random.randrange(4)
        at = random.randrange(len(data))
        if kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + random.randbytes(1) + data[at + 1 :]
        elif kind == 3:
            data = data[:at] + random.randbytes(random.randrange(3)) + data[at:]
        files.append(data)
    counts = same_refusals(node, files)
    assert counts["read"] > 100 and len(counts) > 6


def test_wrong_headers_are_refused_alike(node):
    random = draw("headers")
    sizes = ("0", "1", "2", "4", "8", "-1", "1.0", "1.5", "1e3", "-0", '"4"', "true", "null", "[]", "9007199254740993")
    types = ('"U8"', '"F32"', '"f32"', '"BF16"', '"BOOL"', "5", "null", '"F4"', '["U8"]')

    def numbers(longest):
        return f"[{','.join(random.choice(sizes) for _ in range(random.randrange(longest + 1)))}]"

    def entry(position):
        start = random.choice((4 * position, 4 * position, 4 * position, 0, 4, 8))
        if random.random() < 0.7:
            return f'{{"dtype":"U8","shape":[4],"data_offsets":[{start},{start + 4}]}}'
        members = {
            "dtype": random.choice(types[:2] * 4 + types),
            "shape": random.choice(("[4]", "[1]", "[2,2]", "[]", "[0]", "[3000000000,3000000000]", numbers(3), "5")),
            "data_offsets": random.choice((f"[{start},{start + 4}]", f"[{start},{start + 1}]", numbers(3), "null")),
        }
        if random.random() < 0.1:
            members["extra"] = "1"
        kept = [f'"{name}":{item}' for name, item in members.items() if random.random() < 0.95]
        return random.choice(("{" + ",".join(kept) + "}",) * 9 + (random.choice(sizes),))

    files = []
    for _ in range(1500):
        count = random.randrange(1, 4)
        names = random.sample(("a", "b", "c", "d", "it's", "__proto__"), count)
        if random.random() < 0.1:
            names[0] = random.choice(("", "\\u0062", "b"))
        members = [f'"{name}":{entry(position)}' for position, name in enumerate(names)]
        random.shuffle(members)
        if random.random() < 0.15:
            about = random.choice(('{"format":"pt"}', '{"a":1}', "null", "[]", '{"a":"\\ud800"}', '{"a":null}'))
            members.append(f'"__metadata__":{about}')
        header = random.choice(("",) * 29 + (" ",)) + "{" + ",".join(members) + "}" + random.choice(("", "  "))
        raw = header.encode()
        size = random.choice((4 * count, 4 * count, 4 * count, 0, 8))
        files.append(len(raw).to_bytes(8, "little") + raw + bytes(size))
    counts = same_refusals(node, files)
    expected = {"read", "dtype_unknown", "shape_invalid", "offsets_invalid", "shape_size_mismatch"}
    expected |= {"tensor_info_schema"}
    expected |= {"metadata_not_string", "name_empty", "duplicate_name", "hole", "trailing_bytes", "offsets_overlap"}
    expected |= {"offsets_beyond_data", "header_start", "size_overflow"}
    assert expected <= set(counts), json.dumps(counts)
