"""Switches and repetitions of shader files."""

from __future__ import annotations

import pytest

from hybrid.plan.kernels.base import prelude, resolve_switches, unroll, vector_width

TEXT = "a\n//#if X\nb\n//#if Y\nc\n//#else\nd\n//#endif\n//#else\ne\n//#endif\nf\n"


@pytest.mark.parametrize(
    ("switches", "lines"),
    [(set(), "aef"), ({"X"}, "abdf"), ({"X", "Y"}, "abcf"), ({"Y"}, "aef")],
)
def test_switches_choose_lines_and_nest(switches, lines):
    assert resolve_switches(TEXT, frozenset(switches), "t.wgsl").split() == list(lines)


@pytest.mark.parametrize(("text", "message"), [("//#if X\n", "without //#endif"), ("//#endif\n", "without //#if")])
def test_switches_that_do_not_close_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        resolve_switches(text, frozenset(), "t.wgsl")


def test_repeated_lines_carry_their_number_and_nest():
    text = "x\n//#repeat i N\nlet a$i = $i;\n//#repeat d M\nb$i_$d\n//#end\n//#end\ny\n"
    expected = ["x", "let a0 = 0;", "b0_0", "b0_1", "b0_2", "let a1 = 1;", "b1_0", "b1_1", "b1_2", "y"]
    assert unroll(text, {"N": 2, "M": 3}, "t.wgsl").splitlines() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("//#repeat i N\n", "without //#end"),
        ("//#end\n", "without //#repeat"),
        ("//#repeat i Q\n//#end\n", "a define of"),
        ("//#repeat ij N\n//#end\n", "a letter"),
    ],
)
def test_repetitions_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        unroll(text, {"N": 2}, "t.wgsl")


def test_only_kernels_that_store_activations_get_the_overflow_flag():
    assert "overflow_flags" in prelude("mixed-f16", True, ())
    assert "overflow_flags" not in prelude("mixed-f16", False, ())
    assert "overflow_flags" not in prelude("f32", True, ())
    assert "enable f16;" not in prelude("f32", True, ())
    with pytest.raises(ValueError, match="precision 'bf16'"):
        prelude("bf16", False, ())


def test_four_numbers_move_at_a_time_where_they_divide_evenly():
    assert [vector_width(n) for n in (4, 36, 257, 2)] == [4, 4, 1, 1]
