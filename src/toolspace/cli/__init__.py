"""The command line: `toolspace COMMAND`.

One module per command; `main` imports a command when it is used, and has shell completion. `options`, `output`,
`event_loop` and `logs` are shared by all commands. `local_toolspace` and `gateway_connection` open what a command works
with. `editor_files` and `editor_import` read and replace the settings files of editors, for `install` and `init`.
`chat/` is the chat. The top layer: it may import everything, and nothing imports it.
"""
