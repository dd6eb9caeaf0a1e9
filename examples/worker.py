"""A worker: executes the calls of one external tool of a gateway, on any machine."""

import os

from toolspace import ToolWorker

worker = ToolWorker(os.environ["TOOLSPACE_URL"], secret_key=os.environ["TOOLSPACE_SECRET_KEY"])


@worker.tool("executeRobotAction")
async def execute(action: str, steps: int = 1) -> dict[str, object]:
    return {"moved": action, "steps": steps}


worker.run_forever()
