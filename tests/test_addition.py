from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.addition import (
    STATES,
    AdditionTask,
    ProblemError,
    Vocabulary,
    decimal_int,
    decimal_string,
    generator,
    handmade_problems,
    parse_problem,
    read_problems,
)
from models.config import Lengths, TaskConfig
from models.positions import coordinates

CUTS = [(1, "right"), (3, "right"), (3, "left")]
TASKS = {cut: AdditionTask(TaskConfig(chunk=cut[0], cut=cut[1])) for cut in CUTS}
numbers = st.one_of(
    st.integers(0, 10**14),
    st.integers(1, 12).map(lambda n: 10**n - 1),
    st.integers(0, 12).map(lambda n: 10**n),
    st.integers(0, 20),
)
problems = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4)
cuts = pytest.mark.parametrize("cut", CUTS, ids=lambda c: f"{c[0]}-{c[1]}")


def pieces(n: int, chunk: int, cut: str) -> list[str]:
    """The chunks of a number as text, least significant first, cut with string slices."""
    text = str(n)
    if cut == "right":
        text = text.zfill(-(-len(text) // chunk) * chunk)
    return [text[i : i + chunk] for i in range(0, len(text), chunk)][::-1]


def digit_sets(n: int, chunk: int, cut: str) -> list[set[int]]:
    """Per chunk, the digit positions it covers (0 = units)."""
    sets, low = [], 0
    for piece in pieces(n, chunk, cut):
        sets.append(set(range(low, low + len(piece))))
        low += len(piece)
    return sets


def slow_lookups(a: int, b: int, cut: tuple[int, str]) -> dict[str, dict[int, set[int]]]:
    """Per lookup: query position -> target positions, chunk by chunk from the definition."""
    first, second, total = (digit_sets(n, *cut) for n in (a, b, a + b))
    b_start = len(first) + 1
    equals = b_start + len(second)

    def in_a(digits: set[int]) -> set[int]:
        return {i for i, covered in enumerate(first) if covered & digits}

    def in_b(digits: set[int]) -> set[int]:
        return {b_start + i for i, covered in enumerate(second) if covered & digits}

    asked = [*total, set()]  # the end of the sum covers no digit
    before = [set(), *total]
    columns = range(len(asked))
    return {
        "first_same_column": {equals + c: in_a(asked[c]) for c in columns},
        "second_same_column": {equals + c: in_b(asked[c]) for c in columns},
        "first_from_second": {b_start + i: in_a(second[i]) for i in range(len(second))},
        "carry": {equals + c: in_a(before[c]) | in_b(before[c]) | ({equals + c} if c else set()) for c in columns},
    }


def carries(a: int, b: int) -> list[bool]:
    """Schoolbook: the carry out of each column of the longer operand."""
    out, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        carry = (a // 10**i % 10 + b // 10**i % 10 + carry) // 10
        out.append(bool(carry))
    return out


@cuts
@given(problems=problems)
def test_tokens_spell_the_problem_and_its_sum(cut, problems):
    task = TASKS[cut]
    batch, vocab = task.encode(problems), task.vocabulary
    for i, (a, b) in enumerate(problems):
        text = [vocab.text(int(t)) for t in batch.tokens[i][batch.mask[i]]]
        parts = [pieces(n, *cut) for n in (a, b, a + b)]
        assert text == [*parts[0], "+", *parts[1], "=", *parts[2], "<eos>"]
        assert batch.lengths[i].tolist() == [len(part) for part in parts]
        assert batch.digits[i].tolist() == [len(str(n)) for n in (a, b, a + b)]
        plus, equals, end = (text.index(mark) for mark in ("+", "=", "<eos>"))
        ids = batch.tokens[i].tolist()
        read = [vocab.number(ids[x:y]) for x, y in ((0, plus), (plus + 1, equals), (equals + 1, end))]
        assert read == [a, b, a + b]
        assert (batch.tokens[i][~batch.mask[i]] == vocab.pad).all()
        assert not batch.mask[i][len(text) :].any()


@cuts
@given(problems=problems)
def test_rows_and_columns_are_those_read_off_the_tokens(cut, problems):
    task = TASKS[cut]
    batch, vocab = task.encode(problems), task.vocabulary
    at = coordinates(batch.tokens, batch.mask, (vocab.plus, vocab.equals), separator_column=-1)
    assert torch.equal(at.row[batch.mask], batch.row[batch.mask])
    assert torch.equal(at.column[batch.mask], batch.column[batch.mask])
    assert (batch.column[~batch.mask] == -1).all()


@cuts
@given(problems=problems)
def test_lookups_match_the_definition(cut, problems):
    batch = TASKS[cut].encode(problems)
    for i, (a, b) in enumerate(problems):
        for name, expected in slow_lookups(a, b, cut).items():
            lookup = batch.lookups[name]
            assert lookup.queries[i].nonzero().flatten().tolist() == sorted(expected), name
            for position in range(batch.tokens.shape[1]):
                found = [t for t in lookup.targets[i, position].tolist() if t != -1]
                assert len(found) == len(set(found))
                assert set(found) == expected.get(position, set()), (name, position)
                assert bool(lookup.present[i, position]) == bool(expected.get(position))


@cuts
@given(problems=problems)
def test_states_say_which_operands_have_the_column(cut, problems):
    batch = TASKS[cut].encode(problems)
    for i, (a, b) in enumerate(problems):
        slow = slow_lookups(a, b, cut)
        names = {(True, True): "both", (False, True): "first_ended", (True, False): "second_ended"}
        present = zip(slow["first_same_column"].items(), slow["second_same_column"].values(), strict=True)
        expected = {p: names.get((bool(first), bool(second)), "neither") for (p, first), second in present}
        assert {p: STATES[s] for p, s in enumerate(batch.state[i].tolist()) if s != -1} == expected


@cuts
@given(problems=problems)
def test_a_decision_per_chunk_of_the_sum_and_one_for_its_end(cut, problems):
    task = TASKS[cut]
    batch = task.encode(problems)
    assert len(batch) == len(problems)
    for i, (a, b) in enumerate(problems):
        asked = batch.decisions[i]
        total = pieces(a + b, *cut)
        assert [task.vocabulary.text(int(t)) for t in batch.targets[i][asked]] == [*total, "<eos>"]
        assert batch.decision_column[i][asked].tolist() == list(range(len(total) + 1))
        assert (batch.decision_column[i][~asked] == -1).all()
        assert batch.eos[i].sum() == 1
        assert batch.targets[i][batch.eos[i]].tolist() == [task.vocabulary.eos]


@cuts
@given(problems=problems)
def test_a_prompt_is_the_sequence_up_to_equals(cut, problems):
    task = TASKS[cut]
    batch, (tokens, mask) = task.encode(problems), task.prompt(problems)
    for i in range(len(problems)):
        n = int(mask[i].sum())
        assert mask[i, :n].all()
        assert tokens[i, n - 1] == task.vocabulary.equals
        assert torch.equal(tokens[i, :n], batch.tokens[i, :n])
        assert (tokens[i, n:] == task.vocabulary.pad).all()
    assert mask.any(0).all()


@cuts
def test_every_token_has_one_text(cut):
    vocab = TASKS[cut].vocabulary
    texts = [vocab.text(t) for t in range(vocab.size)]
    assert len(set(texts)) == vocab.size == {(1, "right"): 14, (3, "right"): 1004, (3, "left"): 1114}[cut]
    assert texts[-4:] == ["+", "=", "<eos>", "<pad>"]
    for bad in (-1, vocab.size):
        with pytest.raises(ProblemError, match=str(bad)):
            vocab.text(bad)
    with pytest.raises(ProblemError, match="chunks"):
        vocab.number([vocab.plus])


@cuts
@pytest.mark.parametrize("bad", [[], [(-1, 2)], [(1, 2), (3, -4)]])
def test_unusable_problems_are_refused(cut, bad):
    with pytest.raises(ProblemError, match=r"at least one|negative"):
        TASKS[cut].encode(bad)


# Sampling


def chi_square(counts: Counter, values: range) -> float:
    expected = sum(counts.values()) / len(values)
    assert set(counts) <= set(values)
    return sum((counts[v] - expected) ** 2 / expected for v in values)


def test_training_lengths_are_uniform_and_independent():
    task = AdditionTask(TaskConfig(min_digits=2, max_digits=6))
    drawn = task.training_problems(seed=3, step=5, n=6000)
    assert chi_square(Counter(5 * (len(str(a)) - 2) + len(str(b)) - 2 for a, b in drawn), range(25)) < 52  # p = .001
    leading = Counter(int(str(n)[0]) for problem in drawn for n in problem)
    assert chi_square(leading, range(1, 10)) < 26
    assert chi_square(Counter(n % 10 for problem in drawn for n in problem), range(10)) < 28


def test_a_mix_of_lengths_has_its_shares():
    short, long = Lengths(min_digits=1, max_digits=3, share=0.75), Lengths(min_digits=6, max_digits=8, share=0.25)
    task = AdditionTask(TaskConfig(max_digits=8, mix=(short, long)))
    drawn = task.training_problems(seed=3, step=5, n=4000)
    lengths = [(len(str(a)), len(str(b))) for a, b in drawn]
    for part in (short, long):
        inside = [pair for pair in lengths if part.min_digits <= pair[0] <= part.max_digits]
        assert abs(len(inside) - 4000 * part.share) < 4 * (4000 * 0.75 * 0.25) ** 0.5
        assert chi_square(Counter(3 * (a - part.min_digits) + b - part.min_digits for a, b in inside), range(9)) < 26.1
    assert drawn == task.training_problems(seed=3, step=5, n=4000)
    assert task.config.max_keys == 2 * 8 + 2 + 9


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ([(1, 3, 0.5), (6, 8, 0.4)], "must add to 1, got 0.9"),
        ([(1, 9, 1.0)], "within 1 to 8 digits, got 1 to 9"),
        ([(5, 3, 1.0)], "within 1 to 8 digits, got 5 to 3"),
        ([(1, 7, 1.0)], "no range of mix reaches max_digits=8"),
    ],
)
def test_a_bad_mix_is_refused(mix, says):
    with pytest.raises(ValueError, match=says):
        TaskConfig(max_digits=8, mix=[Lengths(min_digits=a, max_digits=b, share=c) for a, b, c in mix])


def test_one_digit_training_numbers_include_zero():
    drawn = TASKS[1, "right"].training_problems(seed=0, step=0, n=5000)
    single = Counter(n for problem in drawn for n in problem if n < 10)
    assert chi_square(single, range(10)) < 28
    assert max(len(str(n)) for problem in drawn for n in problem) == 10


def test_sampling_depends_on_seed_step_and_stream_alone():
    task = TASKS[1, "right"]
    base = task.training_problems(1, 2, 50)
    np.random.seed(99)  # noqa: NPY002 (the global state must not matter)
    torch.manual_seed(99)
    assert TASKS[3, "left"].training_problems(1, 2, 50) == base
    others = [(2, 2, "train"), (1, 3, "train"), (1, 2, "probe")]
    assert all(task.training_problems(seed, step, 50, stream=name) != base for seed, step, name in others)
    assert task.evaluation_problems(30, 5, seed=0) != task.evaluation_problems(30, 5, seed=1)


@given(digits=st.integers(1, 40), n=st.integers(1, 12), m=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_fewer_evaluation_problems_are_a_prefix_of_more(digits, n, m, seed):
    task = TASKS[1, "right"]
    many, few = task.evaluation_problems(digits, max(n, m), seed), task.evaluation_problems(digits, min(n, m), seed)
    assert many[: len(few)] == few
    assert all(max(len(str(a)), len(str(b))) == digits and min(a, b) > 0 for a, b in many)


def test_evaluation_draws_the_other_length_uniformly_and_the_sides_at_random():
    drawn = TASKS[1, "right"].evaluation_problems(8, 2400)
    lengths = [(len(str(a)), len(str(b))) for a, b in drawn]
    assert chi_square(Counter(min(pair) for pair in lengths), range(1, 9)) < 25
    sides = Counter(a > b for a, b in lengths if a != b)
    assert chi_square(sides, range(2)) < 11
    assert chi_square(Counter(int(str(n)[0]) for problem in drawn for n in problem), range(1, 10)) < 26


@pytest.mark.parametrize(("digits", "n", "bad"), [(0, 1, 0), (-3, 1, -3), (10**6, 1, 10**6), (5, 0, 0), (5, -1, -1)])
def test_evaluation_refuses_counts_out_of_range(digits, n, bad):
    with pytest.raises(ProblemError, match=rf"(from|at least) 1\b.*, got {bad}"):
        TASKS[1, "right"].evaluation_problems(digits, n)


def test_streams_do_not_share_numbers():
    draws = {generator(0, name, i).integers(2**62) for name in ("train", "probe", "handmade") for i in range(50)}
    assert len(draws) == 150


# Numbers beyond CPython's limit


@pytest.mark.parametrize("digits", [1, 3999, 4000, 4001, 4301, 8000, 8001, 12345])
def test_decimal_text_of_any_length(digits):
    text = "7" + "0" * max(0, digits - 2) + "3" * min(1, digits - 1)
    assert decimal_string(decimal_int(text)) == text
    power = 10 ** (digits - 1)
    assert decimal_string(power) == "1" + "0" * (digits - 1)
    assert decimal_int("1" + "0" * (digits - 1)) == power


@given(st.integers(0, 10**30))
def test_short_decimal_text_is_str(n):
    assert decimal_string(n) == str(n)
    assert decimal_int(str(n)) == n


@cuts
def test_five_thousand_digits_encode(cut):
    task = TASKS[cut]
    a, b = 10**5000 - 1, 10**4999 + 7
    batch = task.encode([(a, b)])
    line = batch.tokens[0].tolist()
    equals = line.index(task.vocabulary.equals)
    assert task.vocabulary.number(line[equals + 1 : -1]) == a + b
    assert int(batch.decisions.sum()) == -(-5001 // cut[0]) + 1
    assert task.evaluation_problems(5000, 1)[0] > (0, 0)


def test_a_huge_negative_operand_is_refused_by_name():
    with pytest.raises(ProblemError, match="negative"):
        TASKS[1, "right"].encode([(-(10**5000), 1)])


# Handmade problems and problem files


@pytest.mark.parametrize("digits", [1, 2, 10, 100, 200])
def test_handmade_problems_hold_the_extremes(digits):
    found = handmade_problems(digits)
    nines = 10**digits - 1
    assert {(nines, 1), (1, nines), (nines, nines)} <= set(found)
    assert all(max(len(str(a)), len(str(b))) == digits for a, b in found)
    full = [(a, b) for a, b in found if all(carries(a, b))]
    assert len(full) >= 8
    assert any(a < b for a, b in full)
    assert any(a > b for a, b in full)
    assert any(len(str(a)) == len(str(b)) and not any(carries(a, b)) for a, b in found)
    small = [carries(*problem)[0] for problem in found if min(problem) < 10]
    assert True in small
    assert found == handmade_problems(digits)
    for bad in (0, 10**6):
        with pytest.raises(ProblemError, match=f"got {bad}"):
            handmade_problems(bad)


@pytest.mark.parametrize("digits", [10, 100, 200])
def test_handmade_one_digit_addends_come_with_and_without_a_carry(digits):
    assert {carries(*p)[0] for p in handmade_problems(digits) if min(p) < 10} == {True, False}


@pytest.mark.parametrize("digits", [10, 100, 200])
def test_a_handmade_chain_dies_one_column_before_the_top(digits):
    assert any(all(c[:-1]) and not c[-1] for c in (carries(*p) for p in handmade_problems(digits)))


@pytest.mark.parametrize("digits", [10, 100, 200])
def test_problem_files_hold_the_handmade_problems(digits):
    assert read_problems(Path(__file__).parent / "problems" / f"handmade-{digits}.txt") == handmade_problems(digits)


@pytest.mark.parametrize(
    ("text", "problem"), [("12 + 345", (12, 345)), (" 0+0 ", (0, 0)), ("1+ 10\t", (1, 10)), ("9" * 5000 + "+1", None)]
)
def test_problems_are_read_as_people_write_them(text, problem):
    assert parse_problem(text) == (problem or (10**5000 - 1, 1))


@pytest.mark.parametrize(
    "text", ["", "1", "1+", "1+2+3", "-1+2", "1.5+2", "01+2", "1+00", "\u0661+\u0662", "1 2+3", "1e3+2"]
)
def test_anything_else_is_no_problem(text):
    with pytest.raises(ProblemError, match="got"):
        parse_problem(text)


def test_long_bad_problems_are_shortened_in_the_message():
    with pytest.raises(ProblemError) as error:
        parse_problem("1" * 10_000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# six good lines\n1+2\n\n  # again\n3+4\n5+6\n7+8x\n", r"p\.txt, line 7: .*7\+8x"),
        (b"1 + 2\n03 + 4\n", r"line 2: .*leading zeros, got '03'"),
        (b"1 + 2\n\xff\xfe\n", "not UTF-8"),
        (b"", "holds no problem"),
        (b"# nothing\n\n", "holds no problem"),
        (b"1 + -2\n", "line 1"),
    ],
)
def test_bad_problem_files_say_what_and_where(tmp_path, content, message):
    path = tmp_path / "p.txt"
    path.write_bytes(content)
    with pytest.raises(ProblemError, match=message):
        read_problems(path)


def test_missing_problem_files_are_named(tmp_path):
    with pytest.raises(ProblemError, match="no-such-file"):
        read_problems(tmp_path / "no-such-file")
    with pytest.raises(ProblemError, match="directory"):
        read_problems(tmp_path)


def test_windows_line_ends_and_comments_are_read(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"# comment\r\n12 + 3\r\n\r\n4+5")
    assert read_problems(path) == [(12, 3), (4, 5)]


def test_vocabulary_and_training_limits_follow_the_task():
    task = TaskConfig(chunk=3, max_digits=10)
    longest = AdditionTask(task).encode([(10**10 - 1, 10**10 - 1)])
    assert int(longest.lengths[0, 2]) == task.max_columns
    assert int(longest.decisions[0].nonzero().max()) + 1 == task.max_keys
    assert Vocabulary(task).size == 1004
