"""3.1 and 3.2: providers from packages and user code in the configuration, reloaded while calls run."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolspace import (
    ConfigError,
    EventType,
    ProviderError,
    ToolContext,
    ToolNameConflict,
    ToolProvider,
    Toolspace,
    tool,
)
from toolspace.providers.functions import list_loaded_files
from toolspace.providers.plugins import build_provider, get_factory
from toolspace.testing import EventRecorder, ProviderContract

pytestmark = pytest.mark.usefixtures("interpreter")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_provider.py"

PROVIDER = """
import asyncio

from toolspace import Tool, ToolProvider, ToolResult

log = []


class Plug(ToolProvider):
    kind = "plug"

    def __init__(self, greeting: str = "hello", *, tools=("say", "rest"), api_key=None, broken=False, hangs=False):
        super().__init__()
        self.greeting, self.names, self.broken, self.hangs = greeting, tools, broken, hangs
        self.resting = asyncio.Event()
        self.go_on = asyncio.Event()
        self.hanging = asyncio.Event()
        self.closed = asyncio.Event()
        log.append(f"made {greeting}")

    def list_tools(self):
        return [Tool(name, "Says it.", {"type": "object"}) for name in self.names]

    async def warmup(self):
        log.append(f"started {self.greeting}")
        if self.broken:
            raise ConnectionError("nobody answers")
        if self.hangs:
            self.hanging.set()
            await asyncio.Event().wait()

    async def execute(self, name, parameters, context):
        if name == "rest":
            self.resting.set()
            await self.go_on.wait()
        return ToolResult(ok=True, result=self.greeting)

    def get_instructions(self):
        return f"Say {self.greeting}."

    async def aclose(self):
        log.append(f"closed {self.greeting}")
        self.closed.set()


class Named(Plug):
    namespace = "own"


class Unready(Plug):
    def list_tools(self):
        raise RuntimeError("not connected")


class Shy(Plug):
    def is_offered(self, tool, context):
        return tool.name.endswith("__say") and context.user_id == "ann"


class NoSuper(Plug):
    def __init__(self):
        pass


class Picky(Plug):
    def __init__(self, url, *, api_key):
        raise ValueError(f"cannot reach {url} with {api_key}")


def make(**settings):
    return Plug(**settings)


async def later():
    return Plug()


def nothing():
    return None


