"""The page in a real browser: what it shows of a live service, and that nothing leaves it.

Each story fails on an error of the console, a refusal of the content-security-policy, or a request
to anybody but the selector.
"""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from lean_selector.api.ui import page
from tests.support.chromium import BrowserPage, chromium
from tests.support.running_service import RunningService

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
RTL = "\u202eevil\u202c"
ENGINE = """
import sys
from tests.support.fake_engine import FakeEngine
from tests.support.running_service import free_port
replay = f"tcp://127.0.0.1:{free_port()}"
engine = FakeEngine(replay_endpoint=replay)
engine.store(list(range(64)), 1)
print(engine.url, f"tcp://127.0.0.1:{engine.events_port}", replay, flush=True)
sys.stdin.read()
"""
POLLED = ("--worker-health-interval-secs", "0.5", "--worker-health-path", "/v1/models")
EVENTLESS = ("--use-kv-events", "false")


@pytest.fixture(scope="module")
def one_browser() -> Iterator[BrowserPage]:
    with chromium() as page:
        yield page


@pytest.fixture
def browser(one_browser: BrowserPage) -> Iterator[BrowserPage]:
    one_browser.look(1280, 900)
    one_browser.console.clear()
    one_browser.requests.clear()
    yield one_browser
    foreign = [url for url in one_browser.requests if not url.startswith("http://127.0.0.1:")]
    assert [url for url in foreign if not url.startswith("data:")] == []
    assert one_browser.console == []


@contextmanager
def shown(browser: BrowserPage, service: RunningService) -> Iterator[None]:
    """The page of a service, which is left before that stops."""
    browser.open(f"http://127.0.0.1:{service.port}/ui")
    yield
    browser.open("about:blank")


