"""The live page in a browser: it follows the messages that a playground has sent."""

import json

import httpx
from browser import needs_browser, run_script
from test_playground import GREEDY, command, read_messages
from test_server import start

# Delivers recorded messages in place of the server, all at once.
STUB = """
class EventSource {
  constructor() { EventSource.source = this; }
}
const MESSAGES = %s;
"""
REPLAY = """
for (const message of MESSAGES) EventSource.source.onmessage({ data: JSON.stringify(message) });
"""


def replay(tmp_path, page, messages, script):
    """Run `script` in the page after these messages."""
    path = tmp_path / "live.html"
    data = json.dumps(messages).replace("</", "<\\/")
    before, tag, live = page.rpartition("<script")
    path.write_text(f"{before}<script>{STUB % data}</script>{tag}{live}", "utf-8")
    return run_script(path, REPLAY + script)


@needs_browser
def test_page_follows_and_goes_back(tmp_path):
    with start("--playground", "--dtype", "float32") as (url, _):
        page = httpx.get(url).text
        idle = read_messages(url, 0)
        command(url, "prompts", {"chats": ["What is 12 + 30?"], "params": GREEDY})
        messages = read_messages(url, 6)
        hostile = {"prompts": ["</script><img src=x onerror=alert(1)>"], "params": GREEDY}
        command(url, "prompts", hostile)
        later = [message for message in read_messages(url, 12) if message["first"] >= 6]
    script = """
    const seen = [];
    const look = () => seen.push([$("place").textContent, $("words").textContent]);
    look();
    go({ step: 1 });
    look();
    const answer = document.querySelector(".answer").textContent;
    const images = document.querySelectorAll("img").length;
    const [state, trouble] = [$("state").textContent, $("trouble").textContent];
    return { seen, answer, images, state, trouble };
    """
    result = replay(tmp_path, page, [*idle, *messages], script)
    (place, words), (earlier_place, earlier_words) = result["seen"]
    assert place == "6 / 6"
    assert "Step 6." in words
    assert earlier_place == "1 / 6"
    assert "A is admitted. This step computes all 20 tokens of its prompt." in earlier_words
    assert result["answer"] == "1"
    assert result["trouble"] == ""
    result = replay(tmp_path, page, [*idle, *messages, *later], script)
    assert result["images"] == 0
