"""Names of tasks: what is written is read back, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.study.task_id import IDENTITY, TaskId, TaskKind

parts = st.text(min_size=1).filter(lambda text: text.split() == [text])
task_ids = st.builds(TaskId, st.sampled_from(TaskKind), st.lists(parts).map(tuple))


@given(task_ids)
def test_a_written_name_is_read_back(task_id: TaskId) -> None:
    assert TaskId.parse(str(task_id)) == task_id


@given(st.text())
def test_what_is_read_is_written_the_same(text: str) -> None:
    try:
        task_id = TaskId.parse(text)
    except ValueError:
        return
    assert str(task_id) == text


@given(task_ids, task_ids)
def test_different_names_are_written_differently(one: TaskId, two: TaskId) -> None:
    assert (str(one) == str(two)) is (one == two)


@pytest.mark.parametrize(
    "text", ["", "bake k", "compile ", "compile  k", "compile k\n", " identity"]
)
def test_other_text_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"TaskKind|part of a task's name"):
        TaskId.parse(text)


def test_the_written_form_is_that_of_earlier_studies() -> None:
    assert str(IDENTITY) == "identity"
    assert str(TaskId(TaskKind.MEASURE, ("d1", "n1"))) == "measure d1 n1"
    assert str(TaskId.choice("next", 2, "s1")) == "choice next 2 s1"


def test_only_a_choice_has_a_purpose() -> None:
    assert TaskId.choice("next", 2, "s1").purpose == "next"
    assert TaskId(TaskKind.COMPILE, ("next",)).purpose == ""
    assert TaskId(TaskKind.COMPILE, ("next",)).key == "next"
    assert IDENTITY.key == ""
