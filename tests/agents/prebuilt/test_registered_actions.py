"""Prebuilt actions that programs, files of functions and plugins register."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.imported_modules import restore_imports
from tests.server.gateway_api import write_config
from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    agent_config,
    list_result_texts,
    offered_tools,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace import ConfigError, ToolContext, ToolNameConflict, Toolspace, prebuilt
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, get_action
from toolspace.core import prebuilt_actions
from toolspace.core.prebuilt_actions import RESERVED_ACTION_NAMES, to_snake_case
from toolspace.errors import ToolDefinitionError

pytestmark = pytest.mark.spec("9.6")

ACTIONS = '''
from toolspace import ToolContext, prebuilt

@prebuilt("lookUpOrder")
async def look_up(order_id: str, context: ToolContext, limit: int = 5) -> dict:
    """Looks up an order of the shop.

    Args:
        order_id: The number on the receipt.
    """
    return {"order": order_id, "limit": limit, "agent": context.agent_entity_id, "run": context.run_id}
'''
TOOL = {"name": "orders", "executionType": "prebuilt", "execution": {"action": "lookUpOrder"}}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty registry, and the modules and paths as they were."""
    monkeypatch.setattr(prebuilt_actions, "_actions", {})
    with restore_imports():
        yield


async def test_a_program_registers_an_action_that_configured_tools_offer(tmp_path: Path) -> None:
    @prebuilt("addNumbers")
    def add(a: int, b: int = 1, *, context: ToolContext) -> int:
        """Adds two numbers."""
        return a + b

    tool = {**TOOL, "name": "sum", "execution": {"action": "addNumbers"}}
    async with Toolspace.open(write_config(tmp_path, tools=[tool])) as ts:
        definition = ts.find_tool("sum")
        assert definition is not None
        assert (definition.description, definition.execution_type) == ("Adds two numbers.", "prebuilt")
        assert definition.visible is False
        assert set(definition.input_schema["properties"]) == {"a", "b"}
        assert (await ts.call("sum", {"a": 2})).result == 3
        assert (await ts.call("sum", {"a": "x"})).error_kind == "invalid_parameters"
    assert add(2, context=ToolContext()) == 3  # It is still a function.


async def test_an_agent_uses_an_action_of_a_file_of_functions_and_members_see_only_its_name(tmp_path: Path) -> None:
    (tmp_path / "actions.py").write_text(ACTIONS)
    async with open_model_server() as model_server:
        agents = {"ada": agent_config(model_server, tools=[TOOL])}
        async with open_agent_gateway(
            tmp_path, model_server, agents=agents, functions="./actions.py", tools=[{**TOOL, "name": "shared"}]
        ) as setup:
            enter = ("enter_space", {"spaceId": ROOM})
            first_call, second_call = ("orders", {"order_id": "A-7"}), ("shared", {"order_id": "B-8"})
            model_server.script(tool_calls_turn(enter, first_call, second_call))
            await setup.say("Where is my order?")
            run = await setup.wait_for_run_end()
            first, second = model_server.list_requests()
            assert offered_tools(first)["orders"]["description"] == "Looks up an order of the shop."
            orders = offered_tools(first)["orders"]["parameters"]["properties"]
            assert orders["order_id"]["description"] == "The number on the receipt."
            assert "look_up" not in offered_tools(first)  # Only tools of the configuration offer an action.
            results = list_result_texts(second)
            assert '"order":"A-7"' in results[1]
            assert run["agentEntityId"] in results[1]
            assert run["id"] in results[1]
            assert '"order":"B-8"' in results[2]
            person = await setup.api.member(PERSON)
            stream = await person.get(f"/api/runs/{run['id']}/events?from=start&until=run.done")
            assert b'"toolName":"orders"}' in stream.body
            assert b"A-7" not in stream.body


async def test_a_changed_file_replaces_its_actions_and_an_action_may_move_to_another_file(tmp_path: Path) -> None:
    source = tmp_path / "actions.py"
    source.write_text(ACTIONS)
    path = write_config(tmp_path, tools=[TOOL], functions=["./actions.py"])
    async with Toolspace.open(path) as ts:
        source.write_text(ACTIONS.replace("look_up(", "renamed(").replace('"order":', '"receipt":'))
        await ts.reload()
        assert (await ts.call("orders", {"order_id": "A-7"})).result["receipt"] == "A-7"
        (tmp_path / "more.py").write_text(ACTIONS.replace('"order":', '"moved":'))
        source.write_text("from toolspace import tool\n\n@tool\ndef hello() -> str:\n    return 'hello'\n")
        write_config(tmp_path, tools=[TOOL], functions=["./more.py", "./actions.py"])
        await ts.reload()
        assert (await ts.call("orders", {"order_id": "A-7"})).result["moved"] == "A-7"


