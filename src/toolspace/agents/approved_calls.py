"""Executes calls that were approved after their callers stopped waiting, in a context like the one that they had.

The gateway gives it to `GatewayApprovals`. It executes in the process where the call was approved.
"""

from __future__ import annotations

from toolspace.agents.agent_run import AgentRun
from toolspace.agents.background_tasks import TaskService
from toolspace.agents.registry import AgentRegistry
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.storage.queries.approvals import ApprovedCall


async def execute_approved_call(
    tools: ToolOrchestrator, agents: AgentRegistry, approved_call: ApprovedCall, host: GatewayCallHost
) -> ToolResult:
    """Executes an approved call: with the tools of the agent that made it, or with those of the toolspace."""
    approval, stored_context = approved_call.approval, approved_call.context
    context = ToolContext(
        user_id=stored_context["userId"],
        agent_id=stored_context["agentId"],
        agent_entity_id=approval.agent_entity_id,
        run_id=approval.run_id,
        space_id=approval.space_id,
        session_id=stored_context["sessionId"],
        task_id=stored_context["taskId"] or "",
        memory_dir=stored_context["memoryDir"],
        session_dir=stored_context["sessionDir"],
        host=host,
    )
    agent_name = stored_context["agentId"]
    if agent_name is None or agents.find(agent_name) is None:
        return await _execute(tools, approved_call, context)
    async with agents.acquire(agent_name) as prepared_agent:
        context.agent = AgentRun(prepared_agent.agent)
        if approval.agent_entity_id is not None:
            is_task = bool(stored_context["taskId"])
            session_id = host.session_id or approval.agent_entity_id
            context.tasks = TaskService(host.ledger, session_id, is_task=is_task)
        window = prepared_agent.model.context_window
        return await _execute(prepared_agent.tools, approved_call, context, context_window=window)


async def _execute(
    tools: ToolOrchestrator, approved_call: ApprovedCall, context: ToolContext, *, context_window: int | None = None
) -> ToolResult:
    """Executes the call. The call of a run gets a run of the same id: its own may be gone, or in another process."""
    approval = approved_call.approval
    if approval.run_id is None:
        return await tools.execute(approval.tool_name, approval.args, context=context, call_id=approval.id)
    # Without the policy of the run: it has let the call pass before the approval was asked for.
    run = tools.run(id=approval.run_id, context=context, session=context.session_id or "")
    if run.context_window is None:
        run.context_window = context_window
    try:
        result = await tools.execute(approval.tool_name, approval.args, context=context, run=run, call_id=approval.id)
    except BaseException:
        run.trace.end("canceled")
        raise
    run.trace.end("ok" if result.ok else "error")
    return result
