"""The command line: `toolspace COMMAND`.

One module per command; `main` imports a command when it is used. `output`, `options`, `event_loop` and `logs` are
shared by all commands, `local_toolspace` and `gateway_connection` open what a command works with, `editors` and its
neighbours read and change the settings of editors, and `chat/` is the chat. The top layer: it may import everything,
and nothing imports it.
"""
