"""`toolspace chat`: a conversation with an agent of a gateway, on a terminal or through pipes.

`command` is the entry point. `conversation` connects the parts: `conversation_view` turns events into text, `questions`
asks what pending calls need, `run_tracker` follows the runs of the agent, and a screen (`screen`, `terminal_screen`)
shows it all. Used by the command line only; talks to the gateway through `toolspace.client`.
"""
