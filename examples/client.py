"""A client of a gateway: creates a space, sends a message, calls a tool and reads the events of the space."""

import asyncio
import os

from toolspace import ToolspaceClient


async def main() -> None:
    async with ToolspaceClient(os.environ["TOOLSPACE_URL"], secret_key=os.environ["TOOLSPACE_SECRET_KEY"]) as client:
        ada = await client.entities.create("human", "Ada")
        robot = await client.entities.create("agent", "Robot")
        space = await client.spaces.create("Workshop", members=[ada.id, robot.id])
        await client.spaces.send_message(space.id, "What time is it?", entity_id=ada.id)

        (request_event,) = await client.agents.list_inbox(robot.id)
        print("the robot is asked:", request_event.data["content"])

        run = await client.runs.open(robot.id, space_id=space.id)
        result = await client.runs.call(run.id, "current_time", {"timezone": "UTC"})
        await client.runs.call(run.id, "send_message", {"text": f"It is {result.unwrap()}."})
        await client.runs.close(run.id)

        async for event in client.spaces.subscribe(space.id, from_start=True):
            print(event.id, event.type)
            if event.type == "run.done":
                break


asyncio.run(main())
