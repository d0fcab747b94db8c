"""Names become parts of host and object names, hence the strictness; a refusal proposes a better one."""

import pytest

from basilica.core.errors import ValidationError
from basilica.core.names import NAME_MAX, check_name, check_user, instance_name, namespace_of, rank_name


@pytest.mark.parametrize("name", ["a", "7", "train", "my-run-2", "a" * NAME_MAX, "a--b"])
def test_good_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("My Run", "my-run"),
        ("train_v2", "train-v2"),
        ("-train-", "train"),
        ("../etc/passwd", "etc-passwd"),
        ("train\n", "train"),
        ("größe", "gr-e"),
    ],
)
def test_a_bad_name_is_refused_with_a_better_one(name: str, hint: str) -> None:
    with pytest.raises(ValidationError) as caught:
        check_name(name)
    assert caught.value.field == "name"
    assert f"try '{hint}'" in str(caught.value)
    assert repr(name) in str(caught.value)
    assert check_name(hint) == hint


@pytest.mark.parametrize("name", ["", "---", "日本", "\0"])
def test_where_nothing_is_left_of_a_name_none_is_proposed(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        check_name(name)
    assert "try" not in str(caught.value)


def test_a_long_name_is_refused_with_its_length() -> None:
    with pytest.raises(ValidationError, match=f"at most {NAME_MAX} characters, this one has {NAME_MAX + 1}"):
        check_name("a" * (NAME_MAX + 1))


def test_the_field_is_the_callers() -> None:
    with pytest.raises(ValidationError) as caught:
        check_name("No", "friendlyName")
    assert caught.value.field == "friendlyName"


@pytest.mark.parametrize("user", ["", "Root", "a b", "-a", "a-", "a" * 49, "a/b", "a\n"])
def test_bad_users(user: str) -> None:
    with pytest.raises(ValidationError):
        check_user(user)


def test_derived_names() -> None:
    assert check_user("a" * 48) == "a" * 48
    assert namespace_of("ann") == "u-ann"
    assert instance_name("train", "x7k2") == "train-x7k2"
    assert rank_name("train-x7k2", 3) == "train-x7k2-3"