ready = Plug
number = 5
"""

OpenToolspace = Callable[..., Toolspace]


def load_provider(uses: str, settings: dict[str, Any], *, base_dir: Path | None = None) -> ToolProvider:
    return build_provider(get_factory(uses, base_dir), uses, settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plug.py").write_text(PROVIDER)
    return tmp_path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs a package: its module and its metadata with entry points."""

    def install(package: str, code: str, **points: str) -> Path:
        site = tmp_path / "site"
        info = site / f"{package}-1.2.dist-info"
        info.mkdir(parents=True)
        (site / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[toolspace.providers]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        return site

    return install


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    def write(**config: Any) -> Path:
        path = folder / "toolspace.yaml"
        path.write_text(yaml.safe_dump({"storage": {"dir": "./state"}, "tools": {"builtins": False}, **config}))
        return path

    return write


@pytest.fixture
def open_with_providers(write: Callable[..., Path]) -> OpenToolspace:
    def open_with_providers(**providers: Any) -> Toolspace:
        return Toolspace.open(write(providers=providers), environ={})

    return open_with_providers


def names(ts: Toolspace) -> list[str]:
    return [tool.name for tool in ts.list_tools() if not tool.name.startswith("agent__")]


def plug(ts: Toolspace, namespace: str) -> Any:
    """The provider of the test behind a namespace."""
    (mounted_provider,) = [
        provider for provider in ts.orchestrator.providers if provider.namespace == namespace and provider.list_tools()
    ]
    return mounted_provider.inner  # type: ignore[attr-defined]


def log_of(provider: Any) -> list[str]:
    # Not from `sys.modules`: a reload replaces the module there.
    return type(provider).aclose.__globals__["log"]


# Providers of installed packages


@pytest.mark.spec("3.1")
async def test_an_installed_package_offers_its_provider(
    install: Callable[..., Path], open_with_providers: OpenToolspace
) -> None:
    install("plug_pack", PROVIDER, greeter="plug_pack:Plug", maker="plug_pack:make")
    async with open_with_providers(greeter={}, second={"uses": "maker", "settings": {"greeting": "hi"}}) as ts:
        assert names(ts) == ["greeter__say", "greeter__rest", "second__say", "second__rest"]
        result = await ts.call("greeter__say")
        assert (result.result, result.kind, result.namespace) == ("hello", "plug", "greeter")
        assert (await ts.call("second__say")).result == "hi"
        assert "Say hi." in ts.orchestrator.instructions()
        log = log_of(plug(ts, "greeter"))
        assert log == ["made hello", "made hi", "started hello", "started hi"]
    assert log[4:] == ["closed hello", "closed hi"]


@pytest.mark.spec("3.1")
class TestInstalledExample(ProviderContract):
    """The example provider as an installed package."""

    call = ("write", {"title": "a", "text": "b"})
    failing_call = ("write", {"title": "a", "text": "b" * 11})
    slow_call = ("wait_for", {"title": "never written"})

    @pytest.fixture
    def provider(self, install: Callable[..., Path], tmp_path: Path) -> ToolProvider:
        install("notes_pack", EXAMPLE.read_text(), notes="notes_pack:NotesProvider")
        return load_provider("notes", {"file": str(tmp_path / "notes.db"), "max_length": 10})


@pytest.mark.spec("3.1")
def test_an_unknown_provider_suggests_similar_names(install: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match='no installed package offers a provider "weather"; none is installed'):
        load_provider("weather", {})
    install("plug_near", PROVIDER, weather="plug_near:Plug", stocks="plug_near:Plug")
    with pytest.raises(ConfigError, match=r'"wether"; did you mean "weather"\?; installed are stocks, weather'):
        load_provider("wether", {})


@pytest.mark.spec("3.1")
def test_two_packages_with_one_name_are_an_error_that_names_both(install: Callable[..., Path]) -> None:
    install("plug_one", PROVIDER, greeter="plug_one:Plug")
    install("plug_two", PROVIDER, greeter="plug_two:Plug")
    with pytest.raises(ConfigError, match=r"offered twice, by plug_\w+:Plug \(plug_\w+ 1.2\) and plug_\w+:Plug"):
        load_provider("greeter", {})
    assert load_provider("plug_two:Plug", {}).kind == "plug"


@pytest.mark.spec("3.1")
@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        ("import no_such_library", "plug_bad:Plug", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1", "plug_bad:Plug", "has no attribute 'Plug'"),
        ("import sys; sys.exit(2)", "plug_bad:Plug", "SystemExit: 2"),
    ],
)
def test_a_package_that_cannot_be_imported_is_reported_with_the_reason(
    install: Callable[..., Path], code: str, value: str, message: str
) -> None:
    install("plug_bad", code, greeter=value)
    with pytest.raises(ConfigError, match=message) as error_info:
        load_provider("greeter", {})
    assert 'the provider "greeter" of plug_bad 1.2 (plug_bad:Plug) cannot be imported' in str(error_info.value)


def test_entry_points_are_read_only_if_a_provider_is_configured(write: Callable[..., Path], folder: Path) -> None:
    code = "import sys, toolspace; toolspace.Toolspace.open({!r}); print('importlib.metadata' in sys.modules)"

    def lookup_count(path: Path) -> str:
        out = subprocess.run([sys.executable, "-c", code.format(str(path))], capture_output=True, text=True, check=True)
        return out.stdout.strip()

    assert lookup_count(write()) == "False"
    assert lookup_count(write(providers={"greeter": {"enabled": False}})) == "False"


# Providers of the user


