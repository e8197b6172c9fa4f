"""A headless Chromium for tests of the page, driven over the WebDriver protocol with the standard library only."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.support.ranks import free_port

START_SECONDS = 60.0
CALL_SECONDS = 60.0
WAIT_SECONDS = 30.0
# No proxy of the environment stands between this process and its own driver.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def what_is_missing() -> str:
    """Return why there can be no browser here; empty: there can."""
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium")
    if driver and browser:
        return ""
    return "no chromium and chromedriver: install Debian's packages chromium and chromium-driver"


class Browser:
    """One window. As a context manager, it ends driver and browser."""

    def __init__(self, directory: Path) -> None:
        """Start a browser that keeps its files in `directory`."""
        self._port = free_port()
        with (directory / "chromedriver.log").open("w") as log:
            # The browser's processes join the group of the driver, so that all of them can be ended together.
            self._driver = subprocess.Popen(
                ["chromedriver", f"--port={self._port}"], stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_for_driver()
            self._session = self._open(directory)
        except BaseException:
            self._end_processes()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._call("DELETE", f"/session/{self._session}")
        finally:
            self._end_processes()

    def open(self, url: str) -> None:
        """Load a page."""
        self._of_session("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function in the page, and return its value."""
        return self._of_session("execute/sync", {"script": script, "args": arguments})

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Run a script until its value is true, and return that."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"this did not become true: {script}\n{self.text()}"
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """Return the text of the page as it is shown."""
        return str(self.run("return document.body.innerText"))

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol, and return its result."""
        return self._of_session("goog/cdp/execute", {"cmd": name, "params": parameters})

    def look(self, *, width: int, height: int = 900, scheme: str = "light", scale: int = 1) -> None:
        """Give the window a size and a color scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", media="screen", features=features)

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """Write a PNG of the page as it looks from its top, by default of the whole page."""
        # The picture has no scroll bar, so the page is as wide in it as the window.
        shown = self.run("return [window.innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": shown[0], "height": height or shown[1], "scale": 1}
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def accessible(self) -> Sequence[Mapping[str, Any]]:
        """Return the nodes of the accessibility tree that a screen reader finds: role, name, value and properties."""
        self.command("Accessibility.enable")
        nodes = self.command("Accessibility.getFullAXTree")["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                "value": node.get("value", {}).get("value"),
                **{entry["name"]: entry["value"].get("value") for entry in node.get("properties", ())},
            }
            for node in nodes
            if not node["ignored"]
        ]

    def _wait_for_driver(self) -> None:
        def is_ready() -> bool:
            try:
                return bool(self._call("GET", "/status")["ready"])
            except OSError:
                return False

        _wait(is_ready, START_SECONDS)

    def _open(self, directory: Path) -> str:
        arguments = [
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-proxy-server",
            "--force-device-scale-factor=1",
            f"--user-data-dir={directory / 'profile'}",
            # The sandbox refuses root, and needs rights that containers rarely give. The browser opens only our page.
            "--no-sandbox",
        ]
        options = {"goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")}}
        opened = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        return str(opened["sessionId"])

    def _of_session(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("POST", f"/session/{self._session}/{path}", body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with _OPENER.open(request, timeout=CALL_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.read().decode()[:2000]}") from None

    def _end_processes(self) -> None:
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()


def _wait(is_done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "the driver of the browser does not answer"
        time.sleep(0.05)
