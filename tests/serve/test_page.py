"""The page at / in headless Chromium: what a person sees and does."""
import shutil
import time

import pytest

from hetero.engine.scripted import Script
from hetero.serve.door import Settings

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt install chromium)")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        opened = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """A page that fails the test when it complains, or asks anybody but the server."""
    contexts = []

    def go(stage, allowed=()):
        context = browser.new_context()
        page, wrong = context.new_page(), []
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and not any(a in m.text for a in allowed) else None)
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(stage.url) else None)
        page.on("dialog", lambda d: (wrong.append(d.message), d.dismiss()))
        page.set_default_timeout(60_000)
        page.goto(stage.url)
        contexts.append((context, wrong))
        return page
    yield go
    for context, wrong in contexts:
        context.close()
        assert not wrong, wrong


def say(page, text):
    page.fill("#say", text)
    page.press("#say", "Enter")


def test_a_conversation_with_markdown_that_is_never_markup(stage, visit):
    stage.says = "# Sky\n\nIt is **blue** 😀 `x<1`.\n\n- one\n- two\n\n```py\nprint('<b>')\n```\n\n<img src=x onerror=alert(1)><script>alert(2)</script>"
    page = visit(stage)
    page.get_by_text("demo, context 512").wait_for()
    say(page, "Why? <b>&</b>")
    page.get_by_text("tok/s").wait_for()
    answer = page.locator(".m.assistant")
    assert answer.locator("h2").inner_text() == "Sky" and answer.locator("b").inner_text() == "blue" and answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre").inner_text().strip() == "print('<b>')" and answer.locator("code").first.inner_text() == "x<1"
    assert "<img src=x onerror=alert(1)><script>alert(2)</script>" in answer.inner_text() and answer.locator("img, script").count() == 0
    assert page.locator(".m.user").inner_text() == "Why? <b>&</b>" and page.locator("#say").input_value() == ""
    stage.says = "Again."
    say(page, "And?")
    page.get_by_text("Again.").wait_for()
    prompt = stage.tok.decode(stage.asked[-1].prompt, True)
    assert prompt.count("<|im_start|>user") == 2 and "It is **blue**" in prompt


def test_settings_are_sent_and_the_report_is_shown(stage, visit):
    page = visit(stage)
    page.get_by_text("settings", exact=True).click()
    for field, value in (("system", "Be brief."), ("temperature", "0.3"), ("top_p", "0.5"), ("max_tokens", "3"), ("seed", "42")):
        page.fill(f"#{field}", value)
    say(page, "hi")
    page.get_by_text("3 tokens,").wait_for()
    asked = stage.asked[-1]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.max_tokens, asked.sampling.seed) == (0.3, 0.5, 3, 42)
    assert stage.tok.decode(asked.prompt, True).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    page.get_by_text("report", exact=True).click()
    page.get_by_text("demo: no layers").wait_for()
    page.get_by_text("Close").click()
    page.click("#new")
    assert page.locator(".m").count() == 0


def test_an_answer_is_stopped_and_made_again(stage, visit):
    stage.says = Script(tuple(stage.tok.encode("la " * 200)), delay_s=0.05)
    page = visit(stage)
    say(page, "sing")
    page.get_by_text("la la la").wait_for()
    page.click("#stop")
    end = time.monotonic() + 20
    while stage.relay.active or not stage.engine.idle:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert page.locator("#send").is_enabled() and "la la la" in page.locator(".m.assistant").inner_text()
    stage.says = "Done now."
    page.click("#again")
    page.get_by_text("Done now.").wait_for()
    assert page.locator(".m").count() == 2 and "la la" not in page.locator("main").inner_text()


def test_reasoning_is_folded_and_faults_are_told(make_stage, visit):
    stage = make_stage(settings=Settings(keys=("secret",)))
    page = visit(stage, allowed=("401",))
    page.get_by_text("an API key is needed").wait_for()
    say(page, "hi")
    page.get_by_text("a valid API key is needed").wait_for()
    page.get_by_text("settings", exact=True).click()
    page.fill("#key", "secret")
    page.press("#key", "Tab")
    page.get_by_text("demo, context 512").wait_for()
    stage.says = "<think>\nLet me see.\n</think>\n\nYes."
    page.click("#again")
    page.get_by_text("Yes.").wait_for()
    assert page.locator(".m.assistant details").inner_text().startswith("reasoning") and not page.locator(".m.assistant details").get_attribute("open")
    page.get_by_text("report", exact=True).click()
    page.get_by_text("demo: no layers").wait_for()
