"""The report page: self-contained, forbidden to fetch, escaped; drawn without a complaint in a real browser."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.views.test_lanes_view import hanging
from workbench.ranks import GroupMap
from workbench.views import (
    Code,
    Picture,
    Section,
    Table,
    Text,
    group_map_figure,
    group_map_text,
    lanes_figure,
    lanes_text,
    report_html,
)

EVIL = "</script><script>document.title='broken'</script><img src=http://192.0.2.1/x onerror=alert(1)>&amp;\u2028"


def sections(text: str = "plain") -> list[Section]:
    group_map = GroupMap.build("sglang", tp=4, attn_cp=2)
    figure = lanes_figure(hanging())
    figure.data[0].text = [text]
    return [
        Section(text, (Text(f"{text}\n\nsecond paragraph"), Code(text), Table((text, "n"), ((text, 1.5),), text))),
        Section("Map", (Picture(group_map_figure(group_map), group_map_text(group_map), text),)),
        Section("Lanes", (Picture(figure, lanes_text(hanging()) + text),)),
    ]


class Page(HTMLParser):
    """The elements of a page with their attributes, and the raw content of its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}", {}))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data


def test_a_page_names_no_address_and_its_policy_forbids_to_fetch() -> None:
    page = Page(report_html("Title", sections()))
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    for tag, attributes in page.elements:
        assert not {"src", "href", "srcset", "onload", "onerror", "onclick"} & attributes.keys(), (tag, attributes)
    assert [t for t, _ in page.elements if t in ("link", "img", "iframe", "object", "base", "form")] == []


def test_every_script_that_may_run_is_named_by_its_digest() -> None:
    page = Page(report_html("Title", sections()))
    policy = next(a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    kinds = [a.get("type", "code") for t, a in page.elements if t == "script"]
    assert kinds == ["application/json", "application/json", "code", "code"]
    for script in page.scripts[2:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_hostile_texts_stay_texts() -> None:
    plain, evil = (Page(report_html(t, sections(t))) for t in ("plain", EVIL))
    assert [t for t, _ in evil.elements] == [t for t, _ in plain.elements]


def test_a_page_without_figures_carries_no_script() -> None:
    page = report_html("Short", [Section("A", (Text("b"),))])
    assert len(page) < 6_000
    assert "<script" not in page
    assert "script-src 'none'" in page


def test_equal_input_gives_an_equal_page() -> None:
    assert report_html("Title", sections()) == report_html("Title", sections())


def test_every_figure_has_its_text_twin_open_until_a_script_closes_it() -> None:
    page = report_html("Title", sections())
    assert page.count('<details class="twin" open>') == 2
    assert "which never came" in page


def test_no_figure_offers_to_send_itself_away_wherever_it_is_shown() -> None:
    for figure in (group_map_figure(GroupMap.custom({"tp": [[0, 1]]})), lanes_figure(hanging())):
        assert "sendChartToCloud" in figure.layout.modebar.remove
    assert 'showSendToCloud: false, plotlyServerURL: ""' in report_html("Title", sections())


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, names)), None)


def test_a_browser_draws_a_page_of_hostile_texts_without_a_complaint(tmp_path: Path) -> None:
    """A script that ran, an address that was asked for or a script that the policy stopped would all be complaints."""
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium or Chrome on this machine; install one or set BROWSER_PATH to check the page in it")
    path = tmp_path / "report.html"
    path.write_text(report_html("A title", sections(EVIL)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [chromium, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    assert 'data-ready="yes"' in done.stdout
    assert "<title>A title</title>" in done.stdout
    assert done.stdout.count('class="main-svg"') >= 4
    assert "world rank" in done.stdout
    assert 'data-title="Zoom in"' in done.stdout
    assert 'data-title="Share' not in done.stdout
    assert '<details class="twin">' in done.stdout
