"""The router's page in a real browser, on a live split cluster: page_client.py http://HOST:PORT [FOLDER for screenshots]."""

import pathlib
import sys

from browser import PHONE, WIDE, Tab, browser

HOSTILE = "<img src=x onerror=\"window.owned=1\"><script>window.owned=1</script> Say hello."
LONG = "Here is a text. " + "Prefill workers run prompts, decode workers generate, and the KV moves between them. " * 22


def chats(tab):
    page = tab.page
    tab.set_options(temperature="0")
    answer = tab.send("What is the capital of France?")
    meta = tab.ended(answer)
    assert "Paris" in answer.inner_text(), answer.inner_text()
    for figure in ("TTFT", "tokens/s", "prefill"):
        assert figure in meta, meta

    # Tokens are seen as they come.
    tab.set_options(max_tokens="120")
    answer = tab.send("Write a long story about a lighthouse.")
    lengths = set()
    tab.until("the answer grows", lambda: lengths.add(len(answer.locator(".text").inner_text())) or len(lengths) > 3)
    assert answer.get_attribute("aria-busy") is not None, f"it grew while it was generated: {lengths}"
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()
    page.keyboard.press("Escape")
    assert "stopped" in tab.ended(answer)
    assert page.locator("#send").is_visible()
    # A new chat ends the answer of the old one, and knows nothing of it.
    tab.send("Write a long story about a lighthouse.")
    page.click("#new")
    assert page.locator("article").count() == 0
    tab.until("the answer ends", page.locator("#send").is_visible)
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
    tab.set_options(max_tokens="4")
    tab.ended(tab.send("Hello."))
    assert [message["content"] for message in sent[-1]["messages"]] == ["Hello."], sent
    page.click("#new")


def stays_text(tab):
    """What users and models write is never markup."""
    page = tab.page
    tab.set_options(max_tokens="8")
    answer = tab.send(HOSTILE)
    tab.ended(answer)
    assert HOSTILE in page.locator("article.user").first.inner_text()
    assert page.locator("#log img, #log script").count() == 0
    # So is the name by which the model is served.
    assert "<img src=x onerror" in page.locator("#model option").first.text_content()
    assert page.evaluate("() => window.owned") is None
    page.click("#new")


def sees_the_cluster(tab):
    page = tab.page
    tab.until("both workers are ready", lambda: page.locator("#workers tbody tr").count() == 2)
    assert [page.locator("#workers th b").nth(n).inner_text() for n in (0, 1)] == ["prefill-0", "decode-0"]
    assert "ready" in tab.text("#workers td.state")
    assert tab.text("#health") == "Nothing is the matter"

    tab.set_options(max_tokens="24", prefill_policy="remote")
    answer = tab.send(LONG + "What is the capital of France?")
    meta = tab.ended(answer)
    assert "KV" in meta and "moved" in meta and "exposed" in meta, meta
    tab.until("the pair is told", lambda: "prefill-0 → decode-0" in answer.locator(".meta").inner_text())
    lane = page.locator("#handoffs .lane")
    tab.until("the handoff is seen", lambda: lane.count() == 1 and "1 ×" in lane.inner_text())
    assert "prefill-0 → decode-0" in lane.inner_text().replace("\n", " ")
    inked = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(value => value)"
    tab.until("the handoff is drawn", lambda: lane.locator("canvas").evaluate(inked))

    # From the answer to its waterfall, by keys alone.
    answer.locator(".meta button").focus()
    page.keyboard.press("Enter")
    rows = page.locator(".waterfall .name")
    tab.until("the waterfall opens", lambda: rows.count() > 8)
    names = rows.all_inner_texts()
    for name in ("generate", "prefill.compute", "kv.transfer", "decode.generate"):
        assert name in names, names
    page.locator(".waterfall summary").nth(names.index("kv.transfer")).press("Enter")
    assert "baton.kv.bytes" in page.locator(".waterfall details[open]").inner_text()
    opened = page.locator("button.open[aria-expanded=true]")
    assert opened.count() == 1
    opened.press("Enter")
    tab.until("the waterfall closes", lambda: page.locator(".waterfall").count() == 0)
    focused = lambda: page.evaluate("() => document.activeElement.textContent")  # noqa: E731
    page.locator("button.open").first.focus()
    first = focused()
    page.keyboard.press("ArrowDown")
    assert focused() != first, "the arrows move through the requests"
    everything = page.locator("#list td.path").count()
    page.fill("#filter", "no such thing")
    tab.until("the filter applies", lambda: "No recent request matches" in tab.text("#none"))
    page.fill("#filter", "prefill-0")
    # A short prompt goes there too, where an answer runs on the decode worker.
    paths = lambda: page.locator("#list td.path").all_inner_texts()  # noqa: E731
    tab.until("those that ran on a prefill worker are left", lambda: all("prefill-0" in path for path in paths()))
    assert 0 < len(paths()) < everything, paths()
    page.fill("#filter", "")
    page.locator("#filter").blur()
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "prompt"


def main():
    base = sys.argv[1]
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    with browser() as started:
        tab = Tab(started, base, WIDE)
        chats(tab)
        stays_text(tab)
        sees_the_cluster(tab)
        tab.fits()
        assert all(url.startswith(base + "/") for url in tab.asked), tab.asked
        assert not tab.complaints, tab.complaints
        dark = Tab(started, base, WIDE, "dark")
        dark.until("the cluster is shown", lambda: dark.page.locator("#workers tbody tr").count() == 2)
        colour = "() => getComputedStyle(document.body).backgroundColor"
        assert dark.page.evaluate(colour) != tab.page.evaluate(colour)
        phone = Tab(started, base, PHONE)
        for pane in ("chat", "cluster", "requests"):
            phone.page.click(f"nav button[data-pane={pane}]")
            phone.until(f"{pane} is shown", lambda: phone.page.locator(f"#{pane}").is_visible())
            assert sum(phone.page.locator(f"#{other}").is_visible() for other in ("chat", "cluster", "requests")) == 1
            if pane == "requests":
                phone.until("requests are listed", lambda: phone.page.locator("#list button.open").count() > 3)
            phone.fits()
            if folder:
                phone.page.screenshot(path=folder / f"phone-{pane}.png")
        assert not dark.complaints and not phone.complaints, dark.complaints + phone.complaints
        if folder:
            tab.page.screenshot(path=folder / "light.png")
            dark.page.screenshot(path=folder / "dark.png")
    print("the page works in a browser")


if __name__ == "__main__":
    main()
