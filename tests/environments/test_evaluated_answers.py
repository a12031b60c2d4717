"""Which answers are passed to the graders of reasoning-gym that evaluate answers as Python."""

from __future__ import annotations

import pytest

from areal_agents.environments.adapters.evaluated_answers import may_be_graded


@pytest.mark.parametrize(
    ("data_set", "answer"),
    [
        ("countdown", "(19 + 3) - 9"),
        ("countdown", "3*(4/2)+1.5"),
        ("countdown", ""),
        ("puzzle24", "8/(3-8/3)"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("spiral_matrix", "1 2 3"),
        ("n_queens", "_ Q _ _\n_ _ _ Q"),
        ("string_insertion", "['A', 'B']"),
        ("simple_integration", "3*x**2/2 + C"),
        ("intermediate_integration", "-x**2*exp(2*x)/2 + sqrt(x)*sin(x) + x**(1/2)"),
        ("intermediate_integration", "2*(3*x - 1)**4/9 + C"),
        ("polynomial_multiplication", "x**12 - 4*x**3*y + 7"),
        ("chain_sum", "__import__('os')"),  # its grader compares strings
    ],
)
def test_an_answer_in_the_form_of_a_correct_one_is_graded(data_set: str, answer: str) -> None:
    assert may_be_graded(data_set, answer)


@pytest.mark.parametrize(
    ("data_set", "answer"),
    [
        ("countdown", "__import__('os').system('id')"),
        ("countdown", "[19,9,3] and True+True+True"),
        ("countdown", "len('xxx')"),
        ("countdown", "9**9**9**9"),
        ("countdown", "9* *9"),
        ("countdown", "19//9"),
        ("countdown", "1+" * 1000 + "1"),
        ("puzzle24", "int('24')"),
        ("spiral_matrix", "[print(1)]"),
        ("binary_matrix", "[9**9**9**9]"),
        ("n_queens", "open('x').read()"),
        ("string_insertion", "exit()"),
        ("simple_integration", "x.__class__"),
        ("simple_integration", "x. subs"),
        ("simple_integration", "print(x)"),
        ("simple_integration", "x**9**9**9"),
        ("simple_integration", "x**999999999"),
        ("intermediate_integration", "((((9**99)**99)**99)**99)"),
        ("polynomial_multiplication", "x**(9**9)"),
        ("polynomial_multiplication", "__import__('os')"),
    ],
)
def test_an_answer_that_would_run_code_is_not_graded(data_set: str, answer: str) -> None:
    assert not may_be_graded(data_set, answer)
