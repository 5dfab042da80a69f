import pytest

from vlp.config import ConfigError
from vlp.objectives.config import ObjectivesConfig
from vlp.objectives.loss import require_whole_groups, sample_groups


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


@pytest.mark.parametrize(("batch", "ranks"), [(128, 1), (128, 2), (48, 1), (64, 1)])
def test_ranks_hold_whole_groups(batch, ranks):
    require_whole_groups(ObjectivesConfig(itm={"group": 64}), batch, ranks)


@pytest.mark.parametrize(("batch", "ranks"), [(128, 4), (96, 1), (48, 2)])
def test_what_would_depend_on_the_ranks_is_refused(batch, ranks):
    said = f"task.objectives.itm.group 64 does not divide .* {batch // ranks} samples"
    with pytest.raises(ConfigError, match=said):
        require_whole_groups(ObjectivesConfig(itm={"group": 64}), batch, ranks, "task.objectives")


def test_something_must_be_trained():
    with pytest.raises(ValueError, match="nothing is trained"):
        ObjectivesConfig(contrastive=None, itm=None, mlm=None, mim=None)
