"""Where each notebook under test keeps its work, and how strict its checks are: `solutions/` must pass them all."""

import os
import tempfile

import pytest

_home: dict[str, tempfile.TemporaryDirectory] = {}  # the notebook that runs now -> its lab folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Set the environment before nbval starts the notebook's kernel, which inherits it."""
    folder = item.path.parent.name
    if item.path.suffix != ".ipynb" or folder not in ("solutions", "notebooks"):
        return
    if str(item.path) not in _home:
        _home.clear()
        _home[str(item.path)] = tempfile.TemporaryDirectory(prefix="deepseek-lab-home-", ignore_cleanup_errors=True)
    os.environ["DEEPSEEK_LAB_HOME"] = _home[str(item.path)].name
    os.environ["DEEPSEEK_LAB_STRICT"] = str(int(folder == "solutions"))
