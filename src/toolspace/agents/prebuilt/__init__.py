"""The prebuilt tools of every resident agent: spaces and messages, inbox, goals, memories, plans, notifications.

`action.py` defines an action; the other modules define the actions of one subject each; `provider.py` offers them as
tools. The gateway registers the provider, and configuration can give an action another name. Imports spaces, storage
and core.
"""
