"""What is said of processes that differ; that all of them say it is tested in test_processes.py."""

import pytest

from tokenloader.loader.agreement import check_same_across_processes, differences_in_words


def test_each_field_that_differs_has_a_line_with_who_has_what():
    described = [
        {"a": 1, "b": "x", "c": None},
        {"a": 2, "b": "x", "c": None},
        {"a": 1, "b": "y", "c": None},
    ]
    assert differences_in_words(described, "arguments") == (
        "the processes of this run have different arguments:\n"
        "  a: 1 on processes 0, 2; 2 on process 1\n"
        "  b: x on processes 0, 1; y on process 2"
    )


def test_of_many_processes_the_first_are_named():
    described = [{"a": process != 50} for process in range(100)]
    assert differences_in_words(described, "states").splitlines()[1] == (
        "  a: True on processes 0, 1, 2, 3, 4, 5, 6, 7, ...; False on process 50"
    )


def test_where_one_has_failed_its_error_is_what_differs():
    described = [{"a": 1}, {"error": "ValueError: too short"}, {"a": 2}]
    assert differences_in_words(described, "arguments").splitlines()[1:] == [
        "  error: none on processes 0, 2; ValueError: too short on process 1"
    ]


def test_what_is_of_one_process_alone_is_not_compared_and_raises_as_it_is():
    with check_same_across_processes("arguments", enabled=False) as given:
        given["a"] = object()  # not even JSON
    with (
        pytest.raises(KeyError, match="mine"),
        check_same_across_processes("arguments", enabled=False),
    ):
        raise KeyError("mine")
