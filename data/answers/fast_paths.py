"""What can be decided of two mathematical answers exactly and at once: the same text, plain numbers (with their units),
numbers times variables, words, brackets. Everything else is left to symbolic work."""

from espalier.data.answers.answer_parts import (
    bracket_kind,
    in_base,
    number_and_unit,
    tidy,
    unknown,
    without_name,
    words,
)
from espalier.data.answers.monomials import Monomial, has_glued_unit, read_monomial
from espalier.data.answers.plain_numbers import PlainNumber, is_equal_within_decimals, read_number


def quick_verdict(answer: str, gold: str) -> tuple[bool, str] | None:
    """Return (is right, reason) where a fast path decides, else None."""
    one, other = tidy(answer), tidy(gold)
    if one and one == other:
        return True, "the same text"
    value, gold_value = without_name(answer), without_name(gold)
    if unknown(answer) != unknown(gold) and unknown(answer) and unknown(gold):
        return False, "values of different unknowns"
    letters = compare_terms(value, gold_value)
    if letters is not None:
        return letters
    numbers = _compare_numbers(value, gold_value)
    if numbers is not None:
        return numbers
    base, gold_base = in_base(answer), in_base(gold)
    if base is not None and gold_base is not None:
        return base == gold_base, "equal numbers" if base == gold_base else "different numbers"
    own, gold_words = words(answer), words(gold)
    if own is not None and gold_words is not None:
        if own == gold_words:
            return True, "the same words"
        if sorted(own) != sorted(gold_words):
            return False, "different words"
    kinds = {bracket_kind(answer), bracket_kind(gold)}
    return (False, "different brackets") if len(kinds) == 2 and "" not in kinds else None


def _compare_numbers(value: str, gold_value: str) -> tuple[bool, str] | None:
    """Return (is right, reason) where both sides are numbers, perhaps with a unit, of which one may be left off."""
    first, second = read_number(value), read_number(gold_value)
    if first is not None and second is not None:
        is_same = is_equal_within_decimals(first, second)
        if is_same is None and first.is_percent != second.is_percent:
            is_same = second.is_percent and first.value == second.value  # "what percent": the sign may be left off
        if is_same is not None:
            return is_same, "equal numbers" if is_same else "different numbers"
    elif second is not None or first is not None:
        measured, other_number = number_and_unit(value if first is None else gold_value), first or second
        if measured is not None and other_number is not None and not other_number.is_percent:
            is_same = is_equal_within_decimals(measured, other_number)
            if is_same is not None:
                return is_same, "equal numbers beside a unit" if is_same else "different numbers beside a unit"
    else:
        measured, gold_measured = number_and_unit(value), number_and_unit(gold_value)
        if measured is not None and gold_measured is not None:
            is_same = is_equal_within_decimals(measured, gold_measured)
            if is_same is not None:
                return is_same, "equal numbers with units" if is_same else "different numbers with units"
    return None


def compare_terms(value: str, gold_value: str) -> tuple[bool, str] | None:
    """Return (is right, reason) where a side is a number times variables and the other is too or is a number; else
    None."""
    own, wanted = read_monomial(value), read_monomial(gold_value)
    if own is not None and wanted is not None:
        if _has_constants(own) or _has_constants(wanted):
            return None
        return own == wanted, "equal terms" if own == wanted else "different terms"
    term, other = (own, gold_value) if own is not None else (wanted, value)
    if term is None or _has_constants(term):
        return None
    number = read_number(other)
    if number is not None and own is not None and has_glued_unit(value):
        is_same = is_equal_within_decimals(PlainNumber(own.coefficient), number)
        return bool(is_same), "equal numbers beside a unit" if is_same else "different numbers beside a unit"
    is_number = number is not None or number_and_unit(other) is not None
    return (False, "a multiple of a variable") if is_number else None


def _has_constants(term: Monomial) -> bool:
    """Say whether a term holds e or i, which are numbers."""
    return any(letter in "ei" for letter, _ in term.powers)
