"""The notebooks in a real JupyterLab in a real browser: every cell runs, every picture is there, no widget complains.

``make browser-test`` runs it (five minutes on two cores); ``make test`` leaves it out. Playwright's Python package drives the Chromium
that the system has. The notebooks are copies with small parameters; screenshots stay in ``build/browser`` to be looked at.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
SHOTS = ROOT / "build" / "browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SMALL_RUN = {"max_steps": 12, "eval_prompts": 1, "eval_tokens": 8, "eval_rows": 4, "run_name": "in-lab"}
SMALL = {
    "00_length_distribution": {"dataset": "reference"},
    "01_bucket_optimization": {"dataset": "reference", "most_buckets": 16},
    "02_padding_simulation": {"seeds": [0], "strategies": ["bucketed", "sorted", "random"]},
    "03_train": SMALL_RUN,
    "04_loss_diagnosis": {"run_dir": "../runs/in-lab"},
}
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Folder and address of a JupyterLab that serves the copies."""
    if not CHROMIUM:
        pytest.skip("no Chromium found; install it, on Debian with apt-get install chromium")
    home = tmp_path_factory.mktemp("lab")
    (home / "notebooks").mkdir()
    for name, values in SMALL.items():
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        for key, value in values.items():
            cell.source, changed = re.subn(rf"^({key}: \w+ = ).*?(  #)", rf"\g<1>{value!r}\g<2>", cell.source, flags=re.M)
            assert changed == 1, f"{name} has no parameter {key}"
        nbformat.write(notebook, home / "notebooks" / f"{name}.ipynb")
    for name, values in SETTINGS.items():
        path = home / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    places = {"DFLASH_HOME": home, "DFLASH_CACHE": ROOT / ".cache", "JUPYTERLAB_SETTINGS_DIR": home / "settings"}
    places |= {"JUPYTER_RUNTIME_DIR": home / "runtime", "JUPYTER_CONFIG_DIR": home / "config", "JUPYTERLAB_WORKSPACES_DIR": home / "spaces"}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--port=0",
        "--IdentityProvider.token=t",
        f"--notebook-dir={home}",
    ]
    command += ["--expose-app-in-browser", "--LabApp.extension_manager=readonly"]
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=home, env=os.environ | {k: str(v) for k, v in places.items()}, stdout=log, stderr=log)
    try:
        yield home, address(home, server)
    finally:
        stop(server, home)


def address(home: Path, server: subprocess.Popen) -> str:
    """Where the server listens, once it answers."""
    for _ in range(240):
        assert server.poll() is None, (home / "server.log").read_text()[-2000:]
        for path in (home / "runtime").glob("jpserver-*.json"):
            url = json.loads(path.read_text())["url"]
            try:
                urllib.request.urlopen(f"{url}api?token=t", timeout=5).close()
                return url
            except OSError:
                pass
        time.sleep(0.5)
    raise AssertionError("JupyterLab did not start:\n" + (home / "server.log").read_text()[-2000:])


def stop(server: subprocess.Popen, home: Path) -> None:
    """End the server and its kernels, by asking it to."""
    for path in (home / "runtime").glob("jpserver-*.json"):
        request = urllib.request.Request(f"{json.loads(path.read_text())['url']}api/shutdown?token=t", method="POST")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=10).close()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(10)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing; install it with pip install -e '.[browser]'")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


RUN_ALL = """async () => {
  const panel = window.jupyterapp.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  const late = new Promise((_, fail) => setTimeout(() => fail(new Error("the cells did not end in 240 s")), 240000));
  await Promise.race([window.jupyterapp.commands.execute("notebook:run-all-cells"), late]);
  await window.jupyterapp.commands.execute("docmanager:save");
}"""


def open_and_run(page, url: str, name: str) -> None:
    """Open a notebook, wait for its kernel, run all cells and save."""
    page.goto(f"{url}lab/tree/notebooks/{name}.ipynb?token=t&reset", timeout=120_000, wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.evaluate(RUN_ALL)


@pytest.mark.parametrize("name", SMALL)
def test_every_cell_runs_and_every_picture_is_there(lab, browser, name):
    home, url = lab
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        open_and_run(page, url, name)
        body = page.locator(".jp-Notebook")
        height = page.evaluate("() => Math.max(...[...document.querySelectorAll('.jp-Notebook, .jp-Notebook *')].map(e => e.scrollHeight))")
        page.set_viewport_size({"width": 1300, "height": min(int(height) + 200, 9_000)})
        page.evaluate("() => document.querySelectorAll('.jp-Notebook, .jp-WindowedPanel-outer').forEach(e => e.scrollTop = 0)")
        page.wait_for_timeout(1000)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"{name}.png")
        assert body.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0
        assert body.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
        assert not re.search(r"Error displaying widget|Loading widget|TqdmWarning|Javascript Error", body.inner_text())
        pictures = body.locator(".jp-RenderedImage img").evaluate_all("all => all.map(i => i.complete ? i.naturalWidth : 0)")
        saved = nbformat.read(home / "notebooks" / f"{name}.ipynb", as_version=4)
        outputs = [output for cell in saved.cells if cell.cell_type == "code" for output in cell.outputs]
        assert len(pictures) == sum("image/png" in output.get("data", {}) for output in outputs) >= 4
        assert min(pictures) > 400, "JupyterLab shows no alternative texts; the sentence under each picture is one"
        assert all(cell.execution_count for cell in saved.cells if cell.cell_type == "code")
        assert not complaints
    finally:
        page.close()


CHANGED = """before => [...document.querySelectorAll(".jp-CodeCell")].filter(cell => cell.querySelector(".widget-slider"))
  .some(cell => { const image = cell.querySelector(".jp-RenderedImage img"); return image && image.src !== before; })"""


def test_a_slider_changes_picture_and_numbers(lab, browser):
    _, url = lab
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    try:
        open_and_run(page, url, "01_bucket_optimization")
        cell = page.locator(".jp-CodeCell", has=page.locator(".widget-slider"))
        assert cell.locator(".widget-slider").count() == 3
        before, numbers = cell.locator(".jp-RenderedImage img").get_attribute("src"), cell.locator("table").inner_text()
        handle = cell.locator(".noUi-handle").first
        handle.focus()
        handle.press("ArrowLeft")
        page.wait_for_function(CHANGED, arg=before, timeout=30_000)
        page.wait_for_timeout(500)
        assert cell.locator("table").inner_text() != numbers
    finally:
        cell.scroll_into_view_if_needed()
        page.screenshot(path=SHOTS / "explore.png")
        page.close()
