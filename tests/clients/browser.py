"""A real browser on the router's page: what the tests of the page share."""

import contextlib
import shutil
import time

from playwright.sync_api import sync_playwright

# The page must be seen to work on a machine that many tests share.
LONG_MS = 120_000
WIDE = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}


def chromium():
    for name in ("chromium-headless-shell", "chromium", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise SystemExit("there is no Chromium: run `make browser`, as `make test` does")


class Tab:
    """A tab with an empty session. Everything that the page complains of, and each address that it asks for, is noted."""

    def __init__(self, browser, base, size, scheme="light"):
        self.base = base
        self.complaints, self.asked = [], []
        phone = size["width"] < 600
        context = browser.new_context(
            viewport=size, color_scheme=scheme, is_mobile=phone, has_touch=phone, device_scale_factor=2 if phone else 1
        )
        context.set_default_timeout(LONG_MS)
        self.page = context.new_page()
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(base + "/")

    def until(self, what, is_so):
        """Waits until `is_so` holds. (Playwright's own wait for a function needs `eval`, which the page's policy forbids.)"""
        deadline = time.monotonic() + LONG_MS / 1000
        while not (value := is_so()):
            assert time.monotonic() < deadline, f"never: {what}; the page says {self.complaints}"
            time.sleep(0.02)
        return value

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()

    def send(self, text):
        """Sends a message; returns the locator of its answer."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        return self.page.locator("article.assistant").last

    def ended(self, answer):
        """The line with the figures of an answer that has ended."""
        meta = answer.locator(".meta")
        self.until("an answer ends", lambda: "waterfall" in meta.inner_text() or "failed" in answer.get_attribute("class"))
        return meta.inner_text()

    def set_options(self, **options):
        if not self.page.locator("#options").evaluate("details => details.open"):
            self.page.click("#options summary")
        for name, value in options.items():
            field = "#" + name.replace("_", "-")
            if name == "prefill_policy":
                self.page.select_option(field, value)
            else:
                self.page.fill(field, value)
        self.page.click("#options summary")

    def fits(self):
        """Nothing is wider than its pane, and no pane than the screen."""
        wider = """() => [document.documentElement, ...document.querySelectorAll('main > section')]
            .filter((part) => part.scrollWidth > part.clientWidth || part.clientWidth > innerWidth)
            .map((part) => `${part.id || part.tagName}: ${part.scrollWidth} in ${part.clientWidth} of ${innerWidth}`)"""
        assert not (found := self.page.evaluate(wider)), found


@contextlib.contextmanager
def browser():
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that containers and root do not have.
        started = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield started
        started.close()
