import pytest

from vlp.objectives.groups import sample_groups


@pytest.mark.parametrize(
    ("rows", "group", "expected"),
    [(32, 16, (2, 16)), (16, 16, (1, 16)), (5, 16, (1, 5)), (3, 1, (3, 1)), (0, 4, (0, 4))],
)
def test_sizes(rows, group, expected):
    assert sample_groups(rows, group) == expected


def test_refuses_a_rest():
    with pytest.raises(ValueError, match="20 rows cannot be cut into groups of 16"):
        sample_groups(20, 16)


def test_refuses_no_group():
    with pytest.raises(ValueError, match="at least 1"):
        sample_groups(20, 0)
