"""The map of a fleet of 200 services in a real browser: on a telephone, a desk, and a wide screen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from tests.helpers.browser import CHROMIUM, Browser, WebServer, browser
from tests.helpers.cli import HOME
from tests.helpers.logged_fleet import leave_dead, write_fleet

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")

NAMES = [f"service-{number:03}" for number in range(200)]
CALLERS: dict[str, list[str]] = {name: [] for name in NAMES}
for number in range(40):  # forty of them are called, by four at the edge and by one of the forty
    CALLERS[NAMES[160 + number]] = [*NAMES[4 * number : 4 * number + 4], NAMES[160 + number // 3]]
CALLERS["service-160"][-1] = "service-199"  # a circle
CALLERS["service-161"].append("far")  # in another home
ANSWERING = {"service-161": ["service-163"]}  # which it calls


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("map")
    write_fleet(folder / HOME, CALLERS, ANSWERING)
    leave_dead(folder / HOME, "service-162")
    server = WebServer(folder)
    with browser(server, tmp_path_factory.mktemp("browser")) as made:
        yield made
    assert server.stop() == 0
    assert (server.said, made.errors) == ([], [])


def test_the_map_of_a_large_fleet(shown: Browser) -> None:
    page = shown.go("/map")
    streams = sum(map(len, CALLERS.values()))
    page.wait_for_function(f"document.querySelectorAll('.map .line').length === {streams}")
    assert page.locator(".map .box").count() == 201
    assert page.locator("tbody tr").count() == streams + 1, "the answers are in the table alone"
    for width in (390, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        shown.picture(f"map-{width}")
        assert not shown.is_too_wide()
        name = page.locator("#map-service-160 .name").bounding_box()
        assert name is not None
        assert name["height"] >= 14, "it can be read"
    page.set_viewport_size({"width": 1280, "height": 800})


def test_it_is_read_and_used_without_a_mouse(shown: Browser) -> None:
    page = shown.go("/map")
    page.wait_for_function("document.querySelectorAll('.map .line').length > 100")
    row = page.locator("tbody tr", has_text="service-163").filter(has_text="answers")
    assert row.locator("td[data-label=p99]").inner_text() == "3.0 ms"
    assert "bad" in (page.locator(".box:has(#map-service-162)").get_attribute("class") or "")
    assert "its process has died" in (page.locator("#map-service-162").text_content() or "")
    page.get_by_role("link", name="all", exact=True).press("Enter")
    page.wait_for_url("**zoom=0")
    box = page.locator(".map").bounding_box()
    picture = page.locator(".map svg").bounding_box()
    assert box is not None
    assert picture is not None
    assert picture["width"] <= box["width"]
    assert picture["height"] <= box["height"]
    page.locator("#map-service-162").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="service-162").wait_for()
