import json

import torch_interfaces


def test_the_installed_pytorch_has_the_interfaces_that_the_code_was_written_for() -> None:
    """Of a new version: read what differs, fix what it breaks, and run torch_interfaces.py in its environment."""
    known = json.loads(torch_interfaces.TABLE.read_text())
    assert known[torch_interfaces.version()] == torch_interfaces.installed()
