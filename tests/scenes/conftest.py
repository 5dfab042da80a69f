import pytest

from vlp.scenes.graph import PLACES, Obj, Scene

BOXES = {
    place: (4.0 + 21 * (number % 3), 4.0 + 21 * (number // 3), 14.0, 14.0)
    for number, place in enumerate(PLACES)
}


@pytest.fixture(scope="session")
def make_scene():
    """`make_scene("small red circle top left", ...)`: objects in the middle of their places."""

    def make(*described, key="hand-made"):
        objects = []
        for words in described:
            size, colour, shape, place = words.split(" ", 3)
            objects.append(Obj(shape, colour, size, BOXES[place], place))
        tints = tuple((10 * number, 200, 30) for number in range(len(objects)))
        return Scene(key, 64, tuple(objects), (160, 162, 158), tints)

    return make