@pytest.mark.spec("3.1")
@pytest.mark.parametrize("uses", ["plug:Plug", "./plug.py:Plug", "plug:make", "plug:ready"])
async def test_a_user_provider_is_found_beside_the_configuration(open_with_providers: OpenToolspace, uses: str) -> None:
    async with open_with_providers(mine=uses) as ts:
        assert (await ts.call("mine__say")).result == "hello"


@pytest.mark.spec("3.1")
@pytest.mark.parametrize(
    ("uses", "settings", "message"),
    [
        ("./missing.py:Plug", {}, r"there is no file .*missing\.py"),
        ("missing_module:Plug", {}, "missing_module:Plug cannot be imported: ModuleNotFoundError"),
        ("./plug.py:Plgu", {}, "there is no 'Plgu' in it; did you mean \"Plug\""),
        ("./plug.py", {}, "names no provider; write the name of an installed one, package.module:Name"),
        ("plug:", {}, "names no provider"),
        ("a b:c", {}, "names no provider"),
        ("./plug.py:number", {}, "an int makes no provider; name a ToolProvider class"),
        ("./plug.py:nothing", {}, "makes a NoneType, which is no ToolProvider"),
        ("./plug.py:later", {}, "makes a coroutine, which is no ToolProvider"),
        ("./plug.py:NoSuper", {}, r"does its __init__ call super\(\).__init__\(\)\?"),
        ("./plug.py:Unready", {}, "its tools cannot be listed: RuntimeError: not connected; before it has started"),
        ("./plug.py:Plug", {"greting": 1}, 'there is no setting "greting"; did you mean "greeting"'),
        ("./plug.py:Plug", {"zzz": 1}, 'no setting "zzz"; it takes greeting, tools, api_key, broken, hangs'),
        ("./plug.py:nothing", {"x": 1}, 'no setting "x"; it takes none'),
        ("./plug.py:Picky", {"zzz": 1}, 'no setting "zzz".*; the setting "url" is missing; the setting "api_key"'),
        ("./plug.py:make", {"greting": 1}, "cannot be made with the settings greting: TypeError"),
    ],
)
def test_an_invalid_entry_says_what_to_write(folder: Path, uses: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_provider(uses, settings, base_dir=folder)


@pytest.mark.spec("3.1")
def test_an_error_in_user_code_names_its_line(folder: Path) -> None:
    (folder / "bad.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"bad.py:Plug cannot be imported: .*bad\.py:2: ZeroDivisionError"
    ) as error_info:
        load_provider("./bad.py:Plug", {}, base_dir=folder)
    assert "functions" not in str(error_info.value)


@pytest.mark.spec("3.2")
def test_all_errors_are_reported_together_with_their_lines(open_with_providers: OpenToolspace, folder: Path) -> None:
    with pytest.raises(ConfigError) as error_info:
        open_with_providers(a="no_such_one", b={"uses": "./plug.py:Plug", "settings": {"x": 1}}, c="./plug.py:Plug")
    first, second = str(error_info.value).splitlines()
    assert first.startswith(f"{folder / 'toolspace.yaml'}:2 (providers.a): no installed package offers")
    assert second.startswith(f"{folder / 'toolspace.yaml'}:3 (providers.b): ./plug.py:Plug: there is no setting")


@pytest.mark.spec("4.11")
@pytest.mark.parametrize("shape", ["mapping", "list"])
def test_no_message_shows_a_secret(write: Callable[..., Path], shape: str) -> None:
    settings = {"url": "https://${HOST}/x", "api_key": "opensesame-1"}
    entry = {"uses": "./plug.py:Picky", "settings": settings}
    path = write(providers={"a": entry} if shape == "mapping" else [{"name": "a", **entry}])
    with pytest.raises(ConfigError) as error_info:
        Toolspace.open(path, environ={"HOST": "hidden.example"})
    message = str(error_info.value)
    assert "cannot be made with the settings api_key, url: ValueError: cannot reach [hidden] with [hidden]" in message
    assert "sesame" not in message
    assert "hidden.example" not in message


# Rules of an entry


@pytest.mark.spec("3.2")
async def test_the_namespace_comes_from_the_entry_the_provider_or_the_name(open_with_providers: OpenToolspace) -> None:
    own_provider = "./plug.py:Named"
    async with open_with_providers(
        a=own_provider, b={"uses": own_provider, "namespace": "other"}, c="./plug.py:Plug"
    ) as ts:
        assert {name.split("__")[0] for name in names(ts)} == {"own", "other", "c"}
    with pytest.raises(ConfigError, match=r'providers.b\): the namespace "own" is that of providers.a already'):
        open_with_providers(a=own_provider, b=own_provider)


@pytest.mark.spec("3.2")
async def test_a_required_provider_that_does_not_start_fails_the_start(open_with_providers: OpenToolspace) -> None:
    broken = {"uses": "./plug.py:Plug", "settings": {"broken": True}}
    with pytest.raises(ProviderError, match="a: nobody answers"):
        async with open_with_providers(a={**broken, "required": True}):
            pass
    async with open_with_providers(a=broken) as ts:
        assert ts.orchestrator.unavailable_providers() == {"a": "nobody answers"}


@pytest.mark.spec("5.3")
async def test_explaining_a_tool_names_the_line_of_its_provider(write: Callable[..., Path], folder: Path) -> None:
    entry = {"uses": "./plug.py:Plug", "requestTimeoutMs": 7000, "queue": "q", "cache": "1m"}
    path = write(
        queues={"q": {"concurrent": 1}},
        providers={"a": entry},
        tools={"builtins": False, "overrides": {"a__rest": {"timeout": "9s"}}},
    )
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.strip() == "a:")
    ts = Toolspace.open(path, environ={})
    explanation = ts.orchestrator.explain("a__say")
    assert explanation is not None
    assert (explanation[1].timeout.value, explanation[1].queue.value, explanation[1].cache.value) == (7.0, "q", 60.0)
    assert explanation[1].timeout.source.startswith(f"{path}:{line} (providers.a")
    overridden = ts.orchestrator.explain("a__rest")
    assert overridden is not None
    assert overridden[1].timeout.value == 9.0


