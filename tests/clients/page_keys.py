"""API keys on the router's page: page_keys.py http://HOST:PORT CLIENT_KEY OPERATOR_KEY."""

import sys

from browser import WIDE, Tab, browser


def use(tab, key):
    tab.page.fill("#key-input", key)
    tab.page.press("#key-input", "Enter")
    tab.until("the dialog closes", lambda: not tab.page.locator("#key-dialog").is_visible())


def main():
    base, client, operator = sys.argv[1:]
    with browser() as started:
        tab = Tab(started, base, WIDE)
        page = tab.page
        dialog = page.locator("#key-dialog")
        tab.until("a key is asked for", dialog.is_visible)
        assert "asks for an API key" in dialog.inner_text()
        assert "marks `operator`" in tab.text("#cluster-refused")

        page.fill("#key-input", "sk-mallory")
        page.press("#key-input", "Enter")
        tab.until("the key is refused", lambda: "does not know the key" in dialog.inner_text() and dialog.is_visible())

        use(tab, client)
        tab.until("the models are listed", lambda: page.locator("#model option").count() == 1)
        refused = "may not see the cluster"
        tab.until("a client is no operator", lambda: refused in tab.text("#cluster-refused") and refused in tab.text("#requests-refused"))
        assert not page.locator("#workers").is_visible() and not page.locator("#list").is_visible()
        tab.set_options(temperature="0", max_tokens="8")
        answer = tab.send("What is the capital of France?")
        assert "TTFT" in tab.ended(answer) and "Paris" in answer.inner_text(), answer.inner_text()

        page.click("#key")
        use(tab, operator)
        tab.until("an operator sees the cluster", lambda: page.locator("#workers tbody tr").count() == 1)
        tab.until("and the requests", lambda: page.locator("#list button.open").count() >= 1)
        assert page.locator("#cluster-refused").is_hidden() and page.locator("#requests-refused").is_hidden()

        # A new load of the tab keeps the key; another tab has none.
        page.reload()
        tab.until("the key is kept", lambda: page.locator("#workers tbody tr").count() == 1)
        kept = page.evaluate("() => [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]")
        assert operator in kept[0] and not any(operator in place for place in kept[1:]), kept
        other = Tab(started, base, WIDE)
        other.until("another tab is asked", other.page.locator("#key-dialog").is_visible)
        keys = (client, operator, "sk-mallory")
        assert not any(key in url for key in keys for url in tab.asked + other.asked), "no key is in an address"

        page.click("#key")
        page.click("#key-dialog button[value=forget]")
        tab.until("the key is forgotten", lambda: page.locator("#cluster-refused").is_visible())
        assert page.evaluate("() => sessionStorage.length") == 0
    print("keys work in a browser")


if __name__ == "__main__":
    main()
