"""Chapter 00 in a real browser: JupyterLab in headless Chromium, as a learner meets it.

Opens the notebook, runs all cells, writes the answer to exercise 0.1, sees its check turn green, moves the slider and
sees the figure change.  Set DEEPSEEK_LAB_SCREENSHOTS to a folder to keep pictures of each stage.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tools import notebooks

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SOURCE = next(source for source in notebooks.sources(["00"]))
ANSWER = next(cell.full for cell in notebooks.read_chapter(SOURCE) if "@exercise(" in cell.full)
SECONDS = 60  # an upper limit for starting and for running the notebook; nothing waits longer than it must

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing; on Debian and Ubuntu: sudo apt install chromium"),
]


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on loopback, with a token, over a copy of the student notebook; yields the notebook's address."""
    folder = tmp_path / "course" / "notebooks"
    folder.mkdir(parents=True)
    _, learner = notebooks.targets(SOURCE)
    shutil.copy(learner, folder)
    (folder.parent / "pyproject.toml").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--allow-root"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    env = {**os.environ, "DEEPSEEK_LAB_HOME": str(tmp_path / "lab"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    env |= {"JUPYTER_DATA_DIR": str(tmp_path / "data"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    settle(tmp_path / "settings", "notebook-extension/tracker", windowingMode="none")  # also cells out of sight exist
    settle(tmp_path / "settings", "apputils-extension/notification", fetchNews="false")
    log = tmp_path / "jupyter.log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}", server, log)
        yield f"http://127.0.0.1:{port}/lab/tree/{learner.name}?token={token}"
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()


def settle(folder: Path, plugin: str, **settings: str) -> None:
    """Set what a user could set in JupyterLab's settings editor."""
    file = folder / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(settings))


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(4 * SECONDS):
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with code {server.returncode}:\n{log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.25)
    raise TimeoutError(f"JupyterLab did not answer within {SECONDS} s:\n{log.read_text()[-2000:]}")


@pytest.fixture
def page():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(1000 * SECONDS)
        yield page
        keep(page, "last")
        browser.close()


def test_a_learner_solves_the_first_exercise(lab, page):
    page.goto(lab)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_text("| Idle").wait_for()
    cells = page.locator(".jp-Notebook .jp-Cell")

    # Run everything: the stub gives way to the package's function, so no cell fails.
    run_all_cells(page)
    page.locator(".lab-progress").wait_for()
    assert "0 of" in page.locator(".lab-progress").inner_text()
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    keep(page, "untouched")
    check_cell = cells.filter(has_text="check(global_token_mean)").filter(has=page.locator(".lab-verdict")).first
    assert "not yet" in check_cell.locator(".lab-verdict").inner_text()
    assert "lab-open" in check_cell.locator(".lab-verdict").get_attribute("class")

    # Write the answer into the stub's cell, and check it.
    stub = cells.filter(has_text="@exercise(").filter(has_text="raise NotImplementedError").first
    replace_and_run(page, stub, ANSWER)
    check_cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    check_cell.locator(".lab-passed").wait_for()
    assert "passed" in check_cell.locator(".lab-verdict").inner_text()
    keep(page, "solved", check_cell)

    # Move the slider with the keyboard: the figure is drawn anew.
    figure = page.locator("img.lab-figure").first
    figure.scroll_into_view_if_needed()
    before = figure.get_attribute("src")
    page.locator(".widget-slider [role=slider], .widget-slider .noUi-handle").first.focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("([before]) => document.querySelector('img.lab-figure').src !== before", arg=[before])
    keep(page, "moved", figure)


def run_all_cells(page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()


def replace_and_run(page, cell, text: str) -> None:
    """Put `text` in place of a cell's source, as a paste would (typing would meet automatic indentation)."""
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)
    page.keyboard.press("Control+Enter")


def keep(page, name: str, at=None) -> None:
    """A screenshot for whoever asked for one."""
    if folder := os.environ.get("DEEPSEEK_LAB_SCREENSHOTS"):
        if at is not None:
            at.scroll_into_view_if_needed()
        page.screenshot(path=Path(folder) / f"{name}.png")
