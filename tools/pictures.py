"""Take the pictures of docs/images: the page of `planner explain --html` in a headless Chromium."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
GPT3 = "gpt3-175b dgx-a100 --nodes 128 --seq-len 2048 --global-batch 1536"
DEEPSEEK = "deepseek-v3 dgx-h200 --nodes 128 --engine megatron --seq-len 4096 --global-batch 4096"
WIDTH = 1000


def browser_of_the_tests(profile: Path) -> Any:
    """A headless Chromium, controlled as in the tests of the page."""
    path = ROOT / "tests" / "answers" / "page" / "conftest.py"
    spec = importlib.util.spec_from_file_location("page_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium on this machine; on Debian: apt install chromium")
    return module.Browser(program, profile)


def page_of(job: str, folder: Path) -> Path:
    """Write the page of the best plan of a job, and return its path."""
    planner = [sys.executable, "-m", "planner"]
    for command in (["plan", *job.split(), "-o", "plan.json"], ["explain", "plan.json", "--html", "page.html"]):
        subprocess.run([*planner, *command, "--force"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "page.html"


def main() -> None:
    """Take two pictures: the head of a page in light colours, and a timeline with a chosen pass in dark colours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = browser_of_the_tests(folder / "profile")
        try:
            browser.open(page_of(GPT3, folder), width=WIDTH, height=940)
            browser.screenshot(IMAGES / "page.png")
            browser.open(page_of(DEEPSEEK, folder), width=WIDTH, height=770, dark=True)
            browser.evaluate("document.getElementById('timeline').scrollIntoView({behavior: 'instant'})")
            browser.evaluate("document.getElementById('canvas').focus({preventScroll: true})")
            for key in ("ArrowRight", "+", "+", "+", "+", "ArrowDown", "ArrowDown", "ArrowRight"):
                browser.press(key)
            browser.screenshot(IMAGES / "timeline.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
