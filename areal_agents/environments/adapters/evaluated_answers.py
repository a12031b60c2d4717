"""Refuses answers of reasoning-gym's data sets whose graders evaluate the answer as Python.

These graders call eval, or parse_expr of sympy, which calls it. A policy could run any code in the process of
its grader, be paid for `len("xxx")` in place of a calculation, or hold up the whole process by 9**9**9**9. So
an answer reaches such a grader only if it is written in the few characters and names that right answers have.
"""

from __future__ import annotations

import re

_LONGEST = 1000  # characters
_ARITHMETIC = re.compile(r"(?!.*[*/]\s*[*/])[\d\s+\-*/().]*", re.DOTALL)  # without powers, which may be huge
_LISTS = re.compile(r"[\w\s,\[\]'\"-]*")  # without parentheses, so nothing can be called
_ALGEBRA = re.compile(r"[\w\s+\-*/().]*", re.ASCII)
_FUNCTIONS = frozenset(
    [
        "Abs",
        "E",
        "acos",
        "asin",
        "atan",
        "cos",
        "cosh",
        "cot",
        "csc",
        "exp",
        "ln",
        "log",
        "pi",
        "sec",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
# An exponent is a short number, or a fraction of two in parentheses, and no power itself.
_EXPONENT = re.compile(r"\s*(?:-?\d{1,2}|\(\s*-?\d{1,2}\s*(?:/\s*\d{1,2}\s*)?\))(?![\d.]|\s*\*\*)")
_FORMS = {
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "binary_matrix": _LISTS,
    "n_queens": _LISTS,
    "spiral_matrix": _LISTS,
    "string_insertion": _LISTS,
    "intermediate_integration": _ALGEBRA,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
}


def may_be_graded(data_set: str, answer: str) -> bool:
    """Return whether an answer can be given to the grader of a data set."""
    form = _FORMS.get(data_set)
    if form is None:
        return True
    if len(answer) > _LONGEST or form.fullmatch(answer) is None:
        return False
    return form is not _ALGEBRA or _is_algebra(answer)


def _is_algebra(answer: str) -> bool:
    """Return whether all names are variables of one letter or functions, and all exponents are short."""
    if re.search(r"\.\s*[^\W\d]|_", answer):  # an attribute, or a name that is no variable
        return False
    names = re.findall(r"[^\W\d]\w*", answer)
    if not all(len(name) == 1 or name in _FUNCTIONS for name in names):
        return False
    powers = [match.end() for match in re.finditer(r"\*\*", answer)]
    of_groups = len(re.findall(r"\)\s*\*\*", answer))  # each multiplies the exponents inside
    return of_groups <= 2 and all(_EXPONENT.match(answer, place) for place in powers)