@pytest.mark.spec("3.1")
async def test_a_provider_decides_who_gets_a_tool_and_gives_instructions(open_with_providers: OpenToolspace) -> None:
    async with open_with_providers(shy="./plug.py:Shy") as ts:
        assert names(ts) == []
        tool_names = [tool.name for tool in ts.list_tools(context=ToolContext(user_id="ann"))]
        assert [name for name in tool_names if name.startswith("shy")] == ["shy__say"]
        assert (await ts.call("shy__say")).result == "hello"  # Not shown is not forbidden.
        assert "Say hello." in ts.orchestrator.instructions()


# Reload


@pytest.mark.spec("5.4")
async def test_a_reload_replaces_only_changed_providers(write: Callable[..., Path]) -> None:
    def config(**changes: Any) -> dict[str, Any]:
        return {name: {"uses": "./plug.py:Plug", "settings": {"greeting": name}} for name in ("kept", "old")} | changes

    async with Toolspace.open(write(providers=config()), environ={}) as ts:
        kept_plug, old, log = plug(ts, "kept"), plug(ts, "old"), log_of(plug(ts, "kept"))
        log.clear()
        write(providers=config(old={"uses": "./plug.py:Plug", "settings": {"greeting": "new"}}))
        await ts.reload()
        assert plug(ts, "kept") is kept_plug
        assert (await ts.call("old__say")).result == "new"
        assert log_of(plug(ts, "old")) == ["made new", "started new"]
        await wait_until_closed(old)
        assert log == ["closed old"]
        write(providers={"kept": config()["kept"], "added": "./plug.py:Plug"})
        await ts.reload()
        assert names(ts) == ["kept__say", "kept__rest", "added__say", "added__rest"]
        assert plug(ts, "kept") is kept_plug


