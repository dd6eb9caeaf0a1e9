"""`agent__task_status`: the agent says how far it is. An event for people, a nudge for a model that is done."""

from __future__ import annotations

from typing import Any, Literal

from toolspace.core.context import ToolContext
from toolspace.core.function import FunctionTool, tool
from toolspace.core.tool import Annotations, ToolCategory

Status = Literal["starting", "in-progress", "completed"]


def task_status_tool() -> FunctionTool:
    settings = Annotations(read_only=True, idempotent=True)
    return tool(name="task_status", category=ToolCategory.AGENT, annotations=settings)(_task_status)


async def _task_status(
    status: Status,
    done: str = "",
    pending: str = "",
    now: str = "",
    ready_for_final_report: bool = False,
    need_to_run_more_tools: bool = False,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Reports progress on the task, for the people who watch.

    Args:
        status: Where the task stands.
        done: What has been completed.
        pending: What remains.
        now: The step being taken now.
        ready_for_final_report: Whether the final report could be given now.
        need_to_run_more_tools: Whether more tools have to run first.
    """
    report: dict[str, Any] = {
        "status": status,
        "done": done,
        "pending": pending,
        "now": now,
        "ready_for_final_report": ready_for_final_report,
        "need_to_run_more_tools": need_to_run_more_tools,
    }
    run = context.run
    if run is not None:
        run.task_status = report
    if context.handle is not None:
        context.handle.report_status(report)
    nudge = run.nudge if run is not None else None
    return {"received": True, "next": nudge} if nudge else {"received": True}
