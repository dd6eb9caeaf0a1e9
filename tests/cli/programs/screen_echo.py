"""Shows on the screen of a chat what the person does: each action as a line. `stream` makes it write a message."""

import asyncio

from toolspace.cli.chat.screen import ControlKey, SubmittedLine, open_screen
from toolspace.cli.output import CommandOutput


async def main() -> None:
    async with open_screen(CommandOutput()) as screen:
        while True:
            action = await screen.read()
            if isinstance(action, SubmittedLine):
                screen.line(f"line {action.text!r} of {len(action.text)}")
                if action.text == "stream":
                    screen.start_message("Robot", is_agent=True)
                    screen.show_activity("Robot is working")
                elif action.text == "provisional":
                    screen.start_message("Robot", is_agent=True, is_provisional=True)
                elif action.text.startswith("more "):
                    screen.append_text(action.text[5:].replace("|", "\n"))
                elif action.text == "withdraw":
                    screen.withdraw_message()
                elif action.text == "end":
                    screen.end_message()
                    screen.show_activity(None)
                elif action.text.startswith("ask "):
                    screen.set_prompt(action.text[4:])
            else:
                screen.line(action.name)
                if action is ControlKey.END:
                    return
                screen.clear_input()


asyncio.run(main())