async def wait_until_closed(provider: Any) -> None:
    """A reload closes replaced providers in the background."""
    await asyncio.wait_for(provider.closed.wait(), 20)


@pytest.mark.spec("5.4")
async def test_rules_change_without_a_restart(write: Callable[..., Path]) -> None:
    entry = {"uses": "./plug.py:Plug", "settings": {"greeting": "a"}}
    async with Toolspace.open(write(providers={"a": entry}), environ={}) as ts:
        before = plug(ts, "a")
        write(providers={"a": {**entry, "toolsDenied": ["rest"], "requestTimeoutMs": 5000, "required": True}})
        await ts.reload()
        assert plug(ts, "a") is before
        assert names(ts) == ["a__say"]
        assert log_of(before) == ["made a", "started a"]
        explanation = ts.orchestrator.explain("a__say")
        assert explanation is not None
        assert explanation[1].timeout.value == 5.0


@pytest.mark.spec("5.4")
@pytest.mark.parametrize("change", ["changed", "removed", "disabled"])
async def test_running_calls_finish_before_their_provider_is_closed(write: Callable[..., Path], change: str) -> None:
    entry = {"uses": "./plug.py:Plug", "settings": {"greeting": "old"}}
    after: dict[str, Any] = {
        "changed": {"a": {**entry, "settings": {"greeting": "new"}}},
        "removed": {},
        "disabled": {"a": {**entry, "enabled": False}},
    }
    async with Toolspace.open(write(providers={"a": entry}), environ={}) as ts:
        old = plug(ts, "a")
        call = asyncio.create_task(ts.call("a__rest"))
        await old.resting.wait()
        write(providers=after[change])
        await ts.reload()
        assert (await ts.call("a__say")).result == ("new" if change == "changed" else None)
        assert names(ts) == (["a__say", "a__rest"] if change == "changed" else [])
        assert "closed old" not in log_of(old)
        old.go_on.set()
        assert (await call).result == "old"
        await wait_until_closed(old)
        assert log_of(old)[-1] == "closed old"


@pytest.mark.spec("5.4")
async def test_closing_the_toolspace_stops_running_calls_and_closes_providers(
    write: Callable[..., Path],
) -> None:
    async with Toolspace.open(write(providers={"a": "./plug.py:Plug"}), environ={}) as ts:
        old = plug(ts, "a")
        call = asyncio.create_task(ts.call("a__rest"))
        await old.resting.wait()
        write(providers={})
        await ts.reload()
    assert (await call).error_kind == "canceled"
    assert log_of(old).count("closed hello") == 1


@pytest.mark.spec("5.4")
@pytest.mark.parametrize(
    ("invalid_config", "error"),
    [
        ({"providers": {"a": "./plug.py:Plug", "b": "./plug.py:Nobody"}}, ConfigError),
        ({"providers": {"a": {"uses": "./plug.py:Plug", "settings": {"x": 1}}}}, ConfigError),
        ({"providers": {"a": {"uses": "./plug.py:Plug", "qeue": 1}}}, ConfigError),
        ({"providers": {"a": "./plug.py:Plug"}, "functions": "./clash.py"}, ToolNameConflict),
    ],
)
async def test_an_invalid_new_configuration_changes_nothing(
    write: Callable[..., Path], folder: Path, invalid_config: dict[str, Any], error: type[Exception]
) -> None:
    (folder / "clash.py").write_text("from toolspace import tool\n@tool\ndef a__say() -> str:\n  return 'clash'\n")
    entry = {"uses": "./plug.py:Plug", "settings": {"greeting": "old"}}
    async with Toolspace.open(write(providers={"a": entry}), environ={}) as ts:
        before = plug(ts, "a")
        write(**invalid_config)
        with pytest.raises(error):
            await ts.reload()
        assert names(ts) == ["a__say", "a__rest"]
        assert plug(ts, "a") is before
        assert (await ts.call("a__say")).result == "old"
        assert log_of(before) == ["made old", "started old"]


