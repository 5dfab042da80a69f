import pytest

from vlp.layers.temperature import LearnedScale, Temperature


@pytest.mark.parametrize(("log_scale", "value"), [(9.0, 100.0), (-2.0, 1.0)])
def test_is_bounded(log_scale, value):
    scale, temperature = LearnedScale(10.0), Temperature(0.07)
    for module in (scale, temperature):
        module.log_scale.data.fill_(log_scale)
    assert scale().item() == pytest.approx(value)
    assert temperature().item() == pytest.approx(1 / value)


@pytest.mark.parametrize(
    ("log_scale", "direction", "moves"),
    [
        (9.0, 1.0, True),  # too large, and the loss grows with it: descent comes back
        (9.0, -1.0, False),
        (-2.0, -1.0, True),
        (-2.0, 1.0, False),
        (2.0, 1.0, True),
        (2.0, -1.0, True),
    ],
)
def test_gradient_vanishes_only_outwards(log_scale, direction, moves):
    module = LearnedScale(10.0)
    module.log_scale.data.fill_(log_scale)
    value = module()
    (direction * value).backward()
    assert module.log_scale.grad.item() == pytest.approx(direction * value.item() if moves else 0.0)


def test_refuses_a_start_outside():
    with pytest.raises(ValueError, match=r"not in \[1, 100\]"):
        LearnedScale(200.0)
