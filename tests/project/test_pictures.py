"""The course's pictures show what the package computes."""

import pytest
from pictures import FOLDER, PICTURES, render


@pytest.mark.parametrize("draw", PICTURES, ids=lambda draw: draw.__name__)
def test_pictures_are_those_of_the_script(draw):
    path = FOLDER / f"{draw.__name__}.svg"
    assert path.read_text() == render(draw), "run python tests/project/pictures.py"