async def test_one_name_in_the_functions_setting_may_be_an_action(tmp_path: Path) -> None:
    (tmp_path / "actions.py").write_text(ACTIONS)
    async with Toolspace.open(write_config(tmp_path, tools=[TOOL], functions=["./actions.py:look_up"])) as ts:
        assert (await ts.call("orders", {"order_id": "A-7"})).result["order"] == "A-7"


async def test_the_module_of_a_provider_registers_actions(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        f"{ACTIONS}\nfrom toolspace import ToolRegistry\n\nclass Shop(ToolRegistry):\n    pass\n"
    )
    path = write_config(tmp_path, tools=[TOOL], providers={"shop": {"uses": "./shop.py:Shop"}})
    async with Toolspace.open(path) as ts:
        assert (await ts.call("orders", {"order_id": "A-7"})).result["order"] == "A-7"


def _install(site: Path, package: str, entry: str, source: str = ACTIONS) -> None:
    """Installs a package with an entry point."""
    site.mkdir(exist_ok=True)
    (site / f"{package}.py").write_text(source)
    info = site / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[toolspace.prebuilt]\n{entry}\n")


async def test_an_installed_package_offers_actions_by_entry_points(tmp_path: Path) -> None:
    _install(tmp_path / "site", "shop_actions", "lookUpOrder = shop_actions:look_up")
    sys.path.insert(0, str(tmp_path / "site"))
    async with Toolspace.open(write_config(tmp_path, tools=[TOOL])) as ts:
        assert (await ts.call("orders", {"order_id": "A-7"})).result["order"] == "A-7"


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            {"shop_a": "lookUpOrder = shop_a:look_up", "shop_b": "lookUpOrder = shop_b:look_up"},
            r"is offered twice, by shop_(.):look_up \(shop_\1 1.2\) and shop_(.):look_up \(shop_\2 1.2\)",
        ),
        ({"shop_a": "lookUpOrder = shop_a:ToolContext"}, r'is no prebuilt action "lookUpOrder"; decorate'),
        ({"shop_a": "lookUpOrder = shop_a:missing"}, "cannot be imported"),
    ],
)
async def test_a_wrong_entry_point_is_reported(tmp_path: Path, entries: dict[str, str], reason: str) -> None:
    for package, entry in entries.items():
        _install(tmp_path / "site", package, entry)
    sys.path.insert(0, str(tmp_path / "site"))
    with pytest.raises(ConfigError, match=reason):
        await Toolspace.open(write_config(tmp_path, tools=[TOOL])).__aenter__()


async def test_two_actions_of_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(ACTIONS)
    (tmp_path / "b.py").write_text(ACTIONS.replace("look_up(", "look_up_too("))
    with pytest.raises(ConfigError, match=r'"lookUpOrder" is offered by look_up \(.*a.py:.*look_up_too \(.*b.py:'):
        await Toolspace.open(write_config(tmp_path, tools=[TOOL], functions=["./a.py", "./b.py"])).__aenter__()


@pytest.mark.parametrize("name", ["setGoals", "set_goals", "getMemory", "skip"])
def test_the_names_of_own_actions_are_reserved(name: str) -> None:
    with pytest.raises(
        ToolNameConflict, match=rf'"{name}" is offered by Toolspace and by .*test_registered_actions.py'
    ):

        @prebuilt(name)
        def act() -> None:
            """Acts."""


def test_every_own_action_is_reserved() -> None:
    camel = ("setMemory", "getMemory", "createPlan", "getPlan", "queryKnowledge")
    assert {*ALL_ACTIONS, *map(to_snake_case, camel)} == RESERVED_ACTION_NAMES


def test_an_unknown_action_gets_the_nearest_names() -> None:
    @prebuilt("lookUpOrder")
    def look_up() -> None:
        """Looks up."""

    with pytest.raises(ToolDefinitionError, match='did you mean "lookUpOrder"'):
        get_action("lookupOrder")
    wrong: Any = look_up
    with pytest.raises(ToolDefinitionError, match=r'write @prebuilt\("name"\)'):
        prebuilt(wrong)