@pytest.mark.spec("5.4")
async def test_a_reload_with_an_unlistable_provider_changes_nothing(
    write: Callable[..., Path],
) -> None:
    async with Toolspace.open(write(providers={"a": "./plug.py:Plug"}), environ={}) as ts:
        plug(ts, "a").names = None
        write(providers={"a": "./plug.py:Plug", "b": "./plug.py:Plug"})
        with pytest.raises(ProviderError, match="provider a cannot list its tools: TypeError"):
            await ts.reload()
        assert names(ts) == ["a__say", "a__rest"]


@pytest.mark.spec("5.4")
async def test_changed_user_code_is_reloaded(write: Callable[..., Path], folder: Path) -> None:
    async with Toolspace.open(write(providers={"a": "plug:Plug"}), environ={}) as ts:
        assert folder / "plug.py" in list_loaded_files()
        (folder / "plug.py").write_text(PROVIDER.replace('"hello"', '"good day"'))
        await ts.reload()
        assert (await ts.call("a__say")).result == "good day"


@pytest.mark.spec("3.2")
async def test_a_provider_that_fails_to_start_after_a_reload_is_retried(write: Callable[..., Path]) -> None:
    async with Toolspace.open(write(), environ={}) as ts:
        broken = {"uses": "./plug.py:Plug", "settings": {"broken": True}, "required": True}
        write(providers={"a": broken})
        recorder = EventRecorder(ts)
        await ts.reload()
        assert ts.orchestrator.unavailable_providers() == {"a": "nobody answers"}
        changes = len(recorder.of_type(EventType.TOOLS_CHANGED))
        plug(ts, "a").broken = False
        await recorder.wait_for(lambda _: len(recorder.of_type(EventType.TOOLS_CHANGED)) > changes)
        assert ts.orchestrator.unavailable_providers() == {}


@pytest.mark.spec("5.4")
async def test_a_hanging_provider_can_be_removed(write: Callable[..., Path]) -> None:
    async with Toolspace.open(write(), environ={}) as ts:
        hanging_settings = {"uses": "./plug.py:Plug", "settings": {"greeting": "stuck", "hangs": True}}
        write(providers={"a": hanging_settings, "b": "./plug.py:Plug"})
        recorder = EventRecorder(ts)
        reload_task = asyncio.create_task(ts.reload())
        await recorder.wait_for(lambda _: "a__say" in names(ts))
        stuck_provider = plug(ts, "a")
        await stuck_provider.hanging.wait()
        write(providers={"b": "./plug.py:Plug"})
        await ts.reload()
        await wait_until_closed(stuck_provider)
        await reload_task
        assert log_of(stuck_provider)[-1] == "closed stuck"
        assert ts.orchestrator.unavailable_providers() == {}
        assert (await ts.call("b__say")).ok


@pytest.mark.spec("5.4")
async def test_a_watched_configuration_reloads_its_providers(
    write: Callable[..., Path],
) -> None:
    async with Toolspace.open(write(), environ={}) as ts:
        recorder = EventRecorder(ts)
        ts.watch(interval=0.01)
        path = write(providers={"a": "./plug.py:Plug"})
        os.utime(path, (1, 1))
        await recorder.wait_for(lambda _: "a__say" in names(ts))
        assert (await ts.call("a__say")).result == "hello"


@pytest.mark.spec("3.1")
async def test_tools_and_providers_added_in_code_survive_a_reload(
    open_with_providers: OpenToolspace, folder: Path
) -> None:
    @tool
    async def local() -> str:
        return "here"

    shutil.copy(EXAMPLE, folder / "notes_copy.py")
    async with open_with_providers(a="./plug.py:Plug") as ts:
        ts.add_tool(local)
        await ts.add_provider(load_provider("./notes_copy.py:NotesProvider", {"file": ":memory:"}, base_dir=folder))
        await ts.reload()
        assert "notes__write" in names(ts)
        assert (await ts.call("notes__write", {"title": "a", "text": "b"})).ok
