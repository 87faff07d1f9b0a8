"""Two servers in one runtime directory would remove each other's virtual machines."""

from pathlib import Path

import pytest

from agentenv.model.errors import Conflict
from agentenv.node.exclusive import alone_in


def test_the_second_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(Conflict, match="another server"), alone_in(tmp_path):
        pass

    with alone_in(tmp_path):
        pass