@contextmanager
def engines(count: int) -> Iterator[list[tuple[Popen[str], list[str]]]]:
    """Processes with an HTTP server and a publisher each, and where these are."""
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            command = [sys.executable, "-c", ENGINE]
            process = stack.enter_context(Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            started.append((process, process.stdout.readline().split()))
        yield started


def register(service: RunningService, worker_id: int, **more: object) -> None:
    service.add_worker(worker_id, **{"model_name": "m", "total_kv_blocks": 1000, **more})


def select(service: RunningService, tokens: list[int], model: str = "m") -> None:
    body = {"model_name": model, "token_ids": tokens}
    assert service.post("/select_and_reserve", body)[0] == 200


def row(worker: int | str, then: str) -> str:
    """JavaScript about the row of a worker, which is called `row`."""
    return (
        f"""((row) => row && ({then}))"""
        f"""(document.querySelector('#fleet-rows tr[data-rank="{worker}/0"]'))"""
    )


def test_a_fleet_lives_is_sorted_and_shows_who_was_killed(browser: BrowserPage) -> None:
    with RunningService("--host", "127.0.0.1", *POLLED) as service, engines(3) as running:
        for worker_id, (_, (url, events, replay)) in enumerate(running, 1):
            more = {"endpoint": url, "kv_events_endpoint": events, "replay_endpoint": replay}
            register(service, worker_id, **more)
        with shown(browser, service):
            browser.wait("live.dataset.state === 'live'")
            for worker_id in (1, 2, 3):
                browser.wait(row(worker_id, "row.dataset.level === 'ok'"))
            browser.wait("document.getElementById('wrong-title').textContent.startsWith('Nothing')")

            for first in range(6):
                select(service, [*range(32), *range(first, first + 32)])
            browser.wait("document.getElementById('tiles').textContent.includes('running6')")
            browser.ask("document.querySelector('#fleet-head [data-by=requests] button').click()")
            browser.wait("document.querySelector('[data-by=requests]').ariaSort === 'descending'")
            column = (
                "[...document.querySelectorAll('#fleet-rows tr')].map(r => +r.cells[3].textContent)"
            )
            counted = browser.ask(column)
            assert sum(counted) == 6
            assert counted == sorted(counted, reverse=True)
            browser.ask("document.querySelector('#fleet-head [data-by=requests] button').click()")
            browser.wait("document.querySelector('[data-by=requests]').ariaSort === 'ascending'")
            assert browser.ask(column) == sorted(counted)

            browser.ask("document.getElementById('tab-decisions').click()")
            browser.wait("document.querySelectorAll('#choices tr').length >= 1")
            assert browser.ask("document.querySelectorAll('#why .candidate').length") == 3
            assert browser.ask("document.querySelectorAll('#why .stack i').length") >= 3
            assert browser.ask("location.hash") == "#decisions"
            address = browser.ask("location.href")
            browser.open("about:blank")
            browser.open(address)
            browser.wait("document.getElementById('panel-fleet').hidden")
            browser.wait("ranks.size === 3")
            browser.ask("document.getElementById('tab-fleet').click()")

            killed = running[1][0]
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            browser.wait(
                row(2, "row.dataset.level === 'error' && row.textContent.includes('ejected')")
            )
            assert "worker 2" in browser.ask("document.getElementById('findings').textContent")
            assert browser.ask(row(2, "getComputedStyle(row.querySelector('.chip')).color")) != (
                browser.ask(row(1, "getComputedStyle(row.querySelector('.chip')).color"))
            )
            browser.ask("document.getElementById('tab-system').click()")
            browser.wait("document.getElementById('system').textContent.includes('worker 2')")
            tables = "[...document.querySelectorAll('.scroll')]"
            assert browser.ask(f"{tables}.every(each => each.scrollWidth <= each.clientWidth)")


def test_everything_is_reached_by_the_keyboard(browser: BrowserPage) -> None:
    with RunningService("--host", "127.0.0.1", *EVENTLESS) as service:
        for worker_id in range(1, 31):
            register(service, worker_id)
        with shown(browser, service):
            browser.wait("document.querySelectorAll('#heat button').length === 30")
            where = "(document.activeElement.id || document.activeElement.ariaLabel || '')"
            met: list[str] = []
            while "filter" not in met:
                browser.press("Tab")
                met.append(browser.ask(where))
                assert len(met) < 20, met
                if met[-1] == "tab-fleet":
                    browser.press("ArrowRight")
                    assert browser.ask(where) == "tab-decisions"
                    assert browser.ask("document.getElementById('panel-fleet').hidden") is True
                    browser.press("ArrowLeft")
            assert (
                sum(name.startswith("worker 1:") for name in met) == 1
            )  # one stop for the heat map
            browser.ask("document.querySelector('#heat button').focus()")
            browser.press("ArrowRight")
            assert str(browser.ask(where)).startswith("worker 2:")
            browser.press("Enter")
            browser.wait("document.querySelectorAll('#fleet-rows tr').length === 1")
            browser.ask("document.querySelector('#fleet-head [data-by=load] button').focus()")
            browser.press("Enter")
            browser.wait("document.querySelector('[data-by=load]').ariaSort === 'descending'")
            assert browser.ask(
                "[...document.querySelectorAll('button, input, select')].every((each) =>"
                " each.textContent || each.ariaLabel || each.labels?.length)"
            )


def test_names_of_others_are_text(browser: BrowserPage) -> None:
    long = "long" * 2048
    with RunningService("--host", "127.0.0.1", *EVENTLESS) as service:
        register(service, 2**64 - 1, model_name=HOSTILE, endpoint=f"http://w/{HOSTILE}")
        register(service, 2**64 - 2, model_name=RTL, endpoint=f"http://w/{long}")
        register(service, 3, model_name=long, endpoint="http://w/" + RTL, block_size=None)
        select(service, [1, 2, 3], HOSTILE)
        with shown(browser, service):
            browser.wait(row(2**64 - 1, "row.textContent.includes('<script>')"))
            select(service, [1, 2, 3], HOSTILE)
            browser.wait(row(2**64 - 2, "row.dataset.level"))
            for tab in ("decisions", "cache", "system"):
                browser.ask(f"document.getElementById('tab-{tab}').click()")
                browser.wait(
                    f"document.getElementById('panel-{tab}').textContent.includes('<script>')"
                )
            assert browser.ask("document.querySelectorAll('img, main script, iframe').length") == 0
            assert browser.ask("document.title") == "lean-selector"
            browser.look(390, 844)
            for tab in ("fleet", "decisions", "cache", "system"):
                browser.ask(f"document.getElementById('tab-{tab}').click()")
                wide = "document.documentElement.scrollWidth <= innerWidth"
                assert browser.ask(wide), f"{tab} is wider than the phone"
            bar = "(({scrollHeight, clientHeight}) => scrollHeight - clientHeight)"
            assert browser.ask(f"{bar}(document.getElementById('tabs'))") == 0, "a scroll bar"


def test_a_large_fleet_is_a_heat_map_and_few_rows(browser: BrowserPage) -> None:
    with RunningService("--host", "127.0.0.1", *EVENTLESS) as service:
        for worker_id in range(1, 513):
            register(service, worker_id)
        for failed in (17, 230):
            for _ in range(3):
                service.post(f"/workers/{failed}/report", {"outcome": "refused"})
        with shown(browser, service):
            browser.wait("document.querySelectorAll('#heat button').length === 512")
            for first in range(200):
                select(service, list(range(first, first + 16 * (first % 13 + 1))))
            browser.wait("seen >= 100")
            browser.wait("document.querySelectorAll('#heat .error').length === 2")
            assert browser.ask("document.querySelectorAll('#fleet-rows tr').length") == 16
            assert browser.ask("document.querySelectorAll('*').length") < 1500
            level = "document.querySelector('#fleet-rows tr').dataset.level"
            assert browser.ask(level) == "error"
            browser.call("HeapProfiler.enable")
            browser.call("HeapProfiler.collectGarbage")
            assert browser.call("Runtime.getHeapUsage")["usedSize"] < 30e6


def test_a_token_is_asked_for_and_kept_for_the_tab(
    one_browser: BrowserPage, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("read r-1\nadmin a-1\n")
    flags = ("--host", "127.0.0.1", *EVENTLESS, "--auth-token-file", str(tokens))
    with RunningService(*flags) as service:
        service.token = "a-1"
        register(service, 7)
        one_browser.look(1280, 900)
        one_browser.console.clear()
        url = f"http://127.0.0.1:{service.port}/ui"
        one_browser.open(url)
        for text, then in (
            ("wrong", "document.getElementById('token-error').textContent !== ''"),
            ("r-1", "document.getElementById('token').hidden && ranks.size === 1"),
        ):
            one_browser.wait("!document.getElementById('token').hidden")
            given = json.dumps(text)
            one_browser.ask(f"document.getElementById('token-text').value = {given}")
            one_browser.ask("document.getElementById('token-form').requestSubmit()")
            one_browser.wait(then)
        one_browser.open(url)
        one_browser.wait("ranks.size === 1")
        assert all("401" in line for line in one_browser.console), one_browser.console
        one_browser.ask("sessionStorage.clear()")
        one_browser.open("about:blank")


def test_the_picture_in_the_readme_is_one_of_the_page_as_it_is() -> None:
    png = (Path(__file__).parents[2] / "docs/page.png").read_bytes()
    assert len(png) < 150_000
    assert sha256(page()[0]).hexdigest().encode() in png, ".ci/page_picture.py draws it anew"
