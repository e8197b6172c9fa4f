"""The page in a browser: it shows what the daemon does, harms no reader, and can be read by all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from tests.integration.support.browser import Browser, what_is_missing
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Clients
from tests.integration.test_page import MARKUP
from tests.unit.storage.builders import Layout

pytestmark = pytest.mark.skipif(what_is_missing() != "", reason=what_is_missing())

LIVE = "return document.getElementById('state').textContent.startsWith('live')"
# Each text of the page that is shown, with its color and the first background below it that is not transparent.
CONTRASTS = """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim();
  const element = walker.currentNode.parentElement;
  if (!text || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName) || !element.checkVisibility()) continue;
  let below = element;
  while (below && (channels(getComputedStyle(below).backgroundColor)[3] ?? 1) < 1) below = below.parentElement;
  const style = getComputedStyle(element);
  const inks = [luminance(channels(style.color)), luminance(channels(getComputedStyle(below).backgroundColor))];
  const [dark, light] = inks.sort((a, b) => a - b);
  found.push([(light + 0.05) / (dark + 0.05), text.slice(0, 40)]);
}
return found;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon with two jobs: one whose name has markup, with steps, and one with a long name."""
    address = f"127.0.0.1:{free_port()}"
    config = {"metrics_listen": address, "heartbeat_timeout_seconds": 600.0}
    with Daemon(tmp_path_factory.mktemp("shown") / "state", config) as daemon, Clients(daemon.address) as clients:
        clients.rank(Layout(name=MARKUP), name=f"client {MARKUP}").begin().train(1, 5)
        clients.rank(Layout(name="job/" + "x" * 900, numels=(16,), groups=("a",))).begin()
        yield address


@pytest.fixture
def shown(browser: Browser, address: str) -> Browser:
    """The page, loaded and live, with at least two samples."""
    browser.look(width=1180)
    browser.open(f"http://{address}/")
    browser.wait_for(LIVE)
    browser.wait_for("return samples.rows.length > 1 && document.querySelectorAll('#jobs tbody tr').length === 2")
    return browser


def test_a_name_with_markup_is_shown_as_it_is_and_does_nothing(shown: Browser) -> None:
    names = shown.run("return [...document.querySelectorAll('#jobs bdi')].map((name) => name.textContent)")

    assert MARKUP in names
    assert MARKUP in shown.run("return document.querySelector('#steps h3').textContent")
    assert f"client {MARKUP}" in shown.run("return document.getElementById('events').textContent")
    # The text of a problem may quote a name.
    shown.run("showProblems({ tiers: [{ name: 'nvme', problems: [arguments[0]] }] })", MARKUP)
    assert f"NVMe: {MARKUP}" in shown.text()
    assert shown.run("return document.images.length") == 0
    assert shown.run("return document.scripts.length") == 1
    assert "harmed" not in shown.run("return document.title")
    with pytest.raises(AssertionError, match="TrustedHTML"):
        shown.run("document.body.innerHTML = '<p>text</p>'")


def test_it_shows_the_figures_of_the_daemon(shown: Browser) -> None:
    text = shown.text()

    assert "16.0\u00a0MiB" in text and "64.0\u00a0MiB" in text
    assert "1 of 1" in text and "from commit to commit, mean of 5" in text
    assert "Event loop blocked" in text and "a run of 1 rank opened the job" in text
    drawn = shown.run(
        "return [...document.querySelectorAll('#traffic path.line-0')].map((path) => path.getAttribute('d'))"
    )
    assert len(drawn) == 4, "bandwidth and queue of the two tiers; the only device is that of the second one"
    assert text.index("What binds a step") < text.index("Host memory") and "0 to " in text
    assert all(path.startswith("M") and "NaN" not in path for path in drawn)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_a_contrast_of_at_least_four_and_a_half(shown: Browser, scheme: str) -> None:
    shown.look(width=1180, scheme=scheme)
    shown.run("showAway('a test')")
    contrasts = shown.run(CONTRASTS)

    assert len(contrasts) > 100
    assert [entry for entry in contrasts if entry[0] < 4.5] == []
    assert shown.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")


def test_a_screen_reader_finds_landmarks_headings_tables_and_meters(shown: Browser) -> None:
    nodes = shown.accessible()
    roles = Counter(node["role"] for node in nodes)
    names = {(node["role"], node["name"]) for node in nodes}

    assert roles["banner"] == roles["main"] == roles["contentinfo"] == 1
    assert {("heading", title) for title in ("Tiers", "Jobs", "What binds a step", "Stalls", "Events")} <= names
    levels = [node["level"] for node in nodes if node["role"] == "heading"]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    meters = [node for node in nodes if node["role"] == "meter"]
    assert [node["name"] for node in meters] == ["Host memory in use", "NVMe in use"]
    assert all(0 < node["value"] < node["valuemax"] == 100 for node in meters)
    texts = shown.run(
        "return [...document.querySelectorAll('[role=meter]')].map((meter) => meter.getAttribute('aria-valuetext'))"
    )
    assert all("\u00a0MiB used: " in text and ", free " in text for text in texts)
    tables = [node for node in nodes if node["role"] == "table"]
    assert len(tables) == 4 and all(node["name"] for node in tables)
    assert roles["columnheader"] >= 9 and roles["rowheader"] >= 10
    unnamed = [node for node in nodes if node.get("focusable") and not node["name"] and node["role"] != "main"]
    assert [node["role"] for node in unnamed if node["role"] != "RootWebArea"] == []
    live = {node["role"]: node.get("live") for node in nodes if node.get("live")}
    assert live == {"status": "polite"}, "only the state is announced, and it changes rarely"


def test_a_poll_changes_no_announced_text_and_keeps_the_focus(shown: Browser) -> None:
    shown.run("document.getElementById('pause').focus()")
    shown.run(
        "window.announced = 0; new MutationObserver(() => { window.announced += 1; })"
        ".observe(document.getElementById('state'), { childList: true, characterData: true, subtree: true });"
    )
    before = shown.run("window.rowsBefore = [...document.querySelectorAll('#jobs tr')]; return samples.next")
    shown.wait_for("return samples.next > arguments[0]", before)

    assert shown.run("return window.announced") == 0
    assert shown.run("return document.activeElement.id") == "pause"
    assert shown.run("return window.rowsBefore.every((row) => row.isConnected)")


def test_it_fits_a_phone(shown: Browser) -> None:
    for width in (360, 1180):
        shown.look(width=width)
        wide = (
            "return [...document.body.querySelectorAll('*')].filter((e) => e.getBoundingClientRect().right > innerWidth"
        )
        wide += " && e.checkVisibility()).map((e) => e.outerHTML.slice(0, 100))"
        assert shown.run("return document.documentElement.scrollWidth") <= width, shown.run(wide)
        # Rows that are shown as lists are still rows of a table.
        roles = Counter(node["role"] for node in shown.accessible())
        assert roles["table"] == 4 and roles["row"] > 15


def test_it_asks_nothing_while_it_is_hidden_or_paused(shown: Browser) -> None:
    asked = "return performance.getEntriesByType('resource').length"
    shown.run(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    time.sleep(0.5)
    before = shown.run(asked)
    time.sleep(2.5)
    assert shown.run(asked) == before
    shown.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    shown.wait_for(f"{asked} > arguments[0]", before)
    shown.run("document.getElementById('pause').click()")
    time.sleep(0.5)
    before = shown.run(asked)
    time.sleep(2.5)
    assert shown.run(asked) == before
    assert shown.run("return document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    assert shown.run("return document.getElementById('state').textContent") == "paused"


def test_it_says_since_when_the_daemon_is_away_and_goes_on_when_it_is_back(browser: Browser, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = {"metrics_listen": address}
    with Daemon(tmp_path / "state", config) as daemon:
        browser.open(f"http://{address}/")
        browser.wait_for(LIVE)
        assert (
            "This store has no job yet. A trainer that attaches makes one: export PARAMSERVER_ADDRESS=unix:"
            in browser.text()
        )
        assert daemon.stop() == 0
    browser.wait_for("return !document.getElementById('alert').hidden")
    alert = browser.run("return document.getElementById('alert').textContent")
    assert "The daemon has not answered since" in alert and "The figures below are those of" in alert
    assert browser.run("return document.title").startswith("away since ")
    time.sleep(2.5)
    assert browser.run("return document.getElementById('alert').textContent") == alert, "it is announced once"
    with Daemon(tmp_path / "state", config) as daemon:
        browser.wait_for(LIVE)
        assert browser.run("return document.getElementById('alert').hidden")
        browser.wait_for("return samples.rows.length > 0")
        assert daemon.stop() == 0


def test_the_events_of_a_restarted_daemon_replace_those_of_the_former_one(browser: Browser, tmp_path: Path) -> None:
    """The numbers of the events begin anew with each daemon."""
    address = f"127.0.0.1:{free_port()}"
    times = "return [...document.querySelectorAll('#events time')].map((time) => time.getAttribute('datetime'))"
    with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon:
        browser.open(f"http://{address}/")
        browser.wait_for(LIVE)
        former, epoch = browser.run(times), browser.run("return samples.epoch")
        assert daemon.stop() == 0
    with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon:
        browser.wait_for(f"return samples.epoch !== null && samples.epoch !== '{epoch}'")
        assert former and not set(former) & set(browser.run(times))
        assert daemon.stop() == 0


def test_it_asks_for_a_token_and_says_why_one_is_refused(browser: Browser, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    tokens = tmp_path / "tokens.toml"
    admin = add_token(tokens, "operator", Role.ADMIN)
    other = add_token(tokens, "trainer", Role.JOB, ["*"])
    enter = "document.getElementById('token').value = arguments[0];document.getElementById('login').requestSubmit();"
    refused = "return !document.getElementById('refused').hidden && document.getElementById('refused').textContent"
    with Daemon(tmp_path / "state", {"metrics_listen": address, "token_file": str(tokens)}) as daemon:
        browser.open(f"http://{address}/")
        browser.wait_for("return document.activeElement.id === 'token'")
        assert browser.run("return document.getElementById('refused').hidden")
        browser.run(enter, "guessed")
        assert "does not know this token" in browser.wait_for(refused)
        browser.run(enter, other)
        browser.wait_for("return document.getElementById('refused').textContent.includes('not an admin')")
        browser.run(enter, admin)
        browser.wait_for(LIVE)
        assert not browser.run("return document.getElementById('figures').hidden")
        assert browser.run("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert daemon.stop() == 0
